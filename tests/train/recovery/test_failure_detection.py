"""Who is dead, silent, stuck or slow: told from the board alone."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.train.checkpoint.piece import whole
from cairn.train.recovery.checksum import Mark, complaint, disagreeing, mark_of
from cairn.train.recovery.failure_detection import (
    Progress,
    RankView,
    Slowness,
    StepWork,
    judge,
    median_of_others,
    moved,
)
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.status_board import RING, STARTING, TRAINING, Board

SETTINGS = Recovery(silent_s=3, stuck_s=60, start_s=100)
NOW = 1000.0


def rank(number, **changes):
    given = dict(rank=number, alive=True, phase=TRAINING, beat=NOW - 0.1, step=7, collectives=40)
    return RankView(**(given | changes))


def look(*seen, at=NOW, started=900.0):
    return judge(seen, Progress(at=at), started, NOW, SETTINGS)


def test_the_surest_sign_comes_first():
    assert look(rank(0), rank(1)) is None
    dead, silent = rank(1, alive=False), rank(0, beat=NOW - 5)
    assert look(silent, dead).kind == "exit"
    found = look(rank(1), silent)
    assert (found.kind, found.rank, found.since) == ("silence", 0, NOW - 5)


def test_a_starved_process_is_not_taken_for_a_stopped_one():
    assert look(rank(0), rank(1, beat=NOW - 5, state="R")) is None
    assert look(rank(0), rank(1, beat=NOW - 5, state="T")).rank == 1
    assert look(rank(0), rank(1, beat=NOW - 31, state="R")).rank == 1


def test_of_ranks_that_wait_for_each_other_the_one_behind_is_the_suspect():
    found = look(rank(0), rank(1, collectives=38), rank(2), at=NOW - 61)
    assert (found.kind, found.rank) == ("stuck", 1)
    assert "38 collectives, others up to 40" in found.why
    assert look(rank(0), rank(1, collectives=38), at=NOW - 59) is None


def test_a_rank_that_never_starts():
    assert look(rank(0), rank(1, phase=STARTING, beat=0.0)) is None
    found = look(rank(0), rank(1, phase=STARTING, beat=0.0), started=NOW - 101)
    assert (found.kind, found.rank) == ("late", 1)


def test_progress_is_any_change():
    first = moved(Progress(), [rank(0)], 5.0)
    assert first.at == 5.0
    assert moved(first, [rank(0, beat=NOW)], 6.0) is first
    assert moved(first, [rank(0, collectives=41)], 7.0).at == 7.0


def test_a_straggler_is_slow_in_several_steps_in_a_row():
    slowness = Slowness(3.0)
    found = []
    for step in range(1, 12):
        late = 0.5 if step in (2, 3, 5, 6, 7, 8, 9) else 0.1  # two steps are nobody's fault
        seen = [rank(n, step=step, busy_s=late if n == 2 else 0.1) for n in range(4)]
        for _ in range(2):  # the same step is looked at once
            found += [(step, number) for number in slowness.look(seen)]
    assert found == [(7, 2)]


def test_steps_are_looked_at_one_by_one_however_many_are_told_at_once():
    """Ranks that are far apart tell of them at other moments, and of several together."""
    steps = [StepWork(step, 0.5 if step <= 5 else 0.1, 0.6) for step in range(1, 12)]
    others = [StepWork(step, 0.1, 0.6) for step in range(1, 12)]
    slowness = Slowness(3.0)
    assert slowness.look([rank(0, recent=tuple(others)), rank(1, recent=tuple(steps[:2]))]) == []
    assert slowness.look([rank(0, recent=()), rank(1, recent=tuple(steps[2:]))]) == [1]
    assert (slowness.over, slowness.named) == ([1], set())  # named and forgiven in one look
    assert (
        slowness.evidence[1]
        .words()
        .startswith("computes 0.500 s of a step, 5.0 times the others' 0.100 s, who")
    )
    assert slowness.dragged_s == pytest.approx(3 * 0.4)
    alone = Slowness(3.0)
    assert alone.look([rank(0, recent=tuple(steps))]) == []


@given(st.lists(st.floats(0.05, 0.1), min_size=2, max_size=8))
def test_ordinary_differences_are_no_stragglers(busy):
    slowness = Slowness(3.0)
    for step in range(1, 10):
        assert slowness.look([rank(n, step=step, busy_s=b) for n, b in enumerate(busy)]) == []


@given(st.lists(st.floats(0, 9), min_size=2, max_size=12), st.data())
def test_the_median_of_the_others_is_that_of_the_list_without_one(values, data):
    n = data.draw(st.integers(0, len(values) - 1))
    others = values[:n] + values[n + 1 :]
    assert median_of_others(sorted(values), values[n]) == statistics.median(others)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.data())
def test_the_minority_among_replicas_is_named(kinds, data):
    marks = [Mark(kind, 100 + kind) for kind in kinds]
    assert disagreeing(marks) == ([], True)
    bad = data.draw(st.integers(0, len(kinds) - 1))
    marks[bad] = Mark(kinds[bad], 7)
    replicas = kinds.count(kinds[bad])
    wrong, certain = disagreeing(marks)
    if replicas == 1:
        assert wrong == []  # nobody to compare with
    elif replicas == 2:
        assert (sorted(wrong), certain) == (
            [r for r, k in enumerate(kinds) if k == kinds[bad]],
            False,
        )
    else:
        assert (wrong, certain) == ([bad], True)
    assert (complaint(marks, 5) is None) == (wrong == [])


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=5),
    st.integers(0, 2),
    st.data(),
)
def test_every_flipped_bit_of_every_word_is_found(words, others, data):
    """Of a tensor that others follow, as a signed number that torch can gather; the sign bit included."""
    flipped = data.draw(st.integers(0, len(words) - 1))
    tensor = torch.tensor(words)
    pieces = {"model/a": whole(tensor)}
    pieces |= {f"model/b{n}": whole(torch.tensor([1.5, n])) for n in range(others)}

    def gathered():
        return Mark(*torch.tensor(mark_of(pieces), dtype=torch.int64).tolist())

    right = gathered()
    for bit in range(64):
        tensor[flipped] ^= 1 << bit if bit < 63 else -(1 << 63)
        wrong = complaint([right, gathered(), right], 7)
        assert wrong is not None, bit
        assert (wrong.ranks, wrong.certain) == ((1,), True)
        tensor[flipped] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert gathered() == right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_sign_is_found_in_every_number(dtype):
    tensor = torch.linspace(-2, 2, 11).to(dtype)  # a tail that fills no word
    right = mark_of({"model/a": whole(tensor)})
    for number in range(11):
        other = tensor.clone()
        other[number] = -other[number]
        assert mark_of({"model/a": whole(other)}).check != right.check


def test_the_board_remembers_when_steps_ended():
    board = Board(2, 1)
    for step in range(1, RING + 11):
        board.step_done(1, step)
    ends = board.ends(1, 0)
    assert [step for step, _ in ends] == list(range(11, RING + 11))
    assert [when for _, when in ends] == sorted(when for _, when in ends)
    board.set(1, settled=30)
    board.set(0, settled=20)
    assert board.committed(2) == 20
