"""The rules of one job, one by one, at times the test chooses."""

from __future__ import annotations

import re
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from awex_core.errors import Fenced, Refused
from awex_core.layout import content_hash
from awex_core.meta import messages as m
from awex_core.meta.limits import Limits
from awex_core.meta.store import JobStore, SavedJob
from awex_core.meta.sync import TERMINAL
from awex_core.version import Version

LEASE = 10.0
FIRST = Version(1, 1)


def process(name: str, pid: int = 7) -> m.Process:
    return m.Process(incarnation=name, host="host-a", pid=pid)


def writer(rank: int = 0, world: int = 1, run: str = "run1", **changes) -> m.JoinWriter:
    fields = {
        "layout": f"L{rank}",
        "endpoints": {"shm": "E"},
        "manifest": "M",
        "process": process(f"{run}-w{rank}"),
        **changes,
    }
    return m.JoinWriter(info=m.WriterInfo(rank=rank, world=world, run=run, **fields))


def worker(engine: str = "e", rank: int = 0, world: int = 1, life: int = 1, **changes) -> m.JoinWorker:
    fields = {"controlled": True, "process": process(f"{engine}-{rank}-{life}", pid=100 + rank), **changes}
    return m.JoinWorker(info=m.WorkerInfo(engine=engine, rank=rank, world=world, **fields))


def controller(engine: str = "e", life: int = 1, **changes) -> m.JoinController:
    return m.JoinController(engine=engine, process=process(f"{engine}-c{life}"), **changes)


def announce(rank: int = 0, number: int = 1, run: str = "run1", timeout_s: float = 60, verify: str = "off"):
    return m.Announce(incarnation=f"{run}-w{rank}", number=number, timeout_s=timeout_s, verify=verify)


def report(outcome: m.EngineOutcome, engine: str = "e", version: Version = FIRST, **changes):
    return m.ReportEngine(incarnation=f"{engine}-c1", version=version, outcome=outcome, **changes)


def hold(store: JobStore, engine: str = "e", workers: int = 1, now: float = 0) -> None:
    """All workers of an engine say that they hold the first version."""
    for rank in range(workers):
        assert store.report_worker(m.ReportWorker(incarnation=f"{engine}-{rank}-1", version=FIRST), now).accepted


def beat(store: JobStore, now: float, *names: str) -> list[str]:
    return store.heartbeat(m.Heartbeat(incarnations=list(names)), now).unknown


def new_store(**limits) -> JobStore:
    return JobStore("job", lease_s=LEASE, limits=Limits(**limits))


def ready_store(writers: int = 1, engines: tuple[str, ...] = ("e",), workers: int = 1) -> JobStore:
    """Everyone has joined at time 0, in epoch 1."""
    store = new_store()
    for rank in range(writers):
        store.join_writer(writer(rank, writers), 0)
    for engine in engines:
        for rank in range(workers):
            store.join_worker(worker(engine, rank, workers), 0)
        store.join_controller(controller(engine), 0)
    return store


def open_store(**sizes) -> JobStore:
    store = ready_store(**sizes)
    store.announce(announce(), 0)
    return store


def sync_of(store: JobStore, now: float = 0) -> m.SyncView:
    sync = store.view(now).sync
    assert sync is not None
    return sync


def entry(store: JobStore, engine: str = "e") -> m.EngineSync:
    return sync_of(store).engines[engine]


@contextmanager
def refused(code: str, match: str):
    with pytest.raises(Refused, match=match) as raised:
        yield
    assert raised.value.code == code


# Writers


def test_a_run_becomes_active_when_its_last_rank_joins():
    store = new_store()
    assert store.join_writer(writer(1, 2), 0).epoch == 0
    assert store.view(0).writers == []
    assert store.status(0).forming.missing == [0]
    assert store.join_writer(writer(0, 2), 0).epoch == 1
    assert [info.rank for info in store.view(0).writers] == [0, 1]
    assert store.status(0).forming is None


def test_joining_again_changes_nothing_and_returns_the_epoch():
    store = ready_store(writers=2)
    before = store.revision
    assert store.join_writer(writer(1, 2), 1).epoch == 1
    assert store.revision == before


def test_a_new_run_fences_the_old_one_and_fails_its_sync():
    store = open_store()
    generation = store.view(0).engines["e"].generation
    assert store.join_writer(writer(run="run2"), 0).epoch == 2
    assert sync_of(store).state == "done"
    assert "run run2 took over" in entry(store).reason
    assert store.view(0).engines["e"].generation > generation
    with pytest.raises(Fenced, match=r"run run1.*replaced by run run2"):
        store.announce(announce(number=2), 0)
    with pytest.raises(Fenced, match="run2"):
        store.join_writer(writer(), 0)
    assert beat(store, 0, "run1-w0", "run2-w0") == ["run1-w0"]


def test_the_old_run_stays_active_while_the_new_one_forms():
    store = ready_store()
    store.join_writer(writer(0, 2, "run2"), 0)
    store.announce(announce(), 0)
    with refused("invalid", r"run run2 is not complete: ranks \[1\]"):
        store.announce(announce(run="run2"), 0)


def test_a_newer_run_replaces_one_that_never_became_complete():
    store = new_store()
    store.join_writer(writer(0, 2, "run1"), 0)
    store.join_writer(writer(0, 1, "run2"), 0)
    with pytest.raises(Fenced, match="1 of 2 ranks had joined"):
        store.join_writer(writer(1, 2, "run1"), 0)


def test_a_rank_that_goes_while_its_run_forms_must_join_again():
    store = new_store()
    store.join_writer(writer(0, 2), 0)
    store.tick(LEASE)
    assert store.join_writer(writer(1, 2), LEASE).epoch == 0
    assert store.join_writer(writer(0, 2, process=process("again")), LEASE).epoch == 1


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (writer(1, 3), "says world 3, rank 0 says 2"),
        (writer(1, 2, manifest="other"), "says manifest 'other', rank 0 says 'M'"),
        (writer(0, 2, process=process("second")), "is held by pid 7 on host host-a already"),
        (writer(1, 2, process=process("run1-w0")), "is rank 0 of run run1 already"),
        (writer(2, 2), "ranks count from 0"),
        (writer(1, 2, layout="x" * 300), "layout has 300 characters"),
        (writer(1, 2, process=process("")), "incarnation is empty"),
    ],
)
def test_ranks_of_a_run_must_agree(second, match):
    store = new_store()
    store.join_writer(writer(0, 2), 0)
    before = store.view(0)
    with refused("invalid", match):
        store.join_writer(second, 0)
    assert store.view(0) == before


def test_after_a_restart_the_epoch_rises_above_what_engines_serve():
    store = new_store()
    store.join_controller(controller(version=Version(5, 30)), 0)
    assert store.join_writer(writer(), 0).epoch == 6


