"""The experts' own backward gives the gradients that torch's autograd finds."""

import pytest
import torch

from cairn.models.build import Build
from cairn.models.experts import ExpertLayer
from cairn.models.spec import Experts, ModelSpec
from cairn.train.expert_products import has_own_backward, trained_experts

SIZES = dict(
    family="qwen3_moe", vocab=16, hidden=24, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32, context=64
)  # fmt: skip


def layer_of(shared: int) -> ExpertLayer:
    torch.manual_seed(0)
    experts = Experts(count=6, per_token=2, intermediate=20, shared_intermediate=shared)
    spec = ModelSpec(**SIZES, experts=experts)
    layer = ExpertLayer(Build("cpu", torch.float32), spec, experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
        layer.router.weight[1] = -layer.router.weight[0]  # one of the two is often left alone
    return layer


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("tokens", [1, 37])
def test_gradients_are_those_of_autograd(tokens, shared):
    layer = layer_of(shared)
    found = []
    dy = torch.randn(tokens, 24)
    for form in (layer, lambda x: trained_experts(layer, x)):
        layer.zero_grad()
        x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(5)).requires_grad_()
        y = form(x)
        y.backward(dy)
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for ours, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_frozen_experts_get_no_gradient_and_what_is_not_expressed_is_left_to_torch():
    layer = layer_of(0)
    layer.inner_EFD.requires_grad_(False)
    x = torch.randn(5, 24, requires_grad=True)
    trained_experts(layer, x).sum().backward()
    assert layer.inner_EFD.grad is None
    assert layer.down_EDF.grad is not None
    assert not has_own_backward(layer, x)  # float32 on a CPU
