"""Drafts accepted in the interpreter, against the loop that defines it."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.kernels.paged.step_inputs import State
from cairn.kernels.sampling.accept_tokens import (
    MOST_DRAFTS,
    Drawn,
    accept_tokens,
    accept_tokens_reference,
)

ROWS = 9


def integers(values):
    return torch.tensor(list(values), dtype=torch.int32)


@st.composite
def steps(draw):
    """Sequences of any kind: padding, prompts that draw once or not at all, rows with drafts."""
    shapes = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, MOST_DRAFTS + 1)),
            min_size=1,
            max_size=6,
        )
    )
    rows = draw(st.permutations(range(ROWS)))
    counts = [more + max(draws, 1) for _, more, draws in shapes]
    draws = [0 if padded else draws for padded, _, draws in shapes]
    tokens = torch.randint(0, 3, (sum(counts),)).int()
    drawn = torch.randint(0, 3, (max(sum(draws), 1),)).int()
    return Drawn(
        integers(-1 if padded else row for (padded, *_), row in zip(shapes, rows, strict=False)),
        integers([0, *torch.tensor(counts).cumsum(0).tolist()]),
        integers([0, *torch.tensor(draws).cumsum(0).tolist()]),
        tokens,
        torch.randint(0, 999, (sum(counts),)).int(),
        drawn,
    )


@settings(deadline=None, max_examples=40)
@given(steps())
def test_like_the_reference(drawn):
    state = State(
        torch.zeros(ROWS, 1).int(), torch.full((ROWS,), -7).int(), torch.full((ROWS,), -7).int()
    )
    twin = State(*(tensor.clone() for tensor in state))
    accept_tokens(drawn, state, impl="triton")
    accept_tokens_reference(drawn, twin)
    assert all(torch.equal(a, b) for a, b in zip(state, twin, strict=True))


def test_a_run_ends_at_the_first_draft_that_was_not_drawn():
    state = State(torch.zeros(2, 1).int(), integers([0, 0]), integers([0, 0]))
    drawn = Drawn(integers([1, 0]), integers([0, 4, 5]), integers([0, 4, 5]), integers([9, 5, 6, 8, 3]),
                  integers([20, 21, 22, 23, 7]), integers([5, 6, 7, 8, 4]))  # fmt: skip
    accept_tokens(drawn, state, impl="triton")
    assert state.last_token_N.tolist() == [4, 7]
    assert state.length_N.tolist() == [8, 23]