def test_an_engine_that_joins_after_the_writers_raises_the_epoch_too():
    store = ready_store(engines=())
    store.announce(announce(number=3), 0)
    store.join_controller(controller(version=Version(1, 30)), 0)
    assert store.view(0).epoch == 2
    store.announce(announce(number=4), 0)
    assert sync_of(store).version == Version(2, 4)


def test_an_engine_that_serves_another_trainers_version_of_the_same_number_raises_the_epoch():
    """The server, then the trainer was restarted; the engine comes last, and would pass for one that has the base."""
    store = ready_store(engines=())
    store.announce(announce(number=1), 0)
    store.join_worker(worker(), 0)
    store.join_controller(controller(version=Version(1, 1)), 0)
    assert store.view(0).epoch == 2
    store.announce(m.Announce(incarnation="run1-w0", number=2, timeout_s=60, verify="off", only=["b*"]), 0)
    assert not entry(store).partial


def test_a_version_that_was_announced_here_does_not_raise_the_epoch():
    store = open_store()
    hold(store)
    store.report_engine(report("committed"), 0)
    store.join_controller(controller(version=Version(1, 1)), 0)
    assert store.view(0).epoch == 1


# Engines


def test_workers_are_shown_by_rank_and_engines_by_name():
    store = new_store()
    for engine, rank in (("b", 2), ("b", 0), ("a", 0), ("b", 1)):
        store.join_worker(worker(engine, rank, 3), 0)
    view = store.view(0)
    assert list(view.engines) == ["a", "b"]
    assert [info.rank for info in view.engines["b"].workers] == [0, 1, 2]


def test_an_engine_is_live_with_all_workers_and_a_controller():
    store = new_store()
    store.join_worker(worker(rank=0, world=2), 0)
    store.join_controller(controller(), 0)
    assert not store.view(0).engines["e"].live
    store.join_worker(worker(rank=1, world=2), 0)
    assert store.view(0).engines["e"].live
    store.leave(m.Leave(incarnation="e-c1"), 0)
    view = store.view(0).engines["e"]
    assert (view.live, view.controller) == (False, "")


def test_an_uncontrolled_engine_is_live_without_a_controller():
    store = new_store()
    store.join_worker(worker(controlled=False), 0)
    assert store.view(0).engines["e"].live


def test_a_worker_that_restarts_replaces_itself_and_is_fenced():
    store = open_store()
    generation = store.view(0).engines["e"].generation
    store.join_worker(worker(life=2), 0)
    assert store.view(0).engines["e"].generation > generation
    assert "worker 0 of engine e (pid 100 on host host-a) was replaced" in entry(store).reason
    with pytest.raises(Fenced, match="was replaced"):
        store.join_worker(worker(life=1), 0)


def test_a_worker_that_has_traced_its_model_only_updates_what_it_said():
    store = ready_store()
    generation, revision = store.view(0).engines["e"].generation, store.revision
    store.join_worker(worker(layout="L"), 0)
    view = store.view(0).engines["e"]
    assert (view.generation, view.workers[0].layout) == (generation, "L")
    assert store.revision > revision


def test_an_engine_that_restarts_with_another_world_drops_its_old_workers():
    store = ready_store(workers=2)
    store.join_worker(worker(rank=0, world=1, life=2), 0)
    view = store.view(0).engines["e"]
    assert view.live
    assert [info.world for info in view.workers] == [1]
    with pytest.raises(Fenced, match="give each engine its own name"):
        store.join_worker(worker(rank=1, world=2), 0)


def test_a_worker_cannot_hold_two_places():
    store = ready_store()
    with refused("invalid", "is worker 0 of engine e already"):
        store.join_worker(worker("f", process=process("e-0-1")), 0)


def test_a_worker_that_has_prefetched_does_not_hold_the_version_yet():
    store = open_store()
    before = store.revision
    said = m.ReportWorker(incarnation="e-0-1", version=FIRST, prefetched=True)
    assert store.report_worker(said, 0).accepted
    assert (entry(store).outcome, entry(store).prefetched, entry(store).reported) == ("pending", [0], [])
    assert store.revision > before
    assert not store.report_engine(report("committed"), 0).accepted


def test_what_workers_want_sent_once_more_has_one_order_for_all_and_each_asks_once():
    store = open_store(workers=2)

    def ask(rank: int, *lanes: int) -> m.ReportReply:
        return store.report_worker(m.ReportWorker(incarnation=f"e-{rank}-1", version=FIRST, resend=list(lanes)), 0)

    before = store.revision
    assert ask(1, 7, 63).accepted and ask(0, 2).accepted and store.revision > before
    known = store.revision
    assert ask(1, 7, 63).accepted and store.revision == known, "its reply was lost"
    assert "has asked for other tensors before" in ask(1, 8).reason
    assert entry(store).resends == [m.Resend(worker=1, lanes=[7, 63]), m.Resend(worker=0, lanes=[2])]
    assert (entry(store).outcome, entry(store).reported) == ("pending", [])
    hold(store, workers=2)
    assert not ask(0, 2).accepted, "it has said that it holds the version"
    store.report_engine(report("failed", reason="x"), 0)
    assert ask(1, 7, 63).reason == "engine e is recorded as failed: x"


@pytest.mark.parametrize("lanes", [[-1], [64], [0] * 65])
def test_a_digest_has_no_such_lanes(lanes: list[int]):
    body = msgspec.msgpack.encode({"incarnation": "e-0-1", "version": FIRST, "resend": lanes})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=m.ReportWorker)


def test_the_first_controller_wins_and_the_next_one_takes_over():
    store = ready_store()
    generation = store.view(0).engines["e"].generation
    assert not store.join_controller(controller(life=2), 1).elected
    beat(store, 9, "e-0-1")
    assert store.join_controller(controller(life=2, version=Version(0, 0)), 11).elected
    view = store.view(11).engines["e"]
    assert (view.controller, view.generation) == ("e-c2", generation + 1)
    with pytest.raises(Fenced, match="now controls engine e"):
        store.report_engine(report("updating"), 11)
    assert not store.join_controller(controller(life=1), 11).elected
    store.leave(m.Leave(incarnation="e-c2"), 11)
    assert store.join_controller(controller(life=1), 11).elected


def test_who_takes_over_inherits_the_last_word_until_it_says_one_of_its_own():
    """Also when its join comes twice: what it would say is older than what the one before it has said."""
    store = new_store()
    store.join_worker(worker(), 0)
    store.join_controller(controller(instance="i"), 0)
    store.set_engine_state(m.SetEngineState(incarnation="e-c1", state="updating", version=FIRST), 0)
    beat(store, 9, "e-0-1")
    for now in (11, 12):
        assert store.join_controller(controller(life=2, instance="i"), now).inherits
        view = store.view(now).engines["e"]
        assert (view.said, view.version, view.inherited) == ("updating", FIRST, True)
    store.set_engine_state(m.SetEngineState(incarnation="e-c2", state="torn", version=FIRST), 12)
    assert not store.view(12).engines["e"].inherited
    assert not store.join_controller(controller(life=2, instance="i", state="torn"), 12).inherits


