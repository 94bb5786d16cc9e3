"""The fused product of a frozen map and its adapter against the same composed of torch's operations."""

import pytest
import torch

from cairn.models.adapter.lora import LoRA, Part
from cairn.models.build import Build
from cairn.models.linear.maps import Columns, Rows
from cairn.models.linear.nf4 import NF4Form
from cairn.train.fused_products import Settings
from cairn.train.lora_product import adapted_product, suits
from cairn.train.products import PLAIN

BUILD = Build("cpu", torch.float64, fused=True)
HOW = Settings(PLAIN)


def qkv():
    home = Columns(BUILD, 12, {"q": 10, "k": 6, "v": 6}, bias=False)
    parts = [Part("q", 10, 10, 3, 2.0), Part("k", 6, 6, 0, 0.0), Part("v", 6, 6, 2, 0.5)]
    return home, LoRA(BUILD, home, parts, dora=False)


def down():
    home = Rows(BUILD, 12, 8, bias=False)
    return home, LoRA(BUILD, home, [Part("", 8, 8, 4, 1.5)], dora=False)


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


def test_others_are_composed():
    home, lora = down()
    home.adapter, home.addend = lora, lora.forward
    for parameter in (*home.parameters(), *lora.parameters()):
        torch.nn.init.normal_(parameter)
    lora.enabled = False
    x_MK = torch.randn(3, 12, dtype=torch.float64)
    assert torch.allclose(adapted_product(home, x_MK, HOW), x_MK @ home.matrix().T)
