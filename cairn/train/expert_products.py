"""The experts of a training step as one operation with its own backward.

    forward     sort pairs | gather rows | gate, up | SwiGLU | down | weighed sum
    backward    gather dy | dy down | gate and router's weights | three grouped products | sum over a token's pairs

torch's autograd would scatter gradients into rows that several pairs share, with atomics or a sort; here a token's
pairs are known by their places, so both sums read instead. Kept for backward: the input, the order of the pairs, and
gate and up. Gathered rows and the hidden layer are made again. Products are torch's grouped ones.
"""

from typing import Any

import torch
from torch import Tensor

from cairn.kernels.experts.combine import combine
from cairn.kernels.experts.gate_backward import gate_backward
from cairn.kernels.experts.sort_pairs import Pairs, sort_pairs
from cairn.kernels.layer.activation import gated_activation
from cairn.models.experts import ExpertLayer
from cairn.models.grouped_product import grouped_gradient, grouped_product, has_grouped_mm
from cairn.train.parallel.expert import SpreadExperts


def has_own_backward(layer: ExpertLayer, x_TD: Tensor) -> bool:
    """Return whether `trained_experts` supports this layer and is fast on this GPU; otherwise torch is used."""
    here = not isinstance(layer, SpreadExperts) or layer.ranks == 1
    plain = layer.forms is None and layer.inner_bias_EF is None and layer.gate.is_swiglu
    return here and plain and has_grouped_mm(x_TD)


def trained_experts(layer: ExpertLayer, x_TD: Tensor) -> Tensor:
    entered_TD = layer.shards.enter(x_TD)
    weights_TN, chosen_TN = layer.router(entered_TD)
    y_TD = _Visited.apply(
        entered_TD, weights_TN.float(), chosen_TN.int(), layer.inner_EFD, layer.down_EDF
    )
    y_TD = layer.shards.reduce(y_TD)
    return y_TD if layer.shared is None else y_TD + layer.shared(x_TD)


class _Visited(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TN: Tensor,
        chosen_TN: Tensor,
        inner_EID: Tensor,
        down_EDF: Tensor,
    ) -> Tensor:
        weights_TN = weights_TN.contiguous()
        pairs = sort_pairs(chosen_TN.contiguous(), len(inner_EID))
        inner_PI = grouped_product(_gathered(x_TD, pairs), inner_EID, pairs.ends_E)
        results_PD = grouped_product(gated_activation(inner_PI), down_EDF, pairs.ends_E)
        ctx.save_for_backward(x_TD, weights_TN, inner_EID, down_EDF, inner_PI, *pairs[:3])
        return combine(results_PD, pairs.places_P, weights_TN)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_TD, weights_TN, inner_EID, down_EDF, inner_PI, order_P, places_P, ends_E = (
            ctx.saved_tensors
        )
        pairs = Pairs(order_P, places_P, ends_E, weights_TN.shape[1])
        dy_PD = _gathered(gradients[0].contiguous(), pairs)
        grad_PF = grouped_product(dy_PD, down_EDF.transpose(1, 2), ends_E)
        d_inner_PI, weighed_PF, d_weights_TN = gate_backward(
            grad_PF, inner_PI, pairs.order_P, weights_TN
        )
        d_inner_EID = d_down_EDF = None
        if ctx.needs_input_grad[4]:
            d_down_EDF = grouped_gradient(dy_PD, weighed_PF, ends_E)
        if ctx.needs_input_grad[3]:
            d_inner_EID = grouped_gradient(d_inner_PI, _gathered(x_TD, pairs), ends_E)
        dx_PD = grouped_product(d_inner_PI, inner_EID.transpose(1, 2), ends_E)
        dx_TD = combine(dx_PD, pairs.places_P, torch.ones_like(weights_TN))
        return dx_TD, d_weights_TN, None, d_inner_EID, d_down_EDF


def _gathered(x_TD: Tensor, pairs: Pairs) -> Tensor:
    """The token of each pair."""
    return x_TD.index_select(0, pairs.order_P // pairs.per_token)