def test_after_a_restart_an_engines_controller_comes_before_those_who_know_it_from_hearsay():
    store = new_store()
    store.join_worker(worker(), 0)
    assert not store.join_controller(controller(life=2, instance="i", hearsay=True), 0).elected
    reply = store.join_controller(controller(instance="i", version=FIRST), 3)
    assert reply.elected and not reply.inherits and store.view(3).engines["e"].version == FIRST


def test_if_it_does_not_come_back_nobody_knows_what_it_was_at():
    store = new_store()
    store.join_worker(worker(), 0)
    assert not store.join_controller(controller(life=2, instance="i", hearsay=True), 0).elected
    beat(store, 9, "e-0-1")
    assert store.join_controller(controller(life=2, instance="i", hearsay=True), 10).inherits
    view = store.view(10).engines["e"]
    assert (view.said, view.inherited) == ("updating", True)


def test_a_controller_states_its_engine():
    store = ready_store()
    state = m.SetEngineState(incarnation="e-c1", state="torn", version=Version(1, 0), reason="half written")
    store.set_engine_state(state, 0)
    view = store.view(0).engines["e"]
    assert (view.state, view.version, view.reason) == ("torn", Version(1, 0), "half written")
    revision = store.revision
    store.set_engine_state(state, 0)
    assert store.revision == revision


def test_a_lapsed_lease_is_not_renewed_but_the_member_may_join_again():
    store = ready_store()
    assert beat(store, 9, "e-0-1", "nobody") == ["nobody"]
    assert beat(store, 10, "e-0-1", "e-c1") == ["e-c1"]
    generation = store.view(10).engines["e"].generation
    with refused("unknown", "stopped answering for 10 s; join again"):
        store.report_engine(report("updating"), 10)
    assert store.join_controller(controller(), 10).elected
    assert store.view(10).engines["e"].generation == generation


def test_one_incarnation_may_be_a_member_in_each_role():
    store = new_store()
    store.join_worker(worker(process=process("p")), 0)
    store.join_controller(m.JoinController(engine="e", process=process("p")), 0)
    assert beat(store, 9, "p") == []
    assert store.view(18).engines["e"].live
    store.leave(m.Leave(incarnation="p"), 18)
    store.leave(m.Leave(incarnation="p"), 18)
    assert not store.view(18).engines["e"].live


def test_an_engine_is_forgotten_ten_leases_after_its_last_member_went():
    store = ready_store()
    store.tick(LEASE)
    assert not store.tick(11 * LEASE - 1)
    assert "e" in store.view(0).engines
    assert store.tick(11 * LEASE)
    assert store.view(0).engines == {}
    assert not store.abandoned(11 * LEASE)
    assert store.abandoned(700)


# A sync


def test_a_version_opens_when_the_last_rank_arrives_with_the_engines_there_at_that_moment():
    store = ready_store(writers=2, engines=("a", "b", "c"))
    store.set_engine_state(m.SetEngineState(incarnation="a-c1", state="torn", version=Version()), 0)
    store.set_engine_state(m.SetEngineState(incarnation="b-c1", state="refused", version=Version()), 0)
    store.join_worker(worker("half", 0, 2), 0)
    store.announce(announce(1), 0)
    assert (sync_of(store).state, sync_of(store).arrived) == ("gathering", [1])
    store.announce(announce(0), 5)
    sync = sync_of(store, 5)
    outcomes = {name: engine.outcome for name, engine in sync.engines.items()}
    assert (sync.state, sync.remaining_s) == ("open", 60)
    assert outcomes == {"a": "pending", "b": "failed", "c": "pending"}
    assert "refuses the trainer's model" in sync.engines["b"].reason
    store.join_worker(worker("late", controlled=False), 5)
    assert "late" not in sync_of(store).engines
    reply = store.report_worker(m.ReportWorker(incarnation="late-0-1", version=Version(1, 1)), 5)
    assert (reply.accepted, reply.reason) == (False, "engine late takes no part in 1.1: it was not there at its start")


def test_without_engines_a_version_is_done_at_once():
    store = open_store(engines=())
    assert (sync_of(store).state, sync_of(store).reason) == ("done", "")


def test_a_rank_may_announce_again_until_the_version_is_done():
    store = open_store(writers=1)
    revision = store.revision
    store.announce(announce(), 0)
    assert store.revision == revision
    hold(store)
    store.report_engine(report("committed"), 0)
    with pytest.raises(Fenced, match=r"version 1.1 is not newer than 1.1: the current version is 1.1, which is done"):
        store.announce(announce(), 0)
    with pytest.raises(Fenced, match="above 1"):
        store.announce(announce(number=0), 0)


