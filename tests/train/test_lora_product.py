"""The fused product of a frozen map and its adapter against the same composed of torch's operations."""

import pytest
import torch

from cairn.models.adapter.lora import LoRA, LoRAPart
from cairn.models.build import ModelBuild
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.linear.nf4 import NF4Form
from cairn.train import lora_product
from cairn.train.fused_products import Normed, Settings
from cairn.train.lora_product import (
    adapted_product,
    gated_adapted_product,
    is_fused,
    norm_adapted_product,
    suits,
)
from cairn.train.products import PLAIN

BUILD = ModelBuild("cpu", torch.float64, fused=True)
HOW = Settings(PLAIN)


def qkv(build=BUILD):
    home = ColumnParallelLinear(build, 12, {"q": 10, "k": 6, "v": 6}, bias=False)
    parts = [
        LoRAPart("q", 10, 10, 3, 2.0),
        LoRAPart("k", 6, 6, 0, 0.0),
        LoRAPart("v", 6, 6, 2, 0.5),
    ]
    return home, LoRA(build, home, parts, dora=False)


def down(build=BUILD):
    home = RowParallelLinear(build, 12, 8, bias=False)
    return home, LoRA(build, home, [LoRAPart("", 8, 8, 4, 1.5)], dora=False)


@pytest.mark.parametrize("make", [qkv, down])
@pytest.mark.parametrize("frozen", ["yes", "no", "in 4 bits"])
def test_result_and_gradients(make, frozen):
    home, lora = make()
    for parameter in (*home.parameters(), *lora.parameters()):
        torch.nn.init.normal_(parameter)
    home.adapter, home.addend = lora, lora.forward
    weight_NK = home.matrix().requires_grad_(frozen == "no")
    if frozen == "in 4 bits":
        home.take(NF4Form(weight_NK))
        weight_NK = home.form.dense(torch.float64)
    x_MK = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    assert suits(lora, x_MK.dtype, HOW)
    found_MN = adapted_product(home, x_MK, HOW)
    exact_MN = torch.nn.functional.linear(x_MK, weight_NK) + lora.forward(x_MK)
    assert torch.allclose(found_MN, exact_MN)
    wanted = [x_MK, *lora.parameters(), *([weight_NK] if frozen == "no" else [])]
    slope_MN = torch.randn_like(exact_MN)
    found = torch.autograd.grad(found_MN, wanted, slope_MN)
    for a, b in zip(found, torch.autograd.grad(exact_MN, wanted, slope_MN), strict=True):
        assert torch.allclose(a, b)


def normed(home, x_MK, residual_MK, norm_K, how):
    by = Normed(norm_K, 1e-6, plus_one=False)
    return norm_adapted_product(home, x_MK, residual_MK, by, how)


def normed_exactly(x_MK, residual_MK, norm_K):
    total_MK = x_MK if residual_MK is None else x_MK + residual_MK
    return torch.nn.functional.rms_norm(total_MK, (12,), norm_K, 1e-6), total_MK


@pytest.fixture(params=["one product after the other", "side by side"])
def _form(request, monkeypatch):
    if request.param == "side by side":
        monkeypatch.setattr(lora_product, "MANY", 0)
        monkeypatch.setattr(lora_product, "ALIGNED", 1)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("make", [qkv, down])
def test_behind_a_norm(make, added, keep):
    home, lora = filled(make)
    x_MK, norm_K = torch.randn(7, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    residual_MK = torch.randn(7, 12, requires_grad=True) if added else None
    found = normed(home, x_MK, residual_MK, norm_K, HOW._replace(keep_norms=keep))
    normed_MK, total_MK = normed_exactly(x_MK, residual_MK, norm_K)
    exact = (
        torch.nn.functional.linear(normed_MK, home.matrix()) + lora.forward(normed_MK),
        total_MK,
    )
    wanted = [x_MK, norm_K, *lora.parameters(), *([residual_MK] if added else [])]
    compare(found if added else found[:1], exact if added else exact[:1], wanted)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("keep", [True, False])
def test_behind_an_activation(keep):
    home, lora = filled(down)
    inner_MI = torch.randn(7, 24, requires_grad=True)
    found = gated_adapted_product(home, inner_MI, "silu", HOW._replace(keep_activations=keep))
    x_MK = torch.nn.functional.silu(inner_MI[:, :12]) * inner_MI[:, 12:]
    exact = torch.nn.functional.linear(x_MK, home.matrix()) + lora.forward(x_MK)
    compare([found], [exact], [inner_MI, *lora.parameters()])


def filled(make):
    home, lora = make(ModelBuild("cpu", torch.float32, fused=True))
    for parameter in (*home.parameters(), *lora.parameters()):
        torch.nn.init.normal_(parameter)
    home.matrix().requires_grad_(False)
    home.adapter, home.addend = lora, lora.forward
    assert is_fused(home, torch.float32, HOW)
    return home, lora


def compare(found, exact, wanted):
    slopes = [torch.randn_like(one) for one in exact]
    torch.testing.assert_close(list(found), list(exact), rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(found, wanted, slopes)
    expected = torch.autograd.grad(exact, wanted, slopes)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_others_are_composed():
    home, lora = down()
    home.adapter, home.addend = lora, lora.forward
    for parameter in (*home.parameters(), *lora.parameters()):
        torch.nn.init.normal_(parameter)
    lora.enabled = False
    x_MK = torch.randn(3, 12, dtype=torch.float64)
    assert torch.allclose(adapted_product(home, x_MK, HOW), x_MK @ home.matrix().T)


def test_below_the_first_layer_nothing_is_computed():
    """Where neither x nor the norm learns, the adapter's gradients are the same."""
    home, lora = filled(qkv)
    x_MK, norm_K = torch.randn(7, 12), torch.randn(12)
    found = []
    for learns in (False, True):
        y_MN, _ = normed(home, x_MK.clone().requires_grad_(learns), None, norm_K, HOW)
        found.append(torch.autograd.grad(y_MN.square().sum(), list(lora.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
