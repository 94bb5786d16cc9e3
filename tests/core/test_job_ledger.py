"""Every second of a job is in exactly one part, whatever happens to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cairn.core.errors import DataError
from cairn.core.job_events import (
    Ended,
    Failed,
    Noticed,
    Paused,
    Started,
    Stepped,
    Submitted,
    Trained,
)
from cairn.core.job_ledger import account
from cairn.core.job_ledger_files import metrics_text, read_ledger, write_ledger


def story():
    """Queued 2 s, started in 1 s, three steps of 1 s with a copy after the second; killed; back at step 2."""
    return [
        Submitted(at=0.0), Started(at=2.0, step=0), Trained(at=3.0), Stepped(at=4.0, step=1),
        Stepped(at=5.0, step=2, blocked=0.25), Stepped(at=6.0, step=3),
        Failed(at=6.75, since=6.5, cause="killed", rank=1, node=0, why="SIGKILL", rung="heal"),
        Started(at=7.0, step=2), Trained(at=8.0), Stepped(at=9.0, step=3), Ended(at=9.0),
    ]  # fmt: skip


def test_each_second_is_where_it_belongs():
    ledger = account(story())
    assert ledger.parts == pytest.approx(
        dict(productive=2.75, lost=1.5, checkpoint=0.25, detect=0.25, restart=2.25, queue=2.0)
    )
    assert ledger.wall == pytest.approx(9.0)
    assert ledger.ettr == pytest.approx(2.75 / 9)
    assert ledger.by_cause["restart"] == pytest.approx(dict(start=1.0, killed=1.25))
    (incident,) = ledger.incidents
    assert (incident.step, incident.back_to, incident.steps_lost) == (3, 2, 1)
    assert (incident.detect_s, incident.recovery_s) == pytest.approx((0.25, 1.25))
    assert "ended at step 3" in ledger.line()
    assert "killed (SIGKILL), answered by heal" in ledger.line()


def test_live_it_tells_what_lasts_at_the_moment():
    during_queue = account(story()[:1], now=1.5)
    assert (during_queue.parts["queue"], during_queue.state) == (1.5, "queued")
    after_failure = account(story()[:7], now=7.5)
    assert after_failure.parts["restart"] == pytest.approx(1.75)
    assert after_failure.incidents[0].recovery_s == pytest.approx(0.75)


def test_a_pause_loses_nothing():
    events = [*story()[:6], Paused(at=6.5, cause="grow"), Started(at=7.0, step=3), Trained(at=8.0)]
    ledger = account(events)
    assert ledger.parts["lost"] == 0
    assert ledger.by_cause["restart"]["grow"] == pytest.approx(1.5)


@st.composite
def lives(draw):
    """Any order of failures, pauses, steps and restarts that a supervisor could write down."""
    now, step, events = 0.0, 0, [Submitted(at=0.0)]

    def pass_time():
        nonlocal now
        now += draw(st.floats(0, 10))
        return now

    for _ in range(draw(st.integers(1, 4))):
        events += [Started(at=pass_time(), step=step), Trained(at=pass_time())]
        reached = step
        for _ in range(draw(st.integers(0, 5))):
            reached += 1
            events.append(Stepped(at=pass_time(), step=reached, blocked=draw(st.floats(0, 12))))
        step = draw(st.integers(step, reached))
        if draw(st.booleans()):
            since = draw(st.floats(0, 50))
            at = pass_time()
            events.append(Failed(at=at, since=min(since, at), cause="x"))
        else:
            events.append(Paused(at=pass_time(), cause="grow"))
            step = reached
    return events, now + draw(st.floats(0, 5))


@given(lives())
def test_the_parts_are_the_whole(life):
    events, now = life
    ledger = account(events, now)
    assert sum(ledger.parts.values()) == pytest.approx(now, abs=1e-6)
    assert min(ledger.parts.values()) >= -1e-6
    for part, causes in ledger.by_cause.items():
        assert sum(causes.values()) <= ledger.parts[part] + 1e-6
    assert 0 <= ledger.ettr <= 1 + 1e-9


def test_prometheus_reads_it_and_so_does_the_next_reader(tmp_path):
    ledger = account(story())
    families = {f.name: f for f in text_string_to_metric_families(metrics_text(ledger))}
    seconds = sum(sample.value for sample in families["cairn_job_time_seconds"].samples)
    assert seconds == pytest.approx(ledger.wall)
    assert read_ledger(tmp_path) is None
    write_ledger(tmp_path, ledger)
    assert read_ledger(tmp_path) == ledger
    (tmp_path / "recovery" / "ledger.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_ledger(tmp_path)


def test_what_a_slow_rank_costs_is_part_of_the_productive_time_and_goes_with_the_steps_that_are_lost():
    slow = Noticed(at=1.5, what="straggler", rank=3, host="h", step=1, why="computes 0.5 s")
    events = [
        Submitted(at=0.0),
        Started(at=0.0, step=0),
        Trained(at=0.0),
        Stepped(at=1.0, step=1, dragged=0.25),
        slow,
        Stepped(at=2.0, step=2, dragged=1.5),
        Stepped(at=3.0, step=3),  # never more than the step took
    ]
    ledger = account(events)
    assert ledger.parts["productive"] == pytest.approx(3.0)
    assert ledger.by_cause["productive"] == pytest.approx({"straggler": 0.25 + 1.0 + 0.5})
    assert ledger.slow_now()[0].rank == 3
    assert "(1.8 s of it waiting for slow ranks)" in ledger.line()
    assert "slow: rank 3 on h, since step 1: computes 0.5 s" in ledger.line()
    assert 'cairn_job_time_seconds_total{cause="straggler",part="productive"} 1.75' in metrics_text(
        ledger
    )
    assert "cairn_job_slow_ranks 1" in metrics_text(ledger)
    failed = Failed(at=3.0, since=3.0, cause="hang", rank=3, host="h", why="stopped", rung="heal")
    back = account(
        [*events, failed, Started(at=3.0, step=1), Trained(at=4.0), Stepped(at=5.0, step=2)]
    )
    assert back.by_cause["productive"] == pytest.approx({"straggler": 0.25})
    assert back.parts["lost"] == pytest.approx(2.0)
    assert (back.incidents[0].host, back.slow[0].until, back.slow_now()) == ("h", 3, [])
    over = account([*events, Noticed(at=3.0, what="straggler over", rank=3, step=3)])
    assert (over.slow[0].until, over.slow_now()) == (3, [])
