"""Parts of a product, their sum, the residual and the norm, in the interpreter."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.norm.join_norm import (
    Parts,
    join_add_rmsnorm,
    join_add_rmsnorm_fp8,
    join_add_rmsnorm_reference,
)
from cairn.kernels.norm.rmsnorm import add_rmsnorm
from cairn.kernels.quantize.quantize import quantize_reference

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 64), (2, 5, 130), (1, 1, 16), (3, 0, 8)])
def test_join(shape, plus_one, dtype):
    parts = Parts(torch.randn(shape))
    residual, weight = torch.randn(shape[1:]).to(dtype), torch.randn(shape[2]).to(dtype)
    wide = (Parts(parts.sums_SMD.double()), residual.double(), weight.double())
    exact, exact_total = join_add_rmsnorm_reference(*wide, 1e-5, plus_one)
    kept = residual.clone()
    total = torch.empty_like(residual)
    poison(total)
    y, same = join_add_rmsnorm(
        parts, residual, weight, 1e-5, plus_one=plus_one, residual_out=total, impl="triton"
    )
    assert same is total
    assert torch.equal(residual, kept)
    tolerance = 1e-2 if dtype == BF16 else 1e-5
    assert relative_error(y, exact) < tolerance
    assert relative_error(total, exact_total) < tolerance


def test_it_rounds_where_the_parts_of_it_do():
    parts, residual, weight = Parts(torch.randn(4, 7, 96)), *torch.randn(2, 7, 96).to(BF16)
    weight = weight[0].contiguous()
    joined = parts.sums_SMD[0] + parts.sums_SMD[1] + parts.sums_SMD[2] + parts.sums_SMD[3]
    apart, added = add_rmsnorm(joined.to(BF16), residual, weight, impl="triton")
    y, total = join_add_rmsnorm(
        parts, residual, weight, residual_out=residual, prefetch=True, impl="triton"
    )
    assert total is residual
    assert torch.equal(total, added)
    assert torch.equal(y, apart)
    again = added - joined.to(
        BF16
    )  # any residual will do: the norm of what comes of it is quantised
    exact = quantize_reference(join_add_rmsnorm(parts, again, weight, impl="triton")[0])
    found, _ = join_add_rmsnorm_fp8(parts, again, weight, impl="triton")
    assert torch.equal(found.values.view(torch.uint8), exact.values.view(torch.uint8))
    assert torch.equal(found.scale, exact.scale)


@pytest.mark.parametrize("wrong", ["parts", "weight", "residual_out"])
def test_what_does_not_fit_is_named(wrong):
    given = dict(parts=torch.zeros(2, 3, 8), weight=torch.zeros(8), residual_out=torch.zeros(3, 8))
    given[wrong] = torch.zeros(2, 3, 9) if wrong == "parts" else torch.zeros(4)
    with pytest.raises(ValueError, match=wrong):
        join_add_rmsnorm(
            Parts(given["parts"]),
            torch.zeros(3, 8),
            given["weight"],
            residual_out=given["residual_out"],
        )
