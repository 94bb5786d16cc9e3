"""16 and 8 bits: loss scaling as a policy, fp8 products against exact ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import losses, recipe, state_of, steps

from cairn.kernels.accuracy import relative_error
from cairn.kernels.quantize.quantize import quantize
from cairn.kernels.quantize.quantize_tensor import quantize_tensor
from cairn.train import precision
from cairn.train.config import Precision
from cairn.train.precision import LossScale
from cairn.train.products import PLAIN, make_products, product


@given(st.lists(st.booleans(), max_size=60))
def test_the_factor_halves_on_overflow_and_doubles_after_a_streak(overflows):
    scale, streak, expected = LossScale(True, "cpu"), 0, precision.FIRST_SCALE
    interval = 7
    before, precision.GROWTH_INTERVAL = precision.GROWTH_INTERVAL, interval
    try:
        for overflowed in overflows:
            scale.update(torch.tensor(overflowed))
            streak = 0 if overflowed else streak + 1
            if overflowed:
                expected = max(1.0, expected / 2)
            elif streak == interval:
                expected, streak = min(precision.MOST, expected * 2), 0
            assert scale.scale.item() == expected
    finally:
        precision.GROWTH_INTERVAL = before


def test_without_float16_there_is_no_factor():
    scale = LossScale(False, "cpu")
    scale.update(torch.tensor(True))
    assert scale.enlarge(torch.tensor(3.0)).item() == 3.0
    assert scale.scale.item() == 1.0


def test_float16_with_scaling_learns_like_float32():
    runs = [
        losses(steps(state_of(recipe(precision=Precision(kind=kind))), 6))
        for kind in ("float32", "float16")
    ]
    assert runs[1] == pytest.approx(runs[0], abs=5e-3)


def test_an_overflow_is_skipped_and_the_factor_shrinks():
    prepared = state_of(recipe(precision=Precision(kind="float16")))
    state = prepared.state
    state.scale.scale.fill_(2.0**24)  # gradients of this size do not fit into float16
    before = {n: p.detach().clone() for n, p in state.parallel.parameters().items()}
    result = steps(prepared, 1)[0]
    assert result.loss.isfinite()
    assert not result.norm.isfinite()
    assert state.scale.scale.item() == 2.0**23
    assert all(torch.equal(p, before[n]) for n, p in state.parallel.parameters().items())


def both_ways(products, x, w, g):
    y, kept = products.forward(x, w)
    dx, of_weight = products.backward(g, w, kept)
    return y, dx, of_weight(x)


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_fp8_products_are_near_the_exact_ones(kind):
    x, w, g = torch.randn(64, 48), torch.randn(32, 48), torch.randn(64, 32)
    ours = make_products(kind)
    found, exact = both_ways(ours, x, w, g), both_ways(PLAIN, x, w, g)
    for one, other in zip(found, exact, strict=True):
        error = (one - other).norm() / other.norm()
        # e4m3 has 3 bits behind the point, e5m2 2: about 4 and 8 percent of an element, less of a sum.
        assert error < 0.08
        assert one.shape == other.shape
    assert (found[0] - exact[0]).norm() > 0


def test_scales_by_row_survive_an_outlier():
    x, w = torch.randn(64, 48), torch.randn(32, 48)
    x[0] *= 1e6  # one token is enormous: with one scale the others would all become zero
    exact = PLAIN.forward(x, w)[0][1:]
    errors = [
        (make_products(kind).forward(x, w)[0][1:] - exact).norm() / exact.norm()
        for kind in ("tensor", "row")
    ]
    assert errors[1] < 0.05 < errors[0]


def test_odd_sizes_stay_exact():
    x, w = torch.randn(7, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    assert torch.equal(make_products("tensor").forward(x, w)[0], x @ w.t())
    assert torch.autograd.gradcheck(
        lambda a, b: product(a, b, PLAIN),
        (x.double().detach().requires_grad_(), w.double().detach().requires_grad_()),
    )


@pytest.mark.parametrize(
    ("kind", "of_y", "of_dx", "of_dw"),
    [
        ("tensor", 0.05, 0.08, 0.08),  # gradients in e5m2, which has 2 bits
        ("row", 0.05, 0.05, 1e-5),  # the product for the weight stays wide
    ],
)
def test_products_in_fp8_are_as_exact_as_the_format(kind, of_y, of_dx, of_dw):
    """Against float64; and nothing is systematically too long or too short, which a run would add up."""
    torch.manual_seed(0)
    x, w, g = torch.randn(128, 96), torch.randn(64, 96), 1e-6 * torch.randn(128, 64)
    products = make_products(kind)
    y, kept = products.forward(x, w)
    dx, of_weight = products.backward(g, w, kept)
    wide_x, wide_w, wide_g = x.double(), w.double(), g.double()
    truths = (wide_x @ wide_w.T, wide_g @ wide_w, wide_g.T @ wide_x)
    found = (y, dx, of_weight(x))
    for one, truth, limit in zip(found, truths, (of_y, of_dx, of_dw), strict=True):
        assert relative_error(one, truth) < limit
        gain = (one.double() * truth).sum() / truth.square().sum()
        assert gain == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_multiplies_fp8_at_the_rate_of_float32(monkeypatch, kind, dtype):
    """torch's own product of float8 on a CPU is the same, and thousands of times slower."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 48).to(dtype), torch.randn(32, 48).to(dtype)
    a, b = ((quantize_tensor if kind == "tensor" else quantize)(one) for one in (x, w))
    scales = (
        (a.scale.reshape(-1, 1), b.scale.reshape(1, -1)) if kind == "row" else (a.scale, b.scale)
    )
    oracle = torch._scaled_mm(a.values, b.values.t(), *scales, out_dtype=torch.float32)
    monkeypatch.setattr(torch, "_scaled_mm", None)
    y, kept = make_products(kind).forward(x, w)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y, oracle.to(dtype), rtol=2e-6 if dtype == torch.float32 else 0.01, atol=1e-5
    )
    dx, of_weight = make_products(kind).backward(torch.randn(64, 32).to(dtype), w, kept)
    assert dx.shape == x.shape
    assert of_weight(x).shape == w.shape


def test_fp8_by_row_keeps_rows_of_any_size():
    torch.manual_seed(0)
    x = torch.randn(64, 96) * torch.logspace(-6, 3, 64)[:, None]
    w = torch.randn(32, 96)
    y, _ = make_products("row").forward(x, w)
    truth = x.double() @ w.double().T
    assert ((y.double() - truth).norm(dim=1) / truth.norm(dim=1)).max() < 0.06
