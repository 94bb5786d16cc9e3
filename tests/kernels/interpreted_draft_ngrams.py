"""Drafts made and drawn on the device, in the interpreter, against the loops that define them."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.kernels.sampling.draft_ngrams import (
    DRAFTED,
    draft_ngrams,
    draft_ngrams_reference,
    random_texts,
)
from cairn.kernels.sampling.synthetic_draws import (
    random_rates,
    synthetic_draws,
    synthetic_draws_reference,
)

ROWS, LONGEST_TEXT = 5, 60


@st.composite
def steps(draw):
    """Padding, prompts, rows that decode without drafts, and rows with some, over texts of few different tokens."""
    letters = draw(st.integers(1, 4))
    torch.manual_seed(draw(st.integers(0, 99)))
    text_NC = torch.randint(0, letters, (ROWS, LONGEST_TEXT)).int()
    rows = draw(st.permutations(range(ROWS)))
    kind = st.tuples(st.integers(0, 40), st.integers(0, 8), st.booleans())
    kinds = draw(st.lists(kind, min_size=1, max_size=ROWS))
    bounds, tokens, positions, of = [0], [], [], []
    for (start, drafts, prompt), row in zip(kinds, rows, strict=False):
        known = [draw(st.integers(0, letters - 1)) for _ in range(drafts if prompt else 1)]
        tokens += known + [DRAFTED] * (0 if prompt else drafts)
        positions += range(start, start + len(tokens) - bounds[-1])
        bounds.append(len(tokens))
        of.append(-1 if row == 0 and prompt else row)
    integers = [torch.tensor(part, dtype=torch.int32) for part in (of, bounds, tokens, positions)]
    return *integers, text_NC


@settings(deadline=None, max_examples=15)
@given(steps(), st.booleans())
def test_drafts_like_the_reference(step, by_head):
    rows_B, bounds_B1, tokens_T, positions_T, text_NC = step
    wanted_T, twin_NC = tokens_T.clone(), text_NC.clone()
    made_NK = torch.randint(0, 99, (ROWS, 8)).int() if by_head else None
    draft_ngrams_reference(rows_B, bounds_B1, wanted_T, positions_T, twin_NC, made_NK)
    draft_ngrams(rows_B, bounds_B1, tokens_T, positions_T, text_NC, made_NK, impl="triton")
    assert tokens_T.tolist() == wanted_T.tolist()
    assert torch.equal(text_NC, twin_NC)
    assert (wanted_T >= 0).all()


def test_a_head_has_drafts_for_every_text():
    made_NK = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="made_NK: wanted a row for each of the 3 texts"):
        draft_ngrams(*random_texts(3, 20, 2, "cpu"), made_NK)


def test_draws_like_the_reference():
    drawn, rates_K, steps_N = random_rates(7, 4, "cpu")
    twin, counted_N = drawn._replace(drawn_S=drawn.drawn_S.clone()), steps_N.clone()
    for _ in range(5):
        synthetic_draws_reference(twin, rates_K, counted_N)
        synthetic_draws(drawn, rates_K, steps_N, impl="triton")
        assert torch.equal(drawn.drawn_S, twin.drawn_S)
        assert torch.equal(steps_N, counted_N)
