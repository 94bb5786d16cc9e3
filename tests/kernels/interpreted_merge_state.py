"""Joining attention results, in the interpreter: parts of the keys joined are attention over all of them."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention.merge_state import State, merge_state, merge_state_reference


def state(dtype: torch.dtype, tokens: int = 13, heads: int = 3, columns: int = 64) -> State:
    return State(torch.randn(tokens, heads, columns).to(dtype), 3 * torch.randn(tokens, heads))


def exact(a: State, b: State) -> State:
    return merge_state_reference(*(State(s.out_THC.double(), s.lse_TH.double()) for s in (a, b)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("columns", [64, 96])
def test_two_states(dtype, tolerance, columns):
    a, b, joined = (state(dtype, columns=columns) for _ in range(3))
    poison(*joined)
    merge_state(a, b, joined, impl="triton")
    assert relative_error(joined, exact(a, b)) < tolerance


def test_a_side_that_saw_nothing_is_not_looked_at():
    a, b = state(torch.float32), state(torch.float32)
    a.lse_TH[:5], b.lse_TH[3:8] = -torch.inf, -torch.inf
    a.out_THC[:5], b.out_THC[3:8] = torch.nan, torch.nan
    joined = merge_state(a, b, impl="triton")
    assert joined.out_THC.isfinite().all()
    assert torch.equal(joined.out_THC[:3], b.out_THC[:3])
    assert torch.equal(joined.out_THC[5:8], a.out_THC[5:8])
    assert (joined.out_THC[3:5] == 0).all()
    assert (joined.lse_TH[3:5] == -torch.inf).all()


def test_in_place_and_from_other_layouts():
    a, b = state(torch.float32), state(torch.float32)
    sideways = State(
        a.out_THC.transpose(0, 1).contiguous().transpose(0, 1), a.lse_TH.T.contiguous().T
    )
    wanted = exact(a, b)
    joined = merge_state(sideways, b, sideways, impl="triton")
    assert joined.out_THC.data_ptr() == sideways.out_THC.data_ptr()
    assert relative_error(joined, wanted) < 1e-5


def test_parts_of_the_keys():
    """Softmax over 40 keys, from three parts of them."""
    scores_THN, values_NC = torch.randn(5, 2, 40).double(), torch.randn(40, 16).double()
    parts = [
        State((s.softmax(-1) @ v).float(), s.logsumexp(-1).float())
        for s, v in zip(scores_THN.split([7, 1, 32], -1), values_NC.split([7, 1, 32]), strict=True)
    ]
    joined = merge_state(merge_state(parts[2], parts[0], impl="triton"), parts[1], impl="triton")
    whole = State(scores_THN.softmax(-1) @ values_NC, scores_THN.logsumexp(-1))
    assert relative_error(joined, whole) < 1e-5


def test_no_rows():
    empty = State(torch.empty(0, 3, 64), torch.empty(0, 3))
    assert merge_state(empty, empty, impl="triton").out_THC.shape == (0, 3, 64)