@pytest.mark.parametrize(
    ("message", "code", "match"),
    [
        (announce(number=-1), "invalid", "negative"),
        (announce(timeout_s=0), "invalid", "timeout_s is 0"),
        (announce(timeout_s=float("nan")), "invalid", "timeout_s is nan"),
        (announce(0, verify="full"), "invalid", "asks for verify='full'"),
        (announce(7), "unknown", "no writer 'run1-w7' in job 'job'"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(message, code, match):
    store = ready_store(writers=2)
    store.announce(announce(1), 0)
    with refused(code, match):
        store.announce(message, 0)


def test_gathering_ends_at_its_deadline_and_names_the_missing_ranks():
    store = ready_store(writers=2)
    store.announce(announce(0, timeout_s=5), 0)
    assert not store.tick(4.9)
    assert store.tick(5)
    assert (sync_of(store).state, sync_of(store).reason) == ("done", "writer rank 1 of 2 did not arrive within 5 s")


def test_a_late_rank_is_told_the_outcome_once():
    store = ready_store(writers=2)
    store.announce(announce(0, timeout_s=5), 0)
    store.announce(announce(1, timeout_s=5), 6)
    assert sync_of(store).reason == "writer rank 1 of 2 did not arrive within 5 s"
    with pytest.raises(Fenced, match="not newer"):
        store.announce(announce(1), 6)


def test_gathering_ends_when_a_rank_goes():
    store = ready_store(writers=2)
    store.announce(announce(0), 0)
    beat(store, 9, "run1-w0")
    store.tick(10)
    reason = "writer rank 1 of 2 (pid 7 on host host-a) stopped answering for 10 s"
    assert (sync_of(store).state, sync_of(store).reason) == ("done", reason)
    store.announce(announce(0, number=2), 11)
    assert (sync_of(store).state, sync_of(store).reason) == ("done", reason)


def test_a_rank_that_goes_on_ends_the_version_it_leaves_behind():
    store = open_store()
    store.announce(announce(number=2), 0)
    assert sync_of(store).version == Version(1, 2)
    reply = store.report_engine(report("committed"), 0)
    assert (reply.accepted, reply.reason) == (
        False,
        "version 1.1 is not on its way: the current version is 1.2, which is open",
    )


def test_the_outcome_of_a_version_is_seen_when_a_rank_has_gone_on():
    store = open_store(writers=2)
    store.announce(announce(rank=1), now=0)
    store.report_worker(m.ReportWorker("e-0-1", FIRST, failed=True, reason="no room"), now=0)
    store.announce(announce(rank=0, number=2), now=0)
    view = store.view(now=0)
    assert view.sync is not None and (view.sync.version.number, view.sync.state) == (2, "gathering")
    assert view.last is not None and (view.last.version, view.last.state) == (FIRST, "done")
    assert "no room" in view.last.engines["e"].reason and view.last.digests == {}


def test_the_other_ranks_are_told_that_one_gives_up():
    store = ready_store(writers=2)
    store.announce(announce(rank=1), 0)
    store.give_up(m.GiveUp("run1-w0", 1, "offloaded"), 0)
    assert sync_of(store).state == "done"
    assert sync_of(store).reason == "writer rank 0 cannot publish it: offloaded"


def test_a_rank_that_comes_later_is_told_so_too():
    store = ready_store(writers=2)
    store.give_up(m.GiveUp("run1-w0", 1, "offloaded"), 0)
    assert store.view(0).sync is None
    store.leave(m.Leave("run1-w0"), 0)
    store.announce(announce(rank=1), 0)
    assert sync_of(store).reason == "writer rank 0 cannot publish it: offloaded", "not only that it has left"


def test_ranks_that_all_gave_up_may_try_again_with_the_same_number():
    store = ready_store(writers=2)
    for rank in range(2):
        store.give_up(m.GiveUp(f"run1-w{rank}", 1, "offloaded"), 0)
    for rank in range(2):
        store.announce(announce(rank=rank), 0)
    assert sync_of(store).state == "open"


def test_giving_up_means_nothing_for_a_version_that_is_open_or_over():
    store = open_store()
    store.give_up(m.GiveUp("run1-w0", 1, "late"), 0)
    assert sync_of(store).state == "open"
    with pytest.raises(Refused):
        store.give_up(m.GiveUp("stranger", 2, "no"), 0)


def test_a_word_from_before_the_weights_moved_is_not_taken():
    store = ready_store()
    store.join_writer(writer(endpoints={"shm": "there"}, moved=2), 0)
    store.join_writer(writer(endpoints={"shm": "here"}, moved=1), 0)
    assert [info.endpoints for info in store.view(0).writers] == [{"shm": "there"}]


def test_a_version_is_whole_if_one_rank_builds_on_another_one():
    store = ready_store(writers=2)
    for rank in range(2):
        store.announce(announce(rank=rank), 0)
    hold(store)
    store.report_engine(report("committed"), 0)
    for number, bases, why in ((2, (FIRST, FIRST), ""), (3, (Version(1, 2), FIRST), "last version is 1.1")):
        for rank, base in enumerate(bases):
            only = m.Announce(f"run1-w{rank}", number, timeout_s=60, verify="off", only=["b*"], base=base)
            store.announce(only, 0)
        assert entry(store).partial == (not why) and why in sync_of(store).whole_because
        version = Version(1, number)
        store.report_worker(m.ReportWorker(incarnation="e-0-1", version=version), 0)
        store.report_engine(report("committed", version=version), 0)


def test_a_version_that_no_engine_has_begun_may_be_superseded():
    store = open_store(engines=("e", "f"))
    assert store.supersede(m.Supersede("run1-w0", 1), 0).accepted
    sync = sync_of(store)
    assert (sync.state, sync.superseded) == ("done", True)
    assert {part.outcome for part in sync.engines.values()} == {"failed"}
    assert store.supersede(m.Supersede("run1-w0", 1), 0).accepted  # another rank asks too
    store.announce(announce(number=2), 0)
    assert not sync_of(store).superseded


def test_a_version_that_an_engine_has_begun_is_not_superseded():
    store = open_store(engines=("e", "f"))
    store.report_engine(report("updating", "f"), 0)
    reply = store.supersede(m.Supersede("run1-w0", 1), 0)
    assert not reply.accepted and "engine(s) f" in reply.reason
    assert sync_of(store).state == "open"


def test_an_engine_without_a_controller_may_have_begun():
    store = new_store()
    store.join_writer(writer(), 0)
    store.join_worker(worker(controlled=False), 0)
    store.announce(announce(), 0)
    assert not store.supersede(m.Supersede("run1-w0", 1), 0).accepted


def test_a_rank_that_comes_late_to_a_version_that_ended_without_it_learns_its_outcome():
    store = ready_store(writers=2)
    store.announce(announce(rank=0, timeout_s=5), now=0)
    store.announce(announce(rank=0, number=2), now=5)
    store.announce(announce(rank=1), now=6)
    view = store.view(6)
    assert view.last is not None and (view.last.version, view.last.arrived) == (FIRST, [0, 1])
    assert view.sync is not None and (view.sync.version.number, view.sync.arrived) == (2, [0])
    with pytest.raises(Fenced, match="not newer"):
        store.announce(announce(rank=1), now=6)


def test_an_engine_commits():
    store = open_store()
    store.set_engine_state(m.SetEngineState(incarnation="e-c1", state="torn", version=Version(), reason="x"), 0)
    assert store.report_engine(report("pending"), 0).accepted
    assert store.report_engine(report("updating", figures={"bytes": 5}), 0).accepted
    assert store.report_engine(report("updating", figures={"bytes": 5}), 0).accepted
    assert (entry(store).outcome, entry(store).figures) == ("updating", {"bytes": 5})
    assert store.report_engine(report("pending"), 0).accepted  # it was put to sleep, and the version waits
    assert entry(store).outcome == "pending"
    hold(store)
    assert store.report_engine(report("committed", figures={"pull_s": 1.5}), 0).accepted
    assert sync_of(store).state == "done"
    assert entry(store).figures == {"bytes": 5, "pull_s": 1.5}
    view = store.view(0).engines["e"]
    assert (view.state, view.version, view.reason) == ("ready", Version(1, 1), "")


def test_an_engine_commits_only_when_all_its_workers_hold_the_version():
    store = open_store(workers=3)
    store.report_engine(report("updating"), 0)
    hold(store, workers=1)
    before = store.view(0)
    reply = store.report_engine(report("committed", figures={"pull_s": 1.5}), 0)
    assert (reply.accepted, reply.reason) == (False, "worker(s) [1, 2] of engine e have not reported version 1.1")
    assert store.view(0) == before
    hold(store, workers=3)
    assert store.report_engine(report("committed", figures={"pull_s": 1.5}), 0).accepted
    assert (entry(store).outcome, entry(store).figures) == ("committed", {"pull_s": 1.5})
    assert store.view(0).engines["e"].version == FIRST


def test_a_recorded_outcome_stands_and_the_same_report_is_accepted_again():
    store = open_store()
    hold(store)
    store.report_engine(report("committed"), 0)
    revision = store.revision
    assert store.report_engine(report("committed"), 0).accepted
    reply = store.report_engine(report("failed", reason="late"), 0)
    assert (reply.accepted, reply.reason) == (False, "engine e is recorded as committed")
    assert store.revision == revision
    store.announce(announce(number=2), 0)
    assert store.report_engine(report("committed"), 0).accepted
    assert not store.report_engine(report("failed"), 0).accepted


def test_a_failed_engine_keeps_its_state_and_gets_a_new_generation():
    store = open_store()
    generation = store.view(0).engines["e"].generation
    assert store.report_engine(report("failed", reason="no room"), 0).accepted
    assert store.report_engine(report("failed", reason="no room"), 0).accepted
    view = store.view(0).engines["e"]
    assert (view.state, view.version, view.generation) == ("ready", Version(), generation + 1)
    reply = store.report_engine(report("committed"), 0)
    assert (reply.accepted, reply.reason) == (False, "engine e is recorded as failed: no room")


def test_reports_on_a_version_that_gathers_or_is_unknown_are_not_accepted():
    store = ready_store(writers=2)
    assert "no version has been announced" in store.report_engine(report("committed"), 0).reason
    store.announce(announce(), 0)
    assert "still gathering" in store.report_engine(report("committed"), 0).reason


def test_workers_commit_an_engine_without_a_controller():
    store = ready_store(engines=())
    for rank in range(2):
        store.join_worker(worker("u", rank, 2, controlled=False), 0)
    store.announce(announce(), 0)
    reports = [
        m.ReportWorker(incarnation=f"u-{rank}-1", version=Version(1, 1), figures={"bytes": 10, "pull_s": rank})
        for rank in range(2)
    ]
    for _ in range(2):
        assert store.report_worker(reports[0], 0).accepted
    assert entry(store, "u").outcome == "updating"
    assert store.report_worker(reports[1], 0).accepted
    assert store.report_worker(reports[1], 0).accepted
    assert (entry(store, "u").outcome, entry(store, "u").figures) == ("committed", {"bytes": 20, "pull_s": 1})
    assert store.view(0).engines["u"].version == Version(1, 1)
    failed = m.ReportWorker(incarnation="u-0-1", version=Version(1, 1), failed=True)
    assert not store.report_worker(failed, 0).accepted


def test_one_failed_worker_fails_its_engine():
    store = open_store()
    failed = m.ReportWorker(incarnation="e-0-1", version=Version(1, 1), failed=True, reason="digest differs")
    assert store.report_worker(failed, 0).accepted
    assert entry(store).reason == "worker 0 of engine e (pid 100 on host host-a): digest differs"


def test_workers_do_not_commit_an_engine_that_has_a_controller():
    store = open_store()
    assert store.report_worker(m.ReportWorker(incarnation="e-0-1", version=Version(1, 1)), 0).accepted
    assert entry(store).outcome == "pending"


def test_a_sender_fails_an_engine_unless_its_outcome_is_recorded():
    store = open_store(engines=("a", "b"))
    hold(store, "a")
    store.report_engine(report("committed", "a"), 0)
    replies = [
        store.report_sender(m.ReportSender(incarnation="run1-w0", version=Version(1, 1), engine=name, reason="cut"), 0)
        for name in ("a", "b", "b", "nobody")
    ]
    assert [reply.accepted for reply in replies] == [False, True, True, False]
    assert entry(store, "b").reason == "writer rank 0 of 1 (pid 7 on host host-a): cut"
    assert sync_of(store).state == "done"


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("e-1-1", "worker 1 of engine e (pid 101 on host host-a) stopped answering for 10 s"),
        ("e-c1", "controller of engine e (pid 7 on host host-a) stopped answering for 10 s"),
        ("run1-w0", "writer rank 0 of 1 (pid 7 on host host-a) stopped answering for 10 s"),
    ],
)
def test_a_member_whose_lease_lapses_fails_its_engines(gone, reason):
    store = open_store(workers=2)
    everyone = {"e-0-1", "e-1-1", "e-c1", "run1-w0"}
    assert beat(store, 9, *(everyone - {gone})) == []
    assert store.tick(10)
    assert (entry(store).outcome, entry(store).reason, sync_of(store).state) == ("failed", reason, "done")


def test_a_member_that_leaves_fails_its_engine_at_once_but_not_the_others():
    store = open_store(engines=("a", "b"))
    store.leave(m.Leave(incarnation="a-0-1"), 0)
    assert entry(store, "a").reason == "worker 0 of engine a (pid 100 on host host-a) left"
    assert (entry(store, "b").outcome, sync_of(store).state) == ("pending", "open")


def test_a_writer_that_goes_leaves_committed_engines_alone():
    store = open_store(engines=("a", "b"))
    hold(store, "a")
    store.report_engine(report("committed", "a"), 0)
    store.leave(m.Leave(incarnation="run1-w0"), 0)
    assert [entry(store, name).outcome for name in "ab"] == ["committed", "failed"]


def test_an_open_version_ends_at_its_deadline():
    store = ready_store(engines=("a", "b"))
    store.announce(announce(timeout_s=5), 0)
    store.report_engine(report("updating", "a"), 0)
    assert store.tick(5)
    assert (
        entry(store, "a").reason == "not committed after 5 s; it was updating, and worker(s) [0] of 1 had not reported"
    )
    assert (
        entry(store, "b").reason == "not committed after 5 s; it was pending, and worker(s) [0] of 1 had not reported"
    )
    assert (sync_of(store).state, sync_of(store).remaining_s) == ("done", 0)


def test_lapses_are_applied_before_a_late_report_even_without_a_tick():
    store = ready_store()
    store.announce(announce(timeout_s=5), 0)
    hold(store)
    assert not store.report_engine(report("committed"), 5).accepted
    assert store.view(5).engines["e"].version == Version()


def lanes(*first: int) -> bytes:
    """A digest whose first lanes are these."""
    return b"".join(lane.to_bytes(8, "little") for lane in [*first, *[0] * (64 - len(first))])


def test_digests_are_added_up_by_layout():
    store = ready_store(writers=2)
    store.announce(announce(), 0)

    def publish(rank: int, part: bytes) -> dict[str, m.DigestView]:
        digest = m.PublishDigest(incarnation=f"run1-w{rank}", version=Version(1, 1), digests={"L": part})
        store.publish_digest(digest, 0)
        return sync_of(store).digests

    assert publish(1, lanes(5, 7)) == {"L": m.DigestView(lanes(5, 7), [0])}
    assert publish(1, lanes(2**64 - 1, 7)) == {"L": m.DigestView(lanes(2**64 - 1, 7), [0])}, "in the place of the first"
    for _ in range(2):  # the same again changes nothing
        assert publish(0, lanes(3, 0, 9)) == {"L": m.DigestView(lanes(2, 7, 9), [])}
    with pytest.raises(Fenced, match=r"version 1.2 is not on its way"):
        store.publish_digest(m.PublishDigest(incarnation="run1-w0", version=Version(1, 2), digests={}), 0)


def test_an_earlier_word_of_a_worker_that_arrives_late_is_not_taken():
    store = ready_store()
    store.join_worker(worker(layout="L", manifest="M", sequence=1), 1)
    store.join_worker(worker(), 8)
    (seen,) = store.view(8).engines["e"].workers
    assert (seen.layout, seen.manifest) == ("L", "M")
    store.tick(LEASE + 1)
    assert store.view(LEASE + 1).engines["e"].workers == [seen], "it is a sign of life all the same"
    store.join_worker(worker(manifest="M", reason="does not fit", sequence=2), 12)
    assert store.view(12).engines["e"].workers[0].reason == "does not fit"


def test_copies_of_a_restarted_server_are_not_taken_for_those_before():
    numbers = []
    for revision in (0, 1_000_000):
        store = JobStore("job", lease_s=LEASE, first_revision=revision)
        for engine, version in (("a", Version(1, 3)), ("b", Version())):
            store.join_worker(worker(engine), 0)
            store.join_controller(controller(engine, version=version), 0)
        store.ask_catch_up(m.AskCatchUp(incarnation="b-c1", timeout_s=9, verify="off"), 0)
        numbers.append(store.view(0).catch_ups["b"].number)
    assert numbers == [1, 1_000_001]


# Bounds


def test_every_change_of_the_view_bumps_the_revision():
    store = new_store()
    seen = [store.revision]
    steps = [
        lambda: store.join_writer(writer(), 0),
        lambda: store.join_worker(worker(), 0),
        lambda: store.join_controller(controller(), 0),
        lambda: store.announce(announce(), 0),
        lambda: store.report_engine(report("updating"), 0),
        lambda: (hold(store), store.report_engine(report("committed"), 0)),
        lambda: store.leave(m.Leave(incarnation="e-0-1"), 0),
        lambda: store.tick(LEASE),
    ]
    for step in steps:
        step()
        seen.append(store.revision)
    assert seen == sorted(set(seen))
    beat(store, LEASE, "run1-w0")
    assert store.revision == seen[-1]


def test_the_number_of_members_is_bounded():
    store = new_store(members=2)
    store.join_writer(writer(), 0)
    store.join_worker(worker(), 0)
    store.join_worker(worker(), 0)
    with refused("too_large", "has 2 members, as many as it may have"):
        store.join_controller(controller(), 0)


def test_digests_are_bounded():
    store = new_store(digest_bytes=512)
    store.join_writer(writer(), 0)
    store.announce(announce(), 0)
    for _ in range(2):
        store.publish_digest(m.PublishDigest(incarnation="run1-w0", version=Version(1, 1), digests={"a": lanes(8)}), 0)
    with refused("too_large", "512 bytes in all"):
        store.publish_digest(m.PublishDigest(incarnation="run1-w0", version=Version(1, 1), digests={"b": lanes(1)}), 0)


def test_blobs_that_live_members_name_are_kept_and_others_go():
    store = new_store(blob_bytes=10, blob_idle_s=600)
    kept, idle = content_hash(b"kept."), content_hash(b"idle.")
    store.put_blob(kept, b"kept.", 0)
    store.put_blob(idle, b"idle.", 0)
    store.put_blob(idle, b"idle.", 0)
    with refused("too_large", "may keep 10 bytes"):
        store.put_blob(content_hash(b"more"), b"more", 599)
    store.join_writer(writer(layout=kept), 599)
    store.put_blob(content_hash(b"more"), b"more", 600)
    assert store.get_blob(kept) == b"kept."
    with refused("unknown", f"no blob {idle}"):
        store.get_blob(idle)
    store.tick(609)
    store.tick(700)
    assert not store.has_blob(kept, 700)


def test_asking_for_a_blob_keeps_it():
    store = new_store(blob_idle_s=600)
    name = content_hash(b"x")
    assert not store.has_blob(name, 0)
    store.put_blob(name, b"x", 0)
    assert store.has_blob(name, 500)
    store.tick(700)
    assert store.get_blob(name) == b"x"


def test_values_live_as_long_as_asked():
    store = new_store()
    store.put(m.Put(key="k", value=b"v", ttl_s=5), 0)
    assert store.get(m.Get(key="k", wait_s=0), 4).value == b"v"
    assert store.get(m.Get(key="k", wait_s=0), 5).value is None
    assert store.get(m.Get(key="other", wait_s=0), 0).value is None


@pytest.mark.parametrize(
    ("message", "code", "match"),
    [
        (m.Put(key="", value=b"", ttl_s=1), "invalid", "key of 0 characters"),
        (m.Put(key="k" * 9, value=b"", ttl_s=1), "invalid", "key of 9 characters"),
        (m.Put(key="k", value=b"12345", ttl_s=1), "too_large", "value of 5 bytes"),
        (m.Put(key="k", value=b"", ttl_s=0), "invalid", "ttl_s is 0"),
        (m.Put(key="c", value=b"", ttl_s=1), "too_large", "holds 2 keys already"),
        (m.Put(key="b", value=b"123", ttl_s=1), "too_large", "6 bytes in all"),
    ],
)
def test_values_are_bounded(message, code, match):
    store = new_store(keys=2, key_chars=8, value_bytes=4, kv_bytes=6)
    store.put(m.Put(key="a", value=b"1234", ttl_s=9), 0)
    store.put(m.Put(key="b", value=b"12", ttl_s=9), 0)
    with refused(code, match):
        store.put(message, 0)


# Any order of events

RUNS, ENGINES = ("run1", "run2"), ("a", "u")
few = st.integers(0, 1)
lives = st.integers(1, 2)
versions = st.builds(Version, st.integers(0, 2), st.integers(0, 4))
outcomes = st.sampled_from(("pending", "updating", "committed", "failed"))
names = st.sampled_from([f"{r}-w{i}" for r in RUNS for i in (0, 1)] + ["a-0-1", "a-1-1", "u-0-1", "u-0-2", "a-c1"])

requests = st.one_of(
    st.builds(writer, few, st.just(2), st.sampled_from(RUNS)),
    st.builds(lambda rank, life: worker("a", rank, 2, life), few, lives),
    st.builds(lambda world, life: worker("u", 0, world, life, controlled=False), st.integers(1, 2), lives),
    st.builds(lambda life, version: controller("a", life, version=version), lives, versions),
    st.builds(lambda name: m.Heartbeat(incarnations=[name]), names),
    st.builds(lambda name: m.Leave(incarnation=name), names),
    st.builds(announce, few, st.integers(0, 4), st.sampled_from(RUNS), st.sampled_from((3.0, 15.0))),
    st.builds(lambda outcome, version: report(outcome, "a", version), outcomes, versions),
    st.builds(m.ReportWorker, incarnation=names, version=versions, failed=st.booleans()),
    st.builds(m.ReportWorker, incarnation=names, version=versions, resend=st.sampled_from(([1], [2, 3]))),
    st.builds(m.ReportSender, incarnation=names, version=versions, engine=st.sampled_from(ENGINES), reason=st.just("")),
)


def apply(store: JobStore, message, now: float):
    method = re.sub(r"(?<!^)([A-Z])", r"_\1", type(message).__name__).lower()
    try:
        return getattr(store, method)(message, now)
    except (Fenced, Refused):
        return None


def what_is_seen(store: JobStore, now: float):
    view = store.view(now)
    sync = replace(view.sync, remaining_s=0) if view.sync else None
    return replace(view, revision=0, sync=sync)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(requests, st.sampled_from((0.0, 0.5, 4.0))), max_size=60))
