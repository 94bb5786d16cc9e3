"""The layer of experts is what its few lines of definition say, for every kind of gate."""

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.experts.combine import combine
from cairn.kernels.experts.combine_norm import Choices
from cairn.kernels.experts.sort_pairs import Pairs, sort_pairs
from cairn.kernels.norm.join_norm import Parts
from cairn.kernels.quantize.quantize import quantize
from cairn.models import fused_experts
from cairn.models.activation import ACTIVATIONS
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.experts import ExpertLayer
from cairn.models.fused import FusedResidual
from cairn.models.fused_experts import experts_product
from cairn.models.grouped_product import masked_product, split_product
from cairn.models.linear.form import Kernels
from cairn.models.presets import preset
from cairn.models.spec import Experts, ModelSpec
from cairn.models.transformer import Layer, Transformer
from cairn.models.weights import random_model


def a_model(experts: Experts, gated: bool = True) -> Transformer:
    spec = ModelSpec(
        family="any", vocab=30, hidden=12, layers=2, heads=2, kv_heads=1, head_dim=4,
        intermediate=10, context=32, gated=gated, experts=experts,
    )  # fmt: skip
    model = random_model(spec, ModelBuild("cpu", torch.float32))
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for the gates to differ
            parameter.mul_(25)
    return model


def by_definition(layer, spec: ModelSpec, x_TD: torch.Tensor) -> torch.Tensor:
    """One token after another, in float64."""
    experts, act = spec.experts, ACTIVATIONS[spec.activation]
    out = []
    for x_D in x_TD.double():
        scores_E = layer.router.weight.double() @ x_D
        scores_E = scores_E.softmax(0) if experts.gate == "softmax" else scores_E.sigmoid()
        chosen = sorted(range(experts.count), key=lambda e: -scores_E[e])[: experts.per_token]
        total = sum(scores_E[e] for e in chosen) if experts.renormalize else 1.0
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            inner_F = layer.inner_EFD[e].double() @ x_D
            if spec.gated:
                gate_F, up_F = inner_F.chunk(2)
                inner_F = act(gate_F) * up_F
            else:
                inner_F = act(inner_F)
            y_D = y_D + experts.scale * scores_E[e] / total * (layer.down_EDF[e].double() @ inner_F)
        out.append(y_D)
    y_TD = torch.stack(out)
    return y_TD if layer.shared is None else y_TD + layer.shared(x_TD).double()


