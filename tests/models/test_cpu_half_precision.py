"""A CPU without products of 16-bit floats computes them in float32 and rounds once."""

import pytest
import torch

from cairn.hw import cpu_types
from cairn.models.cpu_half_precision import attention, einsum, linear, matmul

BF16, F16 = torch.bfloat16, torch.float16
STEP = {BF16: 2**-8, F16: 2**-11}  # the largest relative error of one rounding
both = pytest.mark.parametrize("dtype", [BF16, F16])


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(cpu_types, "cpu_features", frozenset)


def numbers(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(found, exact, dtype):
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= exact.abs() * STEP[dtype] + 1e-5).all()


@both
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_rounded_once(without, biased, dtype):
    x, w, bias = (
        numbers(*size, dtype=dtype, seed=len(size)) for size in ((5, 64), (48, 64), (48,))
    )
    exact = x.double() @ w.double().t() + (bias.double() if biased else 0)
    assert_rounded_once(linear(x, w, bias if biased else None), exact, dtype)


@both
def test_products_in_batches_are_rounded_once(without, dtype):
    a, b = numbers(3, 5, 64, dtype=dtype), numbers(3, 64, 7, dtype=dtype, seed=1)
    exact = a.double() @ b.double()
    assert_rounded_once(matmul(a, b), exact, dtype)
    assert_rounded_once(einsum("bmk,bkn->bmn", a, b), exact, dtype)


@both
@pytest.mark.parametrize("mask", ["causal", "added", "boolean"])
def test_attention_is_rounded_once(without, mask, dtype):
    q, k, v = (numbers(1, 4, 9, 32, dtype=dtype, seed=seed) for seed in range(3))
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    hidden = torch.zeros(9, 9).masked_fill(~visible, -torch.inf)
    how = {"is_causal": True}
    if mask != "causal":
        how = {"attn_mask": visible if mask == "boolean" else hidden.to(dtype)}
    scores = q.double() @ k.double().transpose(-1, -2) / 32**0.5 + hidden
    assert_rounded_once(attention(q, k, v, **how), scores.softmax(-1) @ v.double(), dtype)


@both
def test_gradients_have_the_type_of_what_they_are_of(without, dtype):
    x, w = (numbers(n, 64, dtype=dtype, seed=n).requires_grad_() for n in (5, 48))
    linear(x, w).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(x.grad[0], w.detach().double().sum(0).to(dtype))


def test_other_types_are_torchs(without):
    x, w = numbers(5, 64, dtype=torch.float32), numbers(48, 64, dtype=torch.float32, seed=1)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