def test_whatever_happens_outcomes_stand_and_changes_are_announced(events):
    """Starts with a version on its way, so that most events meet one."""
    store, now = new_store(), 0.0
    start = [writer(0, 2), writer(1, 2), worker("a", 0, 2), worker("a", 1, 2), controller("a")]
    for message in [*start, worker("u", controlled=False), announce(0), announce(1)]:
        apply(store, message, now)
    for message, passed in events:
        now += passed
        before, revision = what_is_seen(store, now), store.revision
        reply = apply(store, message, now)
        after = what_is_seen(store, now)
        assert store.revision > revision or after == before
        assert after.epoch >= before.epoch
        if after.sync is None:
            continue
        ended = {name: part for name, part in after.sync.engines.items() if part.outcome in TERMINAL}
        assert after.sync.state != "done" or ended == after.sync.engines
        if before.sync and before.sync.version == after.sync.version:
            old = {name: part.outcome for name, part in before.sync.engines.items() if part.outcome in TERMINAL}
            assert {name: ended[name].outcome for name in old} == old
        elif before.sync:
            assert after.sync.version > before.sync.version
        if isinstance(message, m.ReportEngine) and message.outcome == "committed" and reply and reply.accepted:
            assert after.engines["a"].version == message.version


def test_a_refusal_ends_with_the_trainer_it_was_about():
    store = ready_store(writers=1, engines=("a",))
    store.set_engine_state(m.SetEngineState(incarnation="a-c1", state="refused", version=Version(), reason="no"), 0)
    store.join_writer(writer(0, 1, run="next"), 1)
    engine = store.view(1).engines["a"]
    assert (engine.state, engine.reason) == ("ready", "")


