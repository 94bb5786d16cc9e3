"""Rules on made-up facts: the culprit is named whoever it is, and noise is nobody's fault."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.comm.doctor.diagnose import diagnose
from cairn.comm.doctor.findings import PairProbe, RankFacts, RankTrace, RecordedCall
from cairn.comm.doctor.job_log import examine_job_log
from cairn.comm.doctor.pairs import examine_probe
from cairn.comm.doctor.traces import examine
from cairn.comm.watchdog import HangWatch, RankNote

WORLDS = st.integers(2, 12)


def call(number, **more):
    usual = dict(
        group="0", sequence=number, op="all_reduce", shapes="[[8]]", dtypes="Float", elements=8,
        entered_ns=number * 10**9, done=True,
    )  # fmt: skip
    return RecordedCall(**{**usual, **more})


def traces(world, calls):
    members = {"0": list(range(world))}
    return [RankTrace(rank=r, calls=calls(r), groups=members, source="") for r in range(world)]


@settings(max_examples=60)
@given(world=WORLDS, length=st.integers(1, 20), data=st.data())
def test_whoever_stays_away_is_named(world, length, data):
    away = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=world - 1))

    def calls(rank):
        mine = [call(n) for n in range(1, length + 1)]
        return mine if rank in away else [*mine, call(length + 1, done=False)]

    found = examine(traces(world, calls))
    assert [one.cause for one in found] == ["hang"]
    named = [int(w) for w in found[0].where.replace(",", " ").split() if w.isdigit()]
    assert set(named[:8]) == set(sorted(away)[:8])


def test_ranks_that_have_forgotten_an_old_collective_are_no_error():
    """Several are under way at once, and one rank waits for one that others recorded long ago."""

    def calls(rank):
        first = 5 if rank == 0 else 13
        return [call(n, done=False, started=True) for n in range(first, 21)]

    (found,) = examine(traces(3, calls))
    assert (found.cause, found.where) == ("hang", "ranks 0, 1, 2")


@settings(max_examples=60)
@given(
    world=st.integers(3, 12),
    length=st.integers(1, 20),
    data=st.data(),
    change=st.sampled_from([dict(shapes="[[9]]"), dict(op="broadcast"), dict(dtypes="Half")]),
)
def test_whoever_calls_something_else_is_named(world, length, data, change):
    odd, at = data.draw(st.integers(0, world - 1)), data.draw(st.integers(1, length))

    def calls(rank):
        return [
            call(n, **(change if rank == odd and n == at else {})) for n in range(1, length + 1)
        ]

    found = examine(traces(world, calls))
    assert [(one.cause, one.where) for one in found] == [("mismatch", f"rank {odd}")]
    assert f"#{at}" in found[0].evidence[0]


@settings(max_examples=60)
@given(world=WORLDS, seed=st.integers(0, 9999), late=st.booleans(), data=st.data())
def test_a_straggler_is_named_and_noise_is_not(world, seed, late, data):
    dice, slow = np.random.default_rng(seed), data.draw(st.integers(0, world - 1))
    noise = dice.exponential(3e6, (world, 30))  # of three ms, by the scheduler

    def calls(rank):
        extra = 80e6 if late and rank == slow else 0
        return [call(n, entered_ns=int(n * 10**9 + noise[rank, n] + extra)) for n in range(1, 30)]

    found = examine(traces(world, calls))
    expected = [("straggler", f"rank {slow}")] if late else []
    assert [(one.cause, one.where) for one in found] == expected


def test_groups_are_judged_apart():
    """Rank 0 and 1 are in a group that stands; 2 and 3 go on in theirs."""
    first = [
        RankTrace(rank=0, calls=[call(1, group="a", done=False)], groups={"a": [0, 1]}, source=""),
        RankTrace(rank=1, calls=[], groups={"a": [0, 1]}, source=""),
    ]
    second = [
        RankTrace(
            rank=r, calls=[call(n, group="b") for n in range(1, 9)], groups={"b": [2, 3]}, source=""
        )
        for r in (2, 3)
    ]
    found = examine(first + second)
    assert [(one.cause, one.where) for one in found] == [("hang", "rank 1")]
    assert "group a" in found[0].evidence[0]


def test_a_few_ranks_without_a_dump_are_suspects_and_many_are_not_given():
    def some(count):
        return [t for t in traces(8, lambda r: [call(n) for n in range(1, 6)]) if t.rank < count]

    assert [one.where for one in examine(some(7))] == ["rank 7"]
    assert examine(some(2)) == []
    assert examine([]) == []


def probe(times, compute=None, facts=None):
    world = len(times)
    facts = facts or [
        RankFacts(rank=r, host=f"h{r}", interface="eth0", address=f"10.0.0.{r}")
        for r in range(world)
    ]
    table = [[list(times[a][b]) if a != b else [] for b in range(world)] for a in range(world)]
    return PairProbe(bytes=65536, facts=facts, pair_us=table, compute_us=compute or [100.0] * world)


def quick(world, seed):
    """A quarter of a millisecond, and now and then the scheduler."""
    dice = np.random.default_rng(seed)
    return (
        250
        + dice.exponential(40, (world, world, 8))
        + 4000 * (dice.random((world, world, 8)) < 0.1)
    )


@settings(max_examples=50)
@given(world=st.integers(3, 8), seed=st.integers(0, 9999), data=st.data())
def test_a_slow_host_a_slow_link_and_neither(world, seed, data):
    assert examine_probe(probe(quick(world, seed))) == []
    bad = data.draw(st.integers(0, world - 1))
    slow = quick(world, seed)
    slow[bad] += 9000
    slow[:, bad] += 9000
    found = examine_probe(probe(slow))
    assert [one.cause for one in found] == ["slow host"]
    assert found[0].where.startswith(f"rank {bad} ")
    if world < 4:
        return  # of three pairs one is no exception
    other = (bad + 1) % world
    link = quick(world, seed)
    link[bad, other] += 9000
    link[other, bad] += 9000
    found = examine_probe(probe(link))
    assert [one.cause for one in found] == ["slow link"]
    assert found[0].where == f"ranks {min(bad, other)} and {max(bad, other)}"


@settings(max_examples=50)
@given(seed=st.integers(0, 9999), extra_ms=st.sampled_from([0, 60, 150, 180, 205, 420]))
def test_a_link_loses_packets_when_messages_wait_for_a_second_sending(seed, extra_ms):
    """TCP sends again after 200 ms at the soonest; what waits for less waited for a processor."""
    times = quick(4, seed)
    times[0][1][::3] += 1000 * extra_ms  # 6 of the 16 messages of a pair
    times[1][0][::3] += 1000 * extra_ms
    found = [(one.cause, one.where) for one in examine_probe(probe(times))]
    assert found == ([("lossy link", "ranks 0 and 1")] if extra_ms > 200 else [])


def test_a_host_that_computes_slowly_is_told_from_one_that_sends_slowly():
    times = quick(4, 1)
    times[2] += 9000
    times[:, 2] += 9000
    sends = examine_probe(probe(times))[0]
    works = examine_probe(probe(times, compute=[100, 100, 900, 100]))[0]
    assert "it is its network" in sends.evidence[1]
    assert "the host itself is slow" in works.evidence[1]


@pytest.mark.parametrize(
    ("order", "wrong"), [((0, 0, 1, 1), False), ((0, 1, 0, 1), True), ((0, 0, 0, 1, 1, 1), False),
                         ((0, 1, 2, 0, 1, 2), True), ((0, 1, 1, 0), False)],
)  # fmt: skip
def test_a_ring_that_leaves_hosts_too_often_is_a_bad_map(order, wrong):
    host = np.array(order)
    times = quick(len(order), 3) + 9000 * (host[:, None] != host)[:, :, None]
    found = examine_probe(probe(times))
    assert [one.cause for one in found] == (["rank mapping"] if wrong else [])


def test_loopback_matters_only_between_hosts():
    def facts(hosts):
        return [
            RankFacts(rank=r, host=h, interface="lo", address="127.0.0.1")
            for r, h in enumerate(hosts)
        ]

    here = examine_probe(probe(quick(3, 0), facts=facts(["a", "a", "a"])))
    apart = examine_probe(probe(quick(3, 0), facts=facts(["a", "b", "b"])))
    assert here == []
    assert [one.cause for one in apart] == ["wrong interface"]


def caught(rank, number, op="ALLREDUCE"):
    return (
        f"[Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=1)"
    )


def test_a_log_of_timeouts_names_who_stopped_earlier_or_asks_for_dumps():
    behind = examine_job_log("\n".join([caught(0, 9), caught(1, 7), caught(2, 9)]))[0]
    assert (behind.cause, behind.where) == ("hang", "rank 1")
    unclear = examine_job_log("\n".join([caught(0, 9), caught(1, 9)]))[0]
    assert unclear.where == "ranks 0, 1"
    assert "does not show who" in unclear.evidence[1]
    assert "dumps of all ranks" in unclear.advice


def test_what_torch_itself_found_is_passed_on():
    text = "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: X"
    assert [(one.cause, one.where) for one in examine_job_log(text)] == [("mismatch", "rank 1")]
    text = "RuntimeError: [../gloo/pair.cc:1] Connection closed by peer [10.0.0.7]:4711"
    assert [(one.cause, one.where) for one in examine_job_log(text)] == [("hang", "10.0.0.7")]
    assert examine_job_log("step 3 loss 2.1") == []


GLOO = (
    "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 600000ms for recv operation to complete"
)


def test_an_ordinary_timeout_of_gloo_is_known(tmp_path):
    (found,) = examine_job_log(GLOO)
    assert (found.cause, found.where) == ("hang", "a peer of rank 0")
    assert "rank 0 waited 600 s for a recv of gloo" in found.evidence[0]
    log = tmp_path / "worker-0.log"
    log.write_text("step 3 loss 2.1\n" + GLOO.replace("[rank0]:", "r1|"))
    assert diagnose([log]).findings[0].where == "a peer of rank 1"


def test_every_line_of_the_watchdog_is_known_to_the_doctor():
    notes = {
        0: RankNote(rank=0, host="n6", beat=1, moved="a", waits=["gloo:all_reduce #4"]),
        1: RankNote(rank=1, host="n7", beat=1, moved="a"),
    }
    watch, lines = HangWatch(2, 60.0), []
    for now in range(0, 200, 3):
        notes[0] = msgspec.structs.replace(notes[0], beat=now)  # rank 1 is stopped
        lines += filter(None, [watch.look(notes, float(now))])
    assert len(lines) == 2
    assert [(one.cause, one.where) for line in lines for one in examine_job_log(line)] == [
        ("hang", "rank 1 on n7")
    ] * 2
    assert "no sign of life from rank 1 on n7 for 15 s" in lines[0]
