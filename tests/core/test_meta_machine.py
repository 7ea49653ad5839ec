"""A job's state as what its log gives: replayed, or gone on with from a saved state, it is the same."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awex_core.errors import Fenced, MetaServerError, Refused
from awex_core.meta import messages as m
from awex_core.meta.limits import Limits, TokenBucket
from awex_core.meta.machine import AWAY_LEASES, KEPT_REPLIES, TICK, Begin, Entry, Machine, SavedMachine
from awex_core.meta.sync import SavedSync, Sync
from awex_core.version import Version
from tests.core.test_meta_store import announce, controller, names, requests, versions, worker, writer

LEASE = 10.0
BEGIN = Begin(LEASE, Limits())


def entry(message: msgspec.Struct, repeat_key: str = "") -> Entry:
    name = re.sub(r"(?<!^)([A-Z])", r"_\1", type(message).__name__).lower()
    return Entry(name, msgspec.msgpack.encode(message), repeat_key)


def state(machine: Machine) -> SavedMachine:
    return msgspec.msgpack.decode(machine.saved(), type=SavedMachine)


def outcome_of(outcome: Any) -> object:
    """An outcome in a form that can be compared."""
    return (type(outcome).__name__, str(outcome)) if isinstance(outcome, Refused | Fenced) else outcome


lender = st.builds(
    lambda rank: m.Lend(incarnation=f"a-{rank}-1", target="u", info=writer(rank, 2, f"a-{rank}-1").info),
    st.integers(0, 1),
)
others = st.one_of(
    st.builds(m.Supersede, incarnation=names, number=st.integers(0, 4)),
    st.builds(
        m.SetEngineState,
        incarnation=names,
        state=st.sampled_from(("ready", "torn", "refused")),
        version=versions,
        reason=st.just("so"),
    ),
    st.builds(m.AskCatchUp, incarnation=names, timeout_s=st.just(6.0), verify=st.just("off")),
    st.builds(
        m.PublishDigest,
        incarnation=names,
        version=versions,
        digests=st.just({"L": b"1" * 512}),
        target=st.sampled_from("au"),
    ),
    st.builds(m.Put, key=st.sampled_from("xy"), value=st.binary(max_size=3), ttl_s=st.sampled_from((1.0, 20.0))),
    lender,
)
entries = st.one_of(
    st.builds(entry, st.one_of(requests, others), st.sampled_from(("", "k1", "k2"))), st.just(Entry(TICK))
)
logs = st.lists(st.tuples(entries, st.sampled_from((0.0, 0.5, 2.0, 4.0, 30.0))), max_size=50)

START = [writer(0, 2), writer(1, 2), worker("a", 0, 2), worker("a", 1, 2), controller("a"), announce(0), announce(1)]
"""A version on its way, so that most entries meet one."""


@settings(max_examples=150)
@given(logs, st.integers(0, 57))
def test_a_log_gives_one_state_however_it_is_read(log, cut):
    timed, now = [(entry(message), 0.0) for message in START], 0.0
    for one, passed in log:
        now += passed
        timed.append((one, now))
    first, second, resumed = (Machine.begin("job", BEGIN, 0.0) for _ in range(3))
    outcomes = [outcome_of(first.apply(*one)) for one in timed]
    assert [outcome_of(second.apply(*one)) for one in timed] == outcomes
    assert state(second) == state(first)
    later = []
    for position, one in enumerate(timed):
        if position == min(cut, len(timed) - 1):
            resumed = Machine.restored(resumed.saved())
        later.append(outcome_of(resumed.apply(*one)))
    assert later == outcomes
    assert state(resumed) == state(first)
    assert resumed.store.status(now) == first.store.status(now)


def hold(incarnation: str, version: Version) -> m.ReportWorker:
    return m.ReportWorker(incarnation=incarnation, version=version, figures={"bytes": 2.0, "pull_s": 0.5})


EVENTS: list[tuple[float, msgspec.Struct]] = [
    *((0.0, message) for message in START),
    (1.0, m.Put(key="x", value=b"value", ttl_s=500)),
    (1.0, m.PublishDigest(incarnation="run1-w0", version=Version(1, 1), digests={"L": b"1" * 512})),
    (1.0, hold("a-0-1", Version(1, 1))),
    (1.0, m.ReportEngine(incarnation="a-c1", version=Version(1, 1), outcome="updating")),
    (1.0, hold("a-1-1", Version(1, 1))),
    (1.0, m.ReportEngine(incarnation="a-c1", version=Version(1, 1), outcome="committed")),
    (2.0, worker("u", 0, 1)),
    (2.0, controller("u")),
    (2.0, m.AskCatchUp(incarnation="u-c1", timeout_s=60, verify="off")),
    (2.0, m.Lend(incarnation="a-1-1", target="u", info=writer(1, 2, process=worker("a", 1, 2).info.process).info)),
    (2.0, controller("a", version=Version(1, 1))),  # its version was committed here: no new epoch
    (3.0, announce(0, 2)),
    (3.0, m.Put(key="y", value=b"", ttl_s=3)),
    (4.0, worker("a", 0, 2, life=2)),
    (4.0, writer(0, 2, run="run2")),
    (5.0, writer(1, 2, run="run2")),
    (5.0, announce(1, 3, run="run2")),
    (5.0, hold("a-0-1", Version(1, 1))),  # fenced
    (9.0, m.Heartbeat(incarnations=["run2-w0", "a-0-2", "a-1-1", "u-0-1", "u-c1"])),
    (13.0, m.Heartbeat(incarnations=["run2-w0", "a-0-2", "a-1-1", "u-0-1", "u-c1"])),
    (16.0, m.Heartbeat(incarnations=["run2-w0", "a-0-2", "a-1-1", "u-0-1", "u-c1"])),  # the others are gone
    (16.0, m.AskCatchUp(incarnation="u-c1", timeout_s=60, verify="off")),
    (17.0, writer(1, 2, run="run2")),
    (17.0, announce(0, 4, run="run2")),
    (17.0, announce(1, 4, run="run2")),
    (17.0, controller("a", version=Version(1, 1))),
]
"""Something of everything: commits, a catch-up, fences, keys that go, members that are replaced or fall silent."""


@pytest.mark.parametrize("cut", range(len(EVENTS)))
def test_a_job_goes_on_alike_from_a_saved_state_after_any_entry(cut):
    first, resumed = Machine.begin("job", BEGIN, 0.0), Machine.begin("job", BEGIN, 0.0)
    catch_ups = 0
    for position, (now, message) in enumerate(EVENTS):
        if position == cut:
            resumed = Machine.restored(resumed.saved())
            assert state(resumed) == state(first)
            assert resumed.store.status(now) == first.store.status(now)
        one = entry(message, "repeated" if isinstance(message, m.Announce) and message.number == 2 else "")
        assert outcome_of(resumed.apply(one, now)) == outcome_of(first.apply(one, now))
        catch_ups += len(first.store.view(now).catch_ups)
    assert state(resumed) == state(first)
    view = first.store.view(17.0)
    assert (view.epoch, sorted(view.engines), catch_ups > 0) == (2, ["a", "u"], True)
    assert view.engines["a"].version == Version(1, 1)


def test_all_of_a_version_is_kept():
    fields = set(Sync.__dataclass_fields__) - {"engines", "revision", "concern", "admits"}
    assert set(SavedSync.__struct_fields__) == fields


def test_a_repeat_is_known_after_a_saved_state():
    machine = Machine.begin("job", BEGIN, 0.0)
    machine.apply(entry(writer()), 0.0)
    assert isinstance(machine.apply(entry(announce(), "key"), 0.0), bytes)
    again = Machine.restored(machine.saved())
    assert isinstance(again.apply(entry(announce(), "key"), 0.0), bytes)
    assert isinstance(again.apply(entry(announce(), "another"), 0.0), Fenced)


def test_what_keys_hold_is_counted_after_a_saved_state():
    machine = Machine.begin("job", Begin(LEASE, Limits(kv_bytes=10)), 0.0)
    machine.apply(entry(m.Put(key="a", value=b"12345678", ttl_s=9)), 0.0)
    machine = Machine.restored(machine.saved())
    assert isinstance(machine.apply(entry(m.Put(key="b", value=b"123", ttl_s=9)), 0.0), Refused)
    assert machine.apply(entry(m.Put(key="a", value=b"1", ttl_s=9)), 0.0) == b"\x80"


def test_replies_are_bounded():
    machine = Machine.begin("job", BEGIN, 0.0)
    for number in range(KEPT_REPLIES + 5):
        machine.apply(entry(m.Leave(incarnation="x"), f"k{number}"), 0.0)
    assert len(state(machine).replies) == KEPT_REPLIES


def test_time_in_which_nobody_could_be_heard_costs_no_lease():
    """The servers were away for long. Whoever is still there has a whole lease to say so."""
    machine = Machine.begin("job", BEGIN, 0.0)
    machine.apply(entry(writer()), 0.0)
    machine.apply(entry(worker()), 0.0)
    back = 1000.0
    machine.apply(Entry(TICK), back)
    assert machine.store.view(back).writers
    for passed in range(1, 10):
        machine.apply(entry(m.Heartbeat(incarnations=["run1-w0"])), back + passed)
    assert machine.store.view(back + 9).engines["e"].workers
    machine.apply(Entry(TICK), back + LEASE)
    assert not machine.store.view(back + LEASE).engines["e"].workers
    assert machine.store.view(back + LEASE).writers


def test_a_silent_log_wants_a_tick_long_before_it_counts_as_away():
    machine = Machine.begin("job", BEGIN, 0.0)
    machine.apply(entry(writer()), 0.0)
    assert not machine.wants_tick(1.0)
    assert machine.wants_tick(0.3 * LEASE)
    assert AWAY_LEASES > 0.3


def test_a_version_goes_on_after_the_servers_were_away():
    machine = Machine.begin("job", BEGIN, 0.0)
    for message in (writer(0, 2), writer(1, 2), worker(), controller(), announce(0, timeout_s=300)):
        machine.apply(entry(message), 0.0)
    machine = Machine.restored(machine.saved())
    machine.apply(Entry(TICK), 100.0)
    machine.apply(entry(announce(1, timeout_s=300)), 100.0)
    sync = machine.store.view(100.0).sync
    assert sync is not None and (sync.version, sync.state) == (Version(1, 1), "open")


def test_a_saved_state_of_something_else_is_an_error():
    with pytest.raises(MetaServerError, match="cannot be read"):
        Machine.restored(b"\xc1")


def test_a_bucket_lets_a_burst_through_and_then_so_many_a_second():
    bucket = TokenBucket(per_s=2, burst=3)
    assert [bucket.take(10.0) for _ in range(5)] == [True, True, True, False, False]
    assert [bucket.take(11.0) for _ in range(3)] == [True, True, False]
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