def test_a_version_ends_without_those_that_sleep_when_every_rank_has_its_quorum() -> None:
    store = ready_store(2, ("a", "b", "c"))
    store.join_worker(worker("b", weights="released", weights_reason="sleep"), 0)
    for rank, quorum in enumerate((1, 2)):
        message = m.Announce(f"run1-w{rank}", 1, timeout_s=60, verify="off", quorum=quorum)
        store.announce(message, 0)
    for engine, outcomes in (("a", ("pending", "pending", "pending")), ("c", ("committed", "pending", "pending"))):
        sync = store.view(0).sync
        assert sync.state == "open" and tuple(sync.engines[name].outcome for name in "abc") == outcomes
        hold(store, engine)
        assert store.report_engine(report("committed", engine), 0).accepted
    sync = store.view(0).sync
    assert (sync.state, sync.engines["b"].outcome, sync.engines["b"].reason) == (
        "done",
        "failed",
        "sleep; the version went on without it, with 2 of the 2 asked for",
    )


@pytest.mark.parametrize("quorums", [(-1, 1), (1, -1), (2, 1)])
def test_a_version_waits_for_sleepers_if_a_rank_asks_for_more(quorums: tuple[int, int]) -> None:
    store = ready_store(2, ("a", "b"))
    for rank, quorum in enumerate(quorums):
        store.announce(m.Announce(f"run1-w{rank}", 1, timeout_s=60, verify="off", quorum=quorum), 0)
    hold(store, "a")
    assert store.report_engine(report("committed", "a"), 0).accepted
    store.join_worker(worker("b", weights="released", weights_reason="sleep"), 0)
    assert store.view(0).sync.engines["b"].outcome == "pending" and store.view(59).sync.state == "open"


