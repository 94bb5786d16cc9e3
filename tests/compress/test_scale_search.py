"""Scales that are searched: never worse than those that cover the largest weight, and what GPTQ gains by them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.compress.gptq import DAMPING, damping_for, gptq, importance, inverse_factor
from cairn.compress.scale_search import FACTORS, best_steps
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.rounding import SCHEMES, QuantizationGrid, steps_of, with_levels

GRIDS = {**SCHEMES, "w4a16 with zero points": replace(SCHEMES["w4a16"], symmetric=False)}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def group_errors(
    planes: Planes, w_NK: Tensor, importance_K: Tensor, grid: QuantizationGrid
) -> Tensor:
    """The weighted error of every scale."""
    error_NK = (dequantized(planes) - w_NK).double().square() * importance_K.double()
    wide_NG = error_NK.unflatten(1, (-1, grid.group or w_NK.shape[1])).sum(2)
    return torch.stack([rows_BG.sum(0) for rows_BG in wide_NG.split(grid.block_rows)])


@given(
    seed=st.integers(0, 2**20),
    name=st.sampled_from(sorted(GRIDS)),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.floats(0, 3),
)
@settings(max_examples=12, deadline=None)
def test_no_scale_is_worse_than_that_of_the_largest_weight(seed, name, stored, spread):
    grid, chance = GRIDS[name], seeded(seed)
    w_NK = torch.randn(130, 128, generator=chance)
    w_NK *= (spread * torch.randn(130, 1, generator=chance)).exp() / 30  # rows of different size
    importance_K = (spread * torch.randn(128, generator=chance)).exp()
    found = best_steps(w_NK, importance_K, grid, stored)
    largest = steps_of(w_NK, grid, stored)
    made, plain = (
        group_errors(with_levels(w_NK, steps, grid), w_NK, importance_K, grid)
        for steps in (found, largest)
    )
    assert bool((made <= plain * (1 + 1e-5)).all())
    assert found.global_scale == largest.global_scale
    assert found.scales.shape == largest.scales.shape
    if grid.kind in ("int4", "int8", "fp8"):  # as the file has them
        assert torch.equal(found.scales, found.scales.to(stored).float())
    if name == "w4a16 with zero points":
        assert found.shifts is not None
        zeros = -found.shifts / found.scales
        torch.testing.assert_close(zeros, zeros.round(), atol=1e-4, rtol=0)
        assert float(zeros.min()) >= 0
        assert float(zeros.max()) <= 15


def test_the_scale_of_a_row_is_the_best_of_all_candidates():
    """By a search that tries each candidate on one row at a time."""
    grid, w_NK = SCHEMES["fp8"], torch.randn(12, 96, generator=seeded(1))
    importance_K = torch.logspace(2, -2, 96)
    found = best_steps(w_NK, importance_K, grid, torch.float32).scales[:, 0]
    for row_K, scale in zip(w_NK, found, strict=True):
        candidates = torch.tensor([1.0, *FACTORS["fp8"]]) * row_K.abs().max() / 448
        levels_CK = (row_K / candidates[:, None]).to(torch.float8_e4m3fn).float()
        lost_C = ((levels_CK * candidates[:, None] - row_K).square() * importance_K).sum(1)
        assert float(scale) == pytest.approx(float(candidates[lost_C.argmin()]), rel=1e-6)


def correlated(rows: int, columns: int) -> Tensor:
    mix = torch.randn(columns, columns, generator=seeded(1)) * torch.logspace(0, -2, columns)
    x = torch.randn(rows, columns, generator=seeded(2)) @ mix.t()
    x[:, :3] *= 10
    return x


def test_importance_is_what_an_error_costs_after_the_columns_behind_it_have_made_up_for_it():
    """The least of d H d^T over all d with d_i = 1 and d_j = 0 for the columns j before i."""
    x_MK = correlated(200, 16)
    hessian_KK = x_MK.t() @ x_MK / 100
    found_K = importance(inverse_factor(hessian_KK, "a matrix")).double()
    damped = hessian_KK.double()
    damped.diagonal().add_(DAMPING[0] * float(hessian_KK.diagonal().mean()))
    for i in range(16):
        behind = damped[i + 1 :, i + 1 :]
        cross = damped[i, i + 1 :]
        least = damped[i, i] - cross @ torch.linalg.solve(behind, cross)
        assert float(found_K[i]) == pytest.approx(float(least), rel=1e-3)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_gptq_loses_less_at_searched_scales(scheme: str, ordered: bool, monkeypatch):
    grid, w_NK = SCHEMES[scheme], torch.randn(48, 256, generator=seeded(5))
    x_MK = correlated(600, 256)
    hessian_KK = x_MK.t() @ x_MK

    def lost() -> float:
        made = gptq(w_NK, hessian_KK, grid, torch.bfloat16, ordered=ordered)
        return float((x_MK @ (dequantized(made) - w_NK).t()).norm())

    searched = lost()
    for kind in FACTORS:
        monkeypatch.setitem(FACTORS, kind, ())  # leaves the scale of the largest weight
    assert searched < 0.97 * lost()


@given(rows=st.integers(0, 2**21), columns=st.integers(1, 2**15))
def test_damping_falls_with_the_text_and_stays_between_its_bounds(rows: int, columns: int):
    damping = damping_for(rows, columns)
    assert DAMPING[0] <= damping <= DAMPING[1]
    assert damping_for(2 * rows, columns) <= damping <= damping_for(rows, 2 * columns)