@given(
    count=st.integers(1, 6),
    data=st.data(),
    gate=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    shared=st.sampled_from([0, 7]),
    gated=st.booleans(),
)
@torch.no_grad()
def test_the_layer_of_experts_is_the_definition(
    count, data, gate, renormalize, scale, shared, gated
):
    per_token = data.draw(st.integers(1, count))
    experts = Experts(
        count=count,
        per_token=per_token,
        intermediate=5,
        gate=gate,
        renormalize=renormalize,
        scale=scale,
        shared_intermediate=shared,
    )
    model = a_model(experts, gated)
    layer = model.layers[1].feed_forward
    x_TD = torch.randn(9, 12, generator=torch.Generator().manual_seed(count))
    expected = by_definition(layer, model.spec, x_TD)
    torch.testing.assert_close(layer(x_TD).double(), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_token_is_served_alike_in_any_company():
    """No capacity, no dropping: what a token gets does not depend on the others."""
    model = a_model(Experts(count=5, per_token=2, intermediate=6))
    tokens_T = torch.arange(20) % 30
    together = PackedDocuments([1] * 20)
    hidden_TD = model(tokens_T, together.positions_T(), together)
    for token in (0, 7, 19):
        alone = PackedDocuments([1])
        hidden_1D = model(tokens_T[token : token + 1], alone.positions_T(), alone)
        torch.testing.assert_close(hidden_TD[token], hidden_1D[0], atol=1e-3, rtol=1e-3)


def test_experts_that_nobody_chose_have_no_gradient_but_the_router_learns():
    model = a_model(Experts(count=6, per_token=1, intermediate=4))
    layer = model.layers[0].feed_forward
    x_TD = torch.ones(3, 12, requires_grad=True)
    _, chosen_TN = layer.router(x_TD)
    layer(x_TD).sum().backward()
    touched = layer.inner_EFD.grad.flatten(1).abs().sum(1) > 0
    assert set(touched.nonzero().flatten().tolist()) == set(chosen_TN.flatten().tolist())
    assert x_TD.grad.abs().sum() > 0


@pytest.mark.parametrize("dense", [(), (0,), (1,), (0, 1)])
def test_layers_named_dense_keep_their_feed_forward(dense):
    model = a_model(Experts(count=3, per_token=1, intermediate=4, dense_layers=dense))
    kinds = [type(layer.feed_forward).__name__ for layer in model.layers]
    assert kinds == ["FeedForward" if i in dense else "ExpertLayer" for i in range(2)]


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_every_grouped_form_is_one_product_per_expert(sizes, seed):
    """Also with experts that nobody chose; the masked form reads nothing on the host, for a CUDA graph."""
    draw = torch.Generator().manual_seed(seed)
    x_MK = torch.randn(sum(sizes), 3, generator=draw)
    weights_ENK = torch.randn(len(sizes), 2, 3, generator=draw)
    ends_E = torch.tensor(sizes).cumsum(0).int()
    experts = [e for e, size in enumerate(sizes) for _ in range(size)]
    rows = [weights_ENK[e] @ x_K for e, x_K in zip(experts, x_MK, strict=True)]
    expected = torch.stack(rows) if rows else torch.empty(0, 2)
    for form in (split_product, masked_product):
        torch.testing.assert_close(form(x_MK, weights_ENK, ends_E), expected)


@torch.no_grad()
def test_a_bias_steers_the_choice_and_not_the_weights():
    experts = Experts(count=6, per_token=2, intermediate=4, renormalize=False, choice_bias=True)
    router = a_model(experts).layers[0].feed_forward.router
    x_TD = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    router.bias_E[4] = 100.0
    weights_TN, chosen_TN = router(x_TD)
    assert (chosen_TN == 4).any(-1).all()
    assert torch.equal(weights_TN, router.scores(x_TD).gather(1, chosen_TN))
    assert "layers.0.feed_forward.router.bias" in {s.name for s in a_model(experts).slots()}


def unwritten(chosen_TK: torch.Tensor, count: int) -> Pairs:
    """As the kernel sorts: what lies behind the last expert's pairs is whatever was there."""
    pairs = sort_pairs(chosen_TK, count)
    order_P = pairs.order_P.clone()
    order_P[pairs.ends_E[-1] :] = 2**30
    return pairs._replace(order_P=order_P)


def test_biases_and_a_clamped_gate_are_the_same_through_the_kernels(monkeypatch):
    spec = preset("tiny-gpt-oss")
    model = random_model(spec, ModelBuild("cpu", torch.float32, fused=True)).requires_grad_(False)
    layer = cast(ExpertLayer, cast(Layer, model.layers[0]).feed_forward)
    for name, parameter in layer.named_parameters():
        parameter.normal_(0, 1 if "bias" in name or "router" in name else 0.3)
    x_TD = torch.randn(9, spec.hidden)
    parts = cast(Parts, experts_product(layer, x_TD, x_TD, Kernels()))
    for found_TD in (parts.sums_SMD.sum(0), experts_product(layer, x_TD, None, Kernels())):
        torch.testing.assert_close(found_TD, layer(x_TD), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(fused_experts, "sort_pairs", unwritten)
    slots_T = torch.tensor([3, 4, 5, 6, 7, 8, -1, -1, -1], dtype=torch.int32)
    padded_TD = experts_product(layer, x_TD, None, Kernels(), slots_T)
    torch.testing.assert_close(padded_TD[:6], layer(x_TD)[:6], rtol=1e-4, atol=1e-4)
    alone_TD = torch.cat([layer(x_1D) for x_1D in x_TD.split(1)])
    torch.testing.assert_close(alone_TD, layer(x_TD), rtol=1e-4, atol=1e-4)


def test_many_tokens_are_summed_by_the_norm_that_follows(monkeypatch):
    model = random_model(preset("tiny-moe"), ModelBuild("cpu", torch.float32, fused=True))
    first = cast(Layer, model.requires_grad_(False).layers[0])
    layer, norm = cast(ExpertLayer, first.feed_forward), first.feed_forward_norm
    x_TD = torch.randn(7, layer.hidden)
    monkeypatch.setattr(fused_experts, "MOST_PARTS", 0)
    choices = experts_product(layer, x_TD, x_TD, Kernels())
    assert isinstance(choices, Choices)
    monkeypatch.undo()
    assert isinstance(experts_product(layer, x_TD, x_TD, Kernels()), Parts)
    chosen = fused_experts._routed(layer, x_TD, Kernels(), None)
    monkeypatch.setattr(fused_experts, "_routed", lambda *given: chosen)  # the product is a GPU's
    invariant = experts_product(layer, x_TD, x_TD, Kernels(invariant=True))
    assert torch.equal(cast(torch.Tensor, invariant), combine(*choices))
    y_TD = combine(*choices)
    torch.testing.assert_close(y_TD, layer(x_TD), rtol=1e-4, atol=1e-4)

    def waiting(pending):
        return FusedResidual(x_TD.clone(), pending)

    assert torch.equal(waiting(choices).hidden(), waiting(y_TD).hidden())
    found, wanted = waiting(choices).normed(norm), waiting(y_TD.clone()).normed(norm)
    assert torch.equal(found.tensor, wanted.tensor)
    assert torch.equal(found.x_TD, wanted.x_TD)
    both = waiting(y_TD.clone()).normed(norm)
    rows, exact = both.beside, quantize(both.tensor)
    assert rows is not None
    assert torch.equal(rows.values.float(), exact.values.float())
    quantized = waiting(choices).normed(norm).quantized
    assert torch.equal(quantized.values.float(), exact.values.float())
    assert torch.equal(quantized.scale, exact.scale)
