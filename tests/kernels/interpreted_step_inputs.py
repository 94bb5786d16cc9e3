"""Inputs of an engine's step, in the interpreter, against the loop that defines them."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.kernels.paged.step_inputs import (
    Decided,
    Inputs,
    State,
    keep_tokens,
    step_inputs,
    step_inputs_reference,
)

PAGE, TABLE = 4, 300


def integers(values):
    return torch.tensor(list(values), dtype=torch.int32)


def bounds(counts):
    return integers([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()])


@st.composite
def steps(draw):
    sequences = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 600), st.integers(1, 300), st.integers(0, 3)),
            min_size=1,
            max_size=5,
        )
    )
    rows = draw(st.permutations(range(8)))
    groups = draw(st.integers(1, 3))
    starts = [start for _, start, _, _ in sequences]
    lengths = torch.randint(0, 99, (8,)).int()
    unknown = draw(st.lists(st.booleans(), min_size=len(starts), max_size=len(starts)))
    for b, row in enumerate(rows[: len(starts)]):
        lengths[row] = starts[b]
    table, last = torch.randint(1, 999, (groups, 8, TABLE)).int(), torch.randint(0, 99, (8,)).int()
    state = State(table, last, lengths)
    counts = [count for _, _, count, _ in sequences]
    needed = [-(-(start + count) // PAGE) for start, count in zip(starts, counts, strict=True)]
    new = [min(n, total) for (_, _, _, n), total in zip(sequences, needed, strict=True)]
    tokens = torch.randint(-3, 99, (sum(counts),)).int()
    decided = Decided(
        integers(-1 if padded else row for (padded, *_), row in zip(sequences, rows, strict=False)),
        integers(
            -1 if on_device else start for start, on_device in zip(starts, unknown, strict=True)
        ),
        bounds(counts),
        integers(total - n for total, n in zip(needed, new, strict=True)),
        bounds(new),
        torch.randint(1000, 1999, (groups * sum(new),)).int(),
        tokens,
    )
    return decided, state


def room(decided, groups):
    tokens, sequences = len(decided.tokens_T), len(decided.rows_B)
    sizes = [(tokens,), (tokens,), (groups, tokens), (sequences,), (groups, sequences, TABLE)]
    return Inputs(*(torch.full(size, -7, dtype=torch.int32) for size in sizes))


@settings(deadline=None, max_examples=25)
@given(steps())
def test_like_the_reference(example):
    decided, state = example
    twin = State(*(tensor.clone() for tensor in state))
    groups = len(state.table_GNP)
    found, wanted = room(decided, groups), room(decided, groups)
    step_inputs(decided, state, PAGE, found, impl="triton")
    step_inputs_reference(decided, twin, PAGE, wanted)
    for name in Inputs._fields[:-1]:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for b, length in enumerate(wanted.lengths_B.tolist()):
        pages = -(-length // PAGE)
        assert torch.equal(found.tables_GBP[:, b, :pages], wanted.tables_GBP[:, b, :pages])
    assert torch.equal(state.table_GNP, twin.table_GNP)


def test_tokens_are_kept_for_the_rows_that_are_there():
    state = State(torch.zeros(1, 3, 1).int(), integers([7, 8, 9]), integers([0, 0, 0]))
    keep_tokens(state, integers([1, 2, 3]), integers([2, -1, 0]), impl="triton")
    assert state.last_token_N.tolist() == [3, 8, 1]


def test_room_that_is_too_small_is_named():
    decided = Decided(integers([0]), integers([0]), integers([0, 2]), integers([0]), integers([0, 1]),
                      integers([5]), integers([1, 2]))  # fmt: skip
    state = State(torch.zeros(1, 1, 4).int(), integers([0]), integers([0]))
    sizes = ((1,), (1,), (1, 1), (1,), (1, 1, 4))
    small = Inputs(*(torch.zeros(size).int() for size in sizes))
    with pytest.raises(ValueError, match=r"^inputs\.tokens_T: wanted room for 2, got 1"):
        step_inputs(decided, state, PAGE, small)
