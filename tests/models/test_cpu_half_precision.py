"""A CPU without products of bfloat16 computes them in float32 and rounds once."""

import pytest
import torch

from cairn.models import cpu_bfloat16
from cairn.models.cpu_bfloat16 import attention, linear

BF16 = torch.bfloat16


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(cpu_bfloat16, "multiplies_bfloat16", lambda: False)


def numbers(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_rounded_once(without, biased):
    x, w, bias = numbers(5, 64), numbers(48, 64, seed=1), numbers(48, seed=2)
    exact = x.double() @ w.double().t() + (bias.double() if biased else 0)
    found = linear(x, w, bias if biased else None)
    assert found.dtype == BF16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("mask", ["causal", "added", "boolean"])
def test_attention_is_rounded_once(without, mask):
    q, k, v = (numbers(1, 4, 9, 32, seed=seed) for seed in range(3))
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    hidden = torch.zeros(9, 9).masked_fill(~visible, -torch.inf)
    how = {"is_causal": True}
    if mask != "causal":
        how = {"attn_mask": visible if mask == "boolean" else hidden.bfloat16()}
    scores = q.double() @ k.double().transpose(-1, -2) / 32**0.5 + hidden
    exact = scores.softmax(-1) @ v.double()
    found = attention(q, k, v, **how)
    assert found.dtype == BF16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_gradients_have_the_type_of_what_they_are_of(without):
    x, w = numbers(5, 64).requires_grad_(), numbers(48, 64, seed=1).requires_grad_()
    linear(x, w).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (BF16, BF16)
    torch.testing.assert_close(x.grad[0], w.detach().double().sum(0).bfloat16())


def test_other_types_are_torchs(without):
    x, w = numbers(5, 64, dtype=torch.float32), numbers(48, 64, dtype=torch.float32, seed=1)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