def test_an_engine_that_falls_asleep_last_ends_the_version() -> None:
    """Not one that has begun to receive: its weights are neither the old nor the new ones."""
    for begun in (False, True):
        store = ready_store(1, ("a", "b"))
        store.announce(m.Announce("run1-w0", 1, timeout_s=60, verify="off", quorum=1), 0)
        hold(store, "a")
        assert store.report_engine(report("committed", "a"), 0).accepted and store.view(0).sync.state == "open"
        if begun:
            assert store.report_engine(report("updating", "b"), 0).accepted
        store.join_worker(worker("b", weights="released", weights_reason="sleep"), 0)
        assert store.view(0).sync.state == ("open" if begun else "done")


# What people ask


def test_a_wish_for_digests_is_shown_to_the_controller_until_its_time_is_over():
    store = ready_store(engines=("e", "f"))
    before = store.last_change("controller", "e"), store.last_change("controller", "f")
    number = store.ask_digests(m.AskDigests(engine="e", manifest="M", timeout_s=5), 0).number
    assert store.last_change("controller", "e") > before[0] and store.last_change("controller", "f") == before[1]
    again = JobStore.restored(msgspec.msgpack.decode(msgspec.msgpack.encode(store.saved()), type=SavedJob))
    for kept in (store, again):
        assert kept.view(4).engines["e"].wish == m.DigestWish(number=number, manifest="M", timeout_s=5)
        assert kept.view(5).engines["e"].wish is None
    assert store.ask_digests(m.AskDigests(engine="e", manifest="M", timeout_s=5), 1).number > number
    store.leave(m.Leave(incarnation="e-c1"), 2)
    with refused("unknown", "no engine 'e' is there that can be asked; those: f"):
        store.ask_digests(m.AskDigests(engine="e", manifest="M", timeout_s=5), 2)
    with refused("invalid", "timeout_s is -1"):
        store.ask_digests(m.AskDigests(engine="f", manifest="M", timeout_s=-1), 2)


# Groups: versions for some engines, and engines that stay


