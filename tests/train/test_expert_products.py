"""The experts' own backward gives the gradients that torch's autograd finds."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.models.build import ModelBuild
from cairn.models.experts import ExpertLayer
from cairn.models.spec import Experts, ModelSpec
from cairn.train.expert_products import has_own_backward, trained_experts

SIZES = dict(
    family="qwen3_moe",
    vocab=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate=32,
    context=64,
)


def layer_of(shared: int, hidden: int = 24, empty: int | None = None) -> ExpertLayer:
    """`empty`: an expert that no token chooses."""
    torch.manual_seed(0)
    experts = Experts(
        count=6,
        per_token=2,
        intermediate=hidden // 2,
        shared_intermediate=shared,
        choice_bias=empty is not None,
    )
    spec = ModelSpec(**SIZES, hidden=hidden, experts=experts)
    layer = ExpertLayer(ModelBuild("cpu", torch.float32), spec, experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 2.5 / hidden**0.5)
        layer.router.weight[1] = -layer.router.weight[0]  # one of the two is often left alone
        if layer.router.bias_E is not None:
            layer.router.bias_E.zero_()[empty] = -10
    return layer


def gradients(
    layer: ExpertLayer, form: Callable[[Tensor], Tensor], x_TD: Tensor, dy_TD: Tensor
) -> dict[str, Tensor]:
    """Of the input and of all weights, and the result."""
    layer.zero_grad()
    x_TD = x_TD.clone().requires_grad_()
    y_TD = form(x_TD)
    y_TD.backward(dy_TD)
    trained = {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}
    return {"y": y_TD.detach(), "x": x_TD.grad, **trained}


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("tokens", [1, 37])
def test_gradients_are_those_of_autograd(tokens, shared):
    layer = layer_of(shared, empty=3 if shared else None)
    x_TD, dy_TD = torch.randn(2, tokens, 24)
    found = gradients(layer, lambda x: trained_experts(layer, x), x_TD, dy_TD)
    for name, plain in gradients(layer, layer, x_TD, dy_TD).items():
        torch.testing.assert_close(found[name], plain, rtol=1e-4, atol=1e-5)


def test_frozen_experts_get_no_gradient_and_what_is_not_expressed_is_left_to_torch():
    layer = layer_of(0)
    layer.inner_EFD.requires_grad_(False)
    x = torch.randn(5, 24, requires_grad=True)
    trained_experts(layer, x).sum().backward()
    assert layer.inner_EFD.grad is None
    assert layer.down_EDF.grad is not None
    assert not has_own_backward(layer, x)  # float32 on a CPU


def test_a_gpu_without_grouped_products_runs_by_torch(monkeypatch):
    layer = layer_of(0)
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=None)
    for capability, own in (((8, 0), False), ((8, 9), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, now=capability: now)
        assert has_own_backward(layer, x) is own


@pytest.mark.gpu
def test_gradients_on_a_gpu_where_nobody_visits_an_expert():
    layer = layer_of(0, hidden=128, empty=3).to("cuda", torch.bfloat16)
    x_TD, dy_TD = torch.randn(2, 300, 128, device="cuda").bfloat16()
    found = gradients(layer, lambda x: trained_experts(layer, x), x_TD, dy_TD)
    assert has_own_backward(layer, x_TD)
    assert not found["inner_EFD"][3].any()
    assert not found["down_EDF"][3].any()
    for name, plain in gradients(layer, layer, x_TD, dy_TD).items():
        assert relative_error(found[name], plain) < 5e-2, name
