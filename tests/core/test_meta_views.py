"""What each role is shown of a job and woken for: all that it decides by, and little else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.meta import messages as m
from awex_core.meta.answers import Answers, show
from awex_core.meta.client import ControllerClient, MetaClient, WorkerClient, WriterClient
from awex_core.meta.machine import TICK, Entry, Machine
from awex_core.meta.server import MetaServer
from awex_core.meta.store import JobStore
from awex_core.meta.views import fill_in, frontier, narrow, position_of
from awex_core.version import Version
from tests.core.test_meta_machine import BEGIN, entry
from tests.core.test_meta_server import TOKEN, in_thread, until
from tests.core.test_meta_store import announce, controller, worker, writer
from tests.support.meta.any_client import AnyClient

EXAMPLES = 150

AUDIENCES: list[tuple[m.Role, str]] = [
    ("writer", ""),
    *((role, engine) for role in ("worker", "controller") for engine in "ab"),  # type: ignore[misc]
]


def shown(store: JobStore, role: m.Role, engine: str, now: float, roster: int = 0) -> m.JobView:
    watch = m.Watch(since=0, wait_s=0, role=role, engine=engine, roster=roster)
    return show(store, store.view(now, ()), watch, roster)


def acted_on(view: m.JobView, role: m.Role, engine: str) -> object:
    """What a role decides by, of what it is shown: neither clocks, nor what only counts once it is complete."""

    def sync(seen: m.SyncView | None) -> object:
        if seen is None:
            return None
        parts = {}
        for name, part in seen.engines.items():
            if role == "writer":
                done = (part.outcome, part.figures) if seen.state == "done" else ()
                part = (part.outcome == "failed", part.resends, part.reason, done)
            elif name != engine:
                part = part.outcome if seen.state == "done" else ""
            parts[name] = part
        digests = {name: found for name, found in seen.digests.items() if not found.missing}
        gathering = seen.state == "gathering"  # what it will be is fixed when it opens
        return [seen.version, seen.state, gathering or [parts, digests, seen.reason, seen.superseded, seen.only]]

    engines: dict[str, object] = {}
    for name, seen in view.engines.items():
        if role == "writer":
            engines[name] = (seen.live, seen.generation, seen.parked, seen.workers)
        elif name == engine or name in view.catch_ups:
            engines[name] = msgspec.structs.replace(seen, gone_s=0.0)
    position = position_of(view.engines.get(engine))
    ahead = [(name, view.engines[name].version) for name in frontier(view.engines.values(), position)]
    catch_ups = {
        name: (found.source, found.number, found.lenders if found.sync.state == "open" else [], sync(found.sync))
        for name, found in view.catch_ups.items()
    }
    behind = ahead if role == "controller" else []
    return [view.epoch, view.writers, engines, sync(view.sync), sync(view.last), catch_ups, behind]


engines, ranks, versions = st.sampled_from("ab"), st.integers(0, 1), st.builds(Version, st.just(1), st.integers(0, 3))
groups = st.sampled_from(("default", "canary"))
by_worker = st.builds("{}-{}-1".format, engines, ranks)
by_controller = st.builds("{}-c1".format, engines)
moves = st.one_of(
    st.builds(
        lambda rank, number: msgspec.structs.replace(
            announce(rank, number), edition=m.Edition(groups=["canary"] if number == 2 else [])
        ),
        ranks,
        st.integers(1, 3),
    ),
    st.builds(m.Pin, group=groups, version=st.sampled_from((None, Version(1, 1), Version(1, 2)))),
    st.builds(m.Promote, version=versions, groups=st.sampled_from(([], ["canary"]))),
    st.builds(
        m.ReportWorker,
        incarnation=by_worker,
        version=versions,
        failed=st.sampled_from((False, False, False, True)),
        prefetched=st.booleans(),
        resend=st.sampled_from(([], [], [1])),
    ),
    st.builds(
        m.ReportEngine,
        incarnation=by_controller,
        version=versions,
        outcome=st.sampled_from(("updating", "committed", "committed", "failed")),
    ),
    st.builds(
        m.SetEngineState,
        incarnation=by_controller,
        version=st.sampled_from((Version(), Version(1, 1))),
        state=st.sampled_from(("ready", "torn")),
    ),
    st.builds(m.AskCatchUp, incarnation=by_controller, timeout_s=st.just(6.0), verify=st.just("off")),
    st.builds(
        lambda source, rank: m.Lend(
            incarnation=f"{source}-{rank}-1",
            target="b" if source == "a" else "a",
            info=writer(rank, 2, process=worker(source, rank, 2).info.process).info,
        ),
        engines,
        ranks,
    ),
    st.builds(
        lambda engine, rank, layout, weights: worker(engine, rank, 2, layout=layout, weights=weights),
        engines,
        ranks,
        st.sampled_from(("L", "K", "")),
        st.sampled_from(("held", "held", "released")),
    ),
    st.builds(
        lambda engine, life: controller(engine, life, group="canary" if engine == "b" else "default"),
        engines,
        st.integers(1, 2),
    ),
    st.builds(m.Leave, incarnation=by_worker | by_controller),
    st.builds(
        lambda rank, version, layout: m.PublishDigest(
            incarnation=f"run1-w{rank}", version=version, digests={layout: b"1" * 512}
        ),
        ranks,
        versions,
        st.sampled_from("LK"),
    ),
    st.builds(m.Supersede, incarnation=st.just("run1-w0"), number=st.integers(1, 3)),
    st.builds(writer, ranks, st.just(2), st.sampled_from(("run1", "run1", "run2")), moved=st.integers(0, 2)),
    st.builds(m.Heartbeat, incarnations=st.lists(by_worker | by_controller, max_size=3)),
)
"""What members that are there do, so that most of it is taken."""

logs = st.lists(
    st.tuples(st.builds(entry, moves) | st.just(Entry(TICK)), st.sampled_from((0.0, 0.0, 0.0, 0.0, 4.0, 120.0))),
    max_size=40,
)
START = [
    writer(0, 2),
    writer(1, 2),
    *(worker(engine, rank, 2, layout="L") for engine in "ab" for rank in (0, 1)),
    controller("a"),
    controller("b", group="canary"),
    announce(0),
    announce(1),
]


def timed(log: list[tuple[Entry, float]]) -> Iterator[tuple[Entry, float]]:
    now = 0.0
    for message in START:
        yield entry(message), now
    for one, passed in log:
        now += passed
        yield one, now


@settings(max_examples=EXAMPLES, deadline=None)
@given(logs)
def test_nobody_sleeps_through_what_it_decides_by(log: list[tuple[Entry, float]]) -> None:
    """Where nothing is said to have changed for a role, nothing has."""
    machine = Machine.begin("job", BEGIN, 0.0)
    before: dict[tuple[m.Role, str], tuple[int, object]] = {}
    for one, now in timed(log):
        machine.apply(one, now)
        for audience in AUDIENCES:
            change = machine.store.last_change(*audience)
            seen = acted_on(shown(machine.store, *audience, now), *audience)
            known = before.get(audience)
            assert known is None or known[0] <= change
            assert known is None or known[0] < change or known[1] == seen, (audience, one)
            before[audience] = change, seen


@settings(max_examples=EXAMPLES, deadline=None)
@given(logs, st.sets(st.integers(0, 60)))
def test_a_view_is_put_together_from_what_has_changed(log: list[tuple[Entry, float]], looks: set[int]) -> None:
    """However seldom a member looks."""
    machine = Machine.begin("job", BEGIN, 0.0)
    held: dict[tuple[m.Role, str], m.JobView] = {}
    for step, (one, now) in enumerate(timed(log)):
        machine.apply(one, now)
        for audience in AUDIENCES if step in looks else ():
            before = held.get(audience)
            part = shown(machine.store, *audience, now, before.revision if before else 0)
            held[audience] = fill_in(part, before) or pytest.fail("it builds on what is not held")
            assert held[audience] == shown(machine.store, *audience, now)


def job(ranks: int = 2, engines: int = 2, world: int = 2) -> Machine:
    """All are there, and all ranks but the last have announced version 1."""
    machine = Machine.begin("job", BEGIN, 0.0)
    store = machine.store
    for rank in range(ranks):
        store.join_writer(writer(rank, ranks), 0)
    for engine in range(engines):
        store.join_controller(controller(f"e{engine}"), 0)
        for rank in range(world):
            store.join_worker(worker(f"e{engine}", rank, world, layout=f"L{rank}"), 0)
    for rank in range(ranks - 1):
        store.announce(announce(rank), 0)
    return machine


def changes(store: JobStore) -> dict[tuple[str, str], int]:
    return {
        (role, engine): store.last_change(role, engine)
        for role in get_args(m.Role)
        for engine in ("e0", "e1")  # writers and observers have none, and are the same for both
    }


def changed(store: JobStore, before: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    """Whom it concerns what has happened since; those who look on are left out, as it is everything for them."""
    after = changes(store)
    found = {(role, "" if role == "writer" else engine) for (role, engine) in after if role != "observer"}
    return {(role, engine) for role, engine in found if after[role, engine or "e0"] != before[role, engine or "e0"]}


ALL = {("writer", ""), *((role, engine) for role in ("worker", "controller") for engine in ("e0", "e1"))}
OF_E0 = {("worker", "e0"), ("controller", "e0")}


def test_who_is_woken_by_what() -> None:
    store = job(ranks=3).store
    before = changes(store)
    store.announce(announce(1), 0)
    assert changed(store, before) == set(), "one rank of many has arrived"
    store.announce(announce(2), 0)
    assert changed(store, before) == ALL, "the version opens"
    first = Version(1, 1)
    for step in (
        m.ReportWorker(incarnation="e0-0-1", version=first, prefetched=True),
        m.ReportEngine(incarnation="e0-c1", version=first, outcome="updating"),
        m.SetEngineState(incarnation="e0-c1", state="updating", version=Version()),
        m.ReportWorker(incarnation="e0-0-1", version=first, figures={"x_s": 1.0}),
        m.ReportWorker(incarnation="e0-1-1", version=first),
    ):
        before = changes(store)
        getattr(store, name_of(step))(step, 0)
        assert changed(store, before) == OF_E0, step
    before = changes(store)
    store.report_engine(m.ReportEngine(incarnation="e0-c1", version=first, outcome="committed"), 0)
    assert changed(store, before) == {*OF_E0, ("controller", "e1")}, "there is a version to be behind"
    before = changes(store)
    store.report_worker(m.ReportWorker(incarnation="e1-0-1", version=first, resend=[3]), 0)
    assert changed(store, before) == {("writer", ""), ("worker", "e1"), ("controller", "e1")}
    before = changes(store)
    store.report_worker(m.ReportWorker(incarnation="e1-0-1", version=first, failed=True), 0)
    assert changed(store, before) == ALL, "no engine is left, so the version is done"


def name_of(message: msgspec.Struct) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(message).__name__).lstrip("_")


def test_a_digest_wakes_its_workers_once_it_is_complete() -> None:
    store = job().store
    store.announce(announce(1), 0)
    before = changes(store)
    for rank in (0, 1):
        assert changed(store, before) == set()
        part = m.PublishDigest(incarnation=f"run1-w{rank}", version=Version(1, 1), digests={"L0": b"1" * 512})
        store.publish_digest(part, 0)
    assert changed(store, before) == {("worker", "e0"), ("worker", "e1")}


def test_each_role_is_shown_its_part() -> None:
    machine = job(ranks=3, engines=3)
    store = machine.store
    store.announce(announce(2), 0)
    store.publish_digest(m.PublishDigest(incarnation="run1-w0", version=Version(1, 1), digests={"L0": b"1" * 512}), 0)
    whole = store.view(0)
    assert narrow(whole, "observer", "") is whole and whole.sync is not None and whole.sync.arrived == [0, 1, 2]
    of_writer, of_worker, of_controller = (
        shown(store, *audience, 0) for audience in (("writer", ""), ("worker", "e1"), ("controller", "e1"))
    )
    assert of_writer.writers == of_worker.writers == whole.writers and of_writer.engines == whole.engines
    assert of_controller.writers == whole.writers[:1], "for the model's name"
    assert set(of_worker.engines) == {"e1"} and of_worker.engines["e1"] == whole.engines["e1"]
    assert of_controller.engines["e1"] == whole.engines["e1"]
    assert all(not seen.workers for name, seen in of_controller.engines.items() if name != "e1")
    for view, digests in ((of_writer, set()), (of_worker, {"L0"}), (of_controller, set())):
        assert view.sync is not None and set(view.sync.digests) == digests and view.sync.arrived == []


def test_what_is_sent_to_each_of_many_is_small() -> None:
    """When a version opens, to those who hold the ranks and workers: they were many times as much."""
    store = job(ranks=256, engines=16, world=8).store
    known = store.revision
    store.announce(announce(255), 0)
    whole = len(msgspec.msgpack.encode(store.view(0)))
    assert whole > 90_000
    for audience, most in ((("writer", ""), 8_000), (("worker", "e1"), 1_500), (("controller", "e1"), 4_000)):
        sent = len(msgspec.msgpack.encode(shown(store, *audience, 0, known)))
        assert sent < most, (audience, sent, whole)


def test_an_answer_is_encoded_once_for_all_who_get_the_same() -> None:
    answers, store = Answers(), job().store
    watch = m.Watch(since=0, wait_s=0, role="worker", engine="e0")
    first = answers.encoded(store, "s", watch, 0)
    assert answers.encoded(store, "s", msgspec.structs.replace(watch, since=7), 0) is first
    other = answers.encoded(store, "s", msgspec.structs.replace(watch, engine="e1"), 0)
    assert other is not first and answers.encoded(store, "s", watch, 0) is first
    store.announce(announce(1), 0)
    assert answers.encoded(store, "s", watch, 0) != first
    part = answers.encoded(store, "s", msgspec.structs.replace(watch, source="s", roster=store.revision), 0)
    assert msgspec.msgpack.decode(part, type=m.JobView).same_writers
    stranger = msgspec.structs.replace(watch, source="another", roster=store.revision)
    whole = msgspec.msgpack.decode(answers.encoded(store, "s", stranger, 0), type=m.JobView)
    assert whole.writers and not whole.same_writers, "its revisions are another server's"


# Over HTTP


@pytest.fixture
def server() -> Iterator[MetaServer]:
    with MetaServer(TOKEN, lease_s=30) as server:
        yield server


def members(server: MetaServer) -> dict[str, MetaClient]:
    made: dict[str, tuple[type[MetaClient], str]] = {
        "writer": (WriterClient, ""),
        "worker of e0": (WorkerClient, "e0"),
        "worker of e1": (WorkerClient, "e1"),
        "controller of e1": (ControllerClient, "e1"),
    }
    return {name: kind(server.address, "job", TOKEN, engine=engine) for name, (kind, engine) in made.items()}


def test_a_long_poll_ends_at_what_concerns_its_member(server: MetaServer) -> None:
    clients = members(server)
    with AnyClient(server.address, "job", TOKEN) as all_roles:
        for rank in (0, 1):
            all_roles.join_writer(writer(rank, 2).info)
        for engine in ("e0", "e1"):
            all_roles.join_controller(engine, controller(engine).process)
            all_roles.join_worker(worker(engine).info)
        all_roles.announce("run1-w0", 1, timeout_s=30, verify="off")
        views = {name: client.watch() for name, client in clients.items()}
        polls = {name: in_thread(lambda c=clients[name], v=view: c.watch(v, 20)) for name, view in views.items()}
        time.sleep(0.1)
        all_roles.announce("run1-w1", 1, timeout_s=30, verify="off")
        for name, (thread, results) in polls.items():
            thread.join(10)
            assert results[0].sync.state == "open" and results[0].sync.version == Version(1, 1), name
            assert results[0].writers == views[name].writers and results[0].same_writers is False, name
            views[name] = results[0]
        polls = {name: in_thread(lambda c=clients[name], v=view: c.watch(v, 20)) for name, view in views.items()}
        time.sleep(0.1)
        all_roles.report_engine("e0-c1", Version(1, 1), "updating")
        until(lambda: polls["worker of e0"][1])
        time.sleep(0.1)
        assert [name for name, (_, results) in polls.items() if results] == ["worker of e0"]
        all_roles.report_engine("e1-c1", Version(1, 1), "failed", reason="so")
        for name, (thread, results) in polls.items():
            thread.join(10)
            assert results, name
    for client in clients.values():
        client.close()


def test_a_server_that_was_restarted_is_not_taken_for_the_one_before(server: MetaServer) -> None:
    """Though its revisions may be lower, and ranks and workers are others under the same numbers."""
    host, port = server.address.split(":")
    with AnyClient(server.address, "job", TOKEN) as all_roles, WriterClient(server.address, "job", TOKEN) as client:
        all_roles.join_writer(writer(0, 1).info)
        all_roles.join_worker(worker("e0").info)
        before = client.watch()
        server.stop()
        with MetaServer(TOKEN, host=host, port=int(port)):
            all_roles.join_worker(worker("e1").info)
            ahead = msgspec.structs.replace(before, revision=before.revision + (1 << 40))
            after = client.watch(ahead, 20)
            assert after.writers == [] and list(after.engines) == ["e1"] and after.engines["e1"].workers
