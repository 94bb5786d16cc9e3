"""fp8 of a matrix and of its transpose, in the interpreter, to the bit."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch

from cairn.kernels.quantize.quantize_transposed import (
    E4M3,
    E5M2,
    quantize_transposed,
    quantize_transposed_reference,
)


def same(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(150, 70), (1, 3), (0, 4)])
def test_both_layouts_equal_the_reference(shape, kind, dtype):
    x = (torch.randn(shape) * 3).to(kind)
    if x.numel() == 0:
        assert quantize_transposed(x, None, dtype, impl="triton").transposed.shape == (4, 0)
        return
    found = quantize_transposed(x, None, dtype, both=True, impl="triton")
    wanted = quantize_transposed_reference(x, None, dtype, True)
    assert torch.equal(found.scale, wanted.scale)
    assert same(found.transposed, wanted.transposed)
    assert same(found.values, wanted.values)
    given = quantize_transposed(x, found.scale, dtype, impl="triton")
    assert given.values is None
    assert same(
        given.transposed, quantize_transposed_reference(x, found.scale, dtype, False).transposed
    )


def test_a_given_scale_saturates():
    x = torch.tensor([[1.0, -1000.0], [500.0, 2.0]])
    found = quantize_transposed(x, torch.tensor(1.0), both=True, impl="triton")
    assert found.values.float().tolist() == [[1.0, -448.0], [448.0, 2.0]]
    assert found.transposed.float().tolist() == [[1.0, 448.0], [-448.0, 2.0]]


def test_nothing_has_the_scale_of_zeros():
    zeros = quantize_transposed(torch.zeros(4, 4), impl="triton")
    for impl in ("triton", "reference"):
        nothing = quantize_transposed(torch.zeros(0, 4), both=True, impl=impl)
        assert nothing.transposed.shape == (4, 0)
        assert nothing.scale == zeros.scale