def group_store(*groups: str) -> JobStore:
    """An engine of each group, by its name; the trainer has joined."""
    store = new_store()
    store.join_writer(writer(), 0)
    for group in groups:
        store.join_worker(worker(group), 0)
        store.join_controller(controller(group, group=group), 0)
    return store


def publish(store: JobStore, number: int, *to: str, label: str = "", now: float = 0) -> list[str]:
    """Announce a version for some groups; all who take part commit. Returns who that was."""
    store.announce(replace(announce(number=number), edition=m.Edition(label=label, groups=list(to))), now)
    names = sorted(sync_of(store).engines)
    version = Version(store.view(now).epoch, number)
    for name in names:
        assert store.report_worker(m.ReportWorker(incarnation=f"{name}-0-1", version=version), now).accepted
        assert store.report_engine(report("committed", name, version), now).accepted
    return names


def ask(store: JobStore, engine: str) -> None:
    store.ask_catch_up(m.AskCatchUp(incarnation=f"{engine}-c1", timeout_s=9, verify="off"), 0)


def seen(store: JobStore, engine: str) -> m.EngineView:
    return store.view(0).engines[engine]


def test_a_version_for_some_groups_is_sent_to_no_other_and_two_are_served_side_by_side():
    store = group_store("a", "b", "c")
    assert publish(store, 1, label="v1") == ["a", "b", "c"]
    assert publish(store, 2, "b", label="v2") == ["b"]
    assert [(seen(store, name).version.number, seen(store, name).edition.label) for name in "abc"] == [
        (1, "v1"),
        (2, "v2"),
        (1, "v1"),
    ]
    assert sync_of(store).state == "done", "the others are not waited for"
    with refused("invalid", "no engine is ready at a version for group 'a' that is newer than 1.1"):
        ask(store, "a")
    assert publish(store, 3) == ["a", "b", "c"]


def test_ranks_must_name_a_version_alike():
    store = ready_store(writers=2)
    store.announce(replace(announce(0), edition=m.Edition(label="x")), 0)
    with refused("invalid", "all ranks must give the same label and groups"):
        store.announce(announce(1), 0)


def test_what_is_promoted_may_be_taken_by_more_groups():
    store = group_store("a", "b", "c")
    publish(store, 1)
    publish(store, 2, "b")
    before = store.last_change("controller", "a")
    store.promote(m.Promote(version=Version(1, 2), groups=["a"]), 0)
    assert store.last_change("controller", "a") > before and seen(store, "a").order > 0
    ask(store, "a")
    assert store.view(0).catch_ups["a"].source == "b"
    with refused("invalid", "group 'c'"):
        ask(store, "c")
    store.promote(m.Promote(version=Version(1, 2)), 0)
    ask(store, "c")
    assert seen(store, "b").edition == m.Edition()


def test_a_pinned_group_takes_part_in_nothing_and_goes_back_to_where_it_is_pinned():
    store = group_store("a", "b")
    publish(store, 1)
    publish(store, 2, "b")
    store.pin(m.Pin(group="b", version=Version(1, 1)), 0)
    assert seen(store, "b").pinned == Version(1, 1)
    ask(store, "b")
    catch_up = store.view(0).catch_ups["b"]
    assert (catch_up.source, catch_up.sync.version) == ("a", Version(1, 1))
    assert publish(store, 3) == ["a"], "which also ends the way back"
    with refused("invalid", "for group 'b' that is 1.1, to which it is pinned"):
        ask(store, "b")
    store.pin(m.Pin(group="b"), 0)
    ask(store, "b")
    assert store.view(0).catch_ups["b"].sync.version == Version(1, 3)


def test_a_pin_ends_what_has_not_begun_and_nothing_else():
    for begun in (False, True):
        store = group_store("a", "b")
        publish(store, 1)
        store.announce(announce(number=2), 0)
        if begun:
            assert store.report_engine(report("updating", "b", Version(1, 2)), 0).accepted
        store.pin(m.Pin(group="b", version=Version(1, 1)), 0)
        outcome = "updating" if begun else "failed"
        assert (entry(store, "a").outcome, entry(store, "b").outcome) == ("pending", outcome)
        assert begun or "group b is pinned at 1.1" in entry(store, "b").reason


def test_orders_that_make_no_sense_are_refused():
    store = group_store("a")
    publish(store, 1)
    with refused("unknown", "no engine belongs to group 'x'; groups: a"):
        store.pin(m.Pin(group="x", version=FIRST), 0)
    with refused("unknown", "no engine is ready at version 1.7"):
        store.pin(m.Pin(group="a", version=Version(1, 7)), 0)
    with refused("unknown", "no engine is ready at version 1.7"):
        store.promote(m.Promote(version=Version(1, 7)), 0)
    with refused("invalid", "cannot be pinned at 0.0"):
        store.pin(m.Pin(group="a", version=Version()), 0)


def test_a_guest_does_not_take_the_trainers_place():
    store = ready_store()
    with refused("invalid", "the job has a trainer"):
        store.join_writer(replace(writer(run="run2"), guest=True), 0)
    store.leave(m.Leave(incarnation="run1-w0"), 0)
    assert store.join_writer(replace(writer(run="run2"), guest=True), 0).epoch == 2
    assert store.join_writer(replace(writer(run="run2"), guest=True), 0).epoch == 2


def test_what_people_have_said_outlives_the_store_and_a_restart():
    store = group_store("a", "b")
    publish(store, 1, label="v1")
    publish(store, 2, "b", label="v2")
    store.pin(m.Pin(group="b", version=Version(1, 2)), 0)
    again = JobStore.restored(msgspec.msgpack.decode(msgspec.msgpack.encode(store.saved()), type=SavedJob))
    assert again.view(0) == store.view(0)
    assert [(one.version.number, one.label) for one in again.status(0).served["b"]] == [(1, "v1"), (2, "v2")]
    fresh = new_store()
    for name in "ab":
        known = seen(store, name)
        fresh.join_worker(worker(name), 0)
        fresh.join_controller(
            controller(name, group=name, version=known.version, edition=known.edition, pinned=known.pinned), 0
        )
    assert [(seen(fresh, n).edition, seen(fresh, n).pinned) for n in "ab"] == [
        (m.Edition(label="v1"), None),
        (m.Edition(label="v2", groups=["b"]), Version(1, 2)),
    ]
    with refused("invalid", "group 'a'"):
        ask(fresh, "a")


def test_the_word_of_a_lapsed_pin_does_not_bring_it_back():
    store = group_store("a")
    publish(store, 1)
    store.pin(m.Pin(group="a", version=FIRST), 0)
    store.pin(m.Pin(group="a"), 0)
    store.join_controller(controller("a", group="a", version=FIRST, pinned=FIRST), 0)
    assert seen(store, "a").pinned is None
