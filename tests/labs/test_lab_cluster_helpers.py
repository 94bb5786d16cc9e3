"""What the cluster labs compute themselves: quorums, elections, deadlocks, covers, a file server, a trainee."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.labs.cluster import (
    _trainee,
    elastic,
    gang_deadlock,
    goodput,
    io_storm,
    pipeline_templates,
)
from cairn.labs.cluster._quorum import Election, stale_chance, stale_share
from cairn.train.recovery.templates import cover


@pytest.mark.parametrize("nodes", [3, 5])
def test_stale_chance_counts_the_reads_that_miss_a_write(nodes):
    for written, asked in itertools.product(range(1, nodes + 1), repeat=2):
        reads = list(itertools.combinations(range(nodes), asked))
        missed = sum(min(read) >= written for read in reads)  # the write reached 0 .. written - 1
        assert stale_chance(nodes, written, asked) == pytest.approx(missed / len(reads))


def test_quorums_that_meet_never_read_old_values():
    draw = random.Random(1)
    assert stale_share(5, 3, 3, 500, draw) == 0
    assert stale_share(5, 2, 2, 2000, draw) == pytest.approx(0.3, abs=0.05)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(0, 7),
    st.integers(0, 10**6),
    st.floats(1, 300),
    st.floats(0.1, 400),
)
def test_a_term_has_one_leader_at_most_and_a_minority_none(nodes, down, seed, spread, delay):
    """Also with messages that take longer than timeouts, and whatever the timeouts are."""
    down = min(down, nodes)
    found = Election(nodes, down, spread_ms=spread, delay_ms=delay, seed=seed).run(limit_ms=3_000)
    assert found.leaders_of_one_term <= 1
    if (nodes - down) * 2 <= nodes:
        assert found.elected_ms is None
        assert found.leaders_of_one_term == 0


def test_a_majority_with_spread_timeouts_elects():
    found = [Election(5, 2, spread_ms=150, delay_ms=5, seed=seed).run(60_000) for seed in range(30)]
    assert all(one.elected_ms is not None for one in found)


@pytest.mark.parametrize(("need", "gpus"), [(2, 3), (3, 4), (4, 8), (6, 8)])
def test_deadlock_chance_counts_the_orders(need, gpus):
    """Every order in which so many GPUs can go to two jobs, each as likely as any other."""
    stuck = 0
    orders = list(itertools.product((0, 1), repeat=gpus))
    for order in orders:
        lack = [need, need]
        for job in order:
            if not all(lack):
                break
            lack[job] -= 1
        stuck += all(lack)
    assert gang_deadlock.deadlock_chance(need, need, gpus) == pytest.approx(stuck / len(orders))


@pytest.mark.parametrize("nodes", range(3, 22))
def test_a_cover_is_the_best_of_all(nodes):
    chosen = cover(nodes, pipeline_templates.SIZES, pipeline_templates.rate)
    assert sum(chosen) <= nodes
    best = pipeline_templates.all_covers(nodes)
    assert sum(map(pipeline_templates.rate, chosen)) == pytest.approx(best)


def test_a_file_server_counts_what_every_reader_takes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 300)
    server = io_storm.FileServer(1e9)
    assert server.read(path) == path.read_bytes()
    io_storm.all_read(server, path, 3)
    assert server.served == 4 * path.stat().st_size
    again = io_storm.FileServer(1e9)
    io_storm.one_reads(again, path, 5, 1e9)
    assert again.served == path.stat().st_size


def test_workers_do_not_change_what_is_learnt():
    weights = [elastic.train(plan) for plan in elastic.PLANS.values()]
    assert all(torch.allclose(weight, weights[0], atol=1e-12) for weight in weights)


def test_a_trainee_that_comes_back_ends_where_one_left_alone_does(tmp_path):
    before = torch.get_num_threads()
    try:
        _trainee.train(tmp_path / "broken", 7, every=3)  # ends early: step 6 is its last checkpoint
        half = tmp_path / "broken" / "step-00000009"
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half of it")
        warned = []
        assert _trainee.resume(tmp_path / "broken", warned).step == 6
        assert "step-00000009" in warned[0]
        back = _trainee.train(tmp_path / "broken", 12, every=3)
        alone = _trainee.train(tmp_path / "calm", 12, every=3)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(back.weight, alone.weight)
    assert torch.equal(back.momentum, alone.momentum)
    assert alone.loss() < _trainee.Run().loss()


def test_a_killed_run_has_come_as_far_as_was_seen_though_it_died_while_it_wrote_that(tmp_path):
    progress = tmp_path / "progress"
    progress.write_text("9")
    dying = SimpleNamespace(
        is_alive=lambda: True, kill=lambda: progress.write_text(""), join=lambda patience_s: None
    )
    assert _trainee.kill_at(tmp_path, dying, 9) == 9


def test_steps_of_a_process_before_are_not_those_of_the_next(tmp_path, monkeypatch):
    (tmp_path / "progress").write_text("7")
    monkeypatch.setattr(_trainee, "resume", lambda root, warnings: SimpleNamespace(step=6))
    never = SimpleNamespace(Process=lambda **given: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr("cairn.labs.ranks.process_context", lambda function: never)
    _trainee.start(tmp_path, 12, 3, 0.0)
    assert _trainee.step_of(tmp_path) == 6


@pytest.mark.parametrize("kills", [1, 5, 8, 50])
def test_kills_are_as_far_apart_as_the_learner_is_told(kills):
    gaps = goodput.drawn(kills)
    assert min(gaps) >= 1
    assert sum(gaps) / kills == pytest.approx(goodput.MEAN_STEPS, abs=0.5)
