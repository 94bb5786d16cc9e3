"""Products of few rows in the interpreter: both kernels, slabs, both ways to join them, epilogues."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.epilogue import Epilogue, matmul_reference
from cairn.kernels.skinny_matmul import _key, skinny_matmul
from cairn.kernels.skinny_plans import Plan, candidates, rows_plan, tiles_plan
from cairn.kernels.tuned import trying

ROWS = Plan("rows", 4, 256, 1, 1, 1)
TILES = Plan("tiles", 16, 32, 1, 1, 2)


def operands(m, n, k, dtype=torch.bfloat16):
    return torch.randn(m, k).to(dtype), (torch.randn(n, k) * k**-0.5).to(dtype)


def truth(x, w, **parts):
    wide = {name: part.double() if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()}  # fmt: skip
    return matmul_reference(x.double(), w, Epilogue(**wide), torch.float64)


def by_plan(plan, x, w, **parts):
    key = _key(x.shape[0], *w.shape, x.dtype)
    with trying("skinny_matmul", key, plan._asdict()):
        return skinny_matmul(x, w, **parts, impl="triton")


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("plan", [ROWS, TILES, TILES._replace(split=3)])
def test_few_rows(m, plan):
    x, w = operands(m, 37, 264)
    y = torch.empty(m, 37, dtype=torch.bfloat16)
    poison(y)
    by_plan(plan, x, w, out=y)
    assert relative_error(y, truth(x, w)) < 1e-2


@pytest.mark.parametrize("m", [9, 32, 64])
@pytest.mark.parametrize("split", [1, 4])
def test_more_rows(m, split):
    x, w = operands(m, 72, 200, torch.float16)
    y = by_plan(TILES._replace(block_n=32, split=split), x, w)
    assert relative_error(y, truth(x, w)) < 1e-3


def test_the_last_program_joins_and_leaves_the_counters_as_they_were():
    x, w = operands(17, 50, 256)
    counters = torch.zeros(7, dtype=torch.int32)
    plan = TILES._replace(split=4)
    for _ in range(2):
        y = torch.empty(17, 50, dtype=torch.bfloat16)
        poison(y)
        by_plan(plan, x, w, out=y, counters=counters)
        assert relative_error(y, truth(x, w)) < 1e-2
        assert not counters.any()
    assert torch.equal(y, by_plan(plan, x, w))  # the second kernel adds in the same order


@pytest.mark.parametrize("plan", [ROWS, TILES, TILES._replace(split=2)])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("lend", [False, True])
def test_epilogues(plan, swiglu, lend):
    m, n, k = 5, 88, 128
    x, w = operands(m, n, k)
    wide = torch.randn(m, 2 * n).bfloat16()
    parts = dict(
        bias_N=torch.randn(n).bfloat16(),
        activation="swiglu" if swiglu else None,
        residual_MN=wide[:, : n // 2 if swiglu else n],  # rows at another distance
    )
    counters = torch.zeros(11, dtype=torch.int32) if lend else None
    y = by_plan(plan, x, w, **parts, counters=counters)
    assert relative_error(y, truth(x, w, **parts)) < 1e-2


def test_defaults_choose_a_plan_that_computes():
    for m in (1, 2, 5, 16):
        x, w = operands(m, 40, 512)
        assert relative_error(skinny_matmul(x, w, impl="triton"), truth(x, w)) < 1e-2


def test_no_rows_and_leading_dimensions():
    x, w = operands(6, 24, 64)
    assert skinny_matmul(x[:0], w, impl="triton").shape == (0, 24)
    y = skinny_matmul(x.unflatten(0, (2, 3)), w, impl="triton")
    assert relative_error(y.flatten(0, 1), truth(x, w)) < 1e-2


def test_every_candidate_covers_all_of_k():
    for m in (1, 8, 64):
        for plan in candidates(m, 4096, 3072):
            assert plan.slab(3072) % plan.block_k == 0
            assert (
                plan.slab(3072) * (plan.parts(3072) - 1)
                < 3072
                <= plan.slab(3072) * plan.parts(3072)
            )
            assert plan.prefetched(3072) % 8 == 0
    assert rows_plan() in candidates(1, 4096, 1024)
    assert tiles_plan(16, 8).warps == 1
