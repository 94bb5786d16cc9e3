"""A mixture of experts through our kernels, for serving on a GPU: five launches, none of which waits for the host.

    router product | route | sort pairs | gate, up, SwiGLU of every expert | down, weighed

Few tokens leave a float32 part for each of their experts, which the norm that follows sums; many tokens are summed in
a launch of their own. What the kernels cannot express (other types, tensor-parallel shards) is computed by torch.
"""

from typing import cast

from torch import Tensor

from cairn.kernels.experts.combine import combine
from cairn.kernels.experts.grouped_matmul import grouped_matmul, grouped_parts, obstacle
from cairn.kernels.experts.route import MOST_EXPERTS, Routing, route
from cairn.kernels.experts.sort_pairs import FewPairs, Pairs, sort_pairs
from cairn.kernels.norm.join_norm import Parts
from cairn.models.experts import ExpertLayer
from cairn.models.linear.form import Epilogue, Kernels, Product
from cairn.models.linear.gpu_product import gpu_product

FEW_PAIRS = 32  # they rarely share an expert: sorting them costs more than reading one twice
MOST_PARTS = 512  # tokens: above, their parts in float32 are more bytes than a pass that sums them


def has_kernels(layer: ExpertLayer, x_TD: Tensor) -> bool:
    experts = layer.experts
    # `route` chooses among all experts, not among groups of them.
    fits = experts.groups == 1 and layer.shards.size == 1 and experts.count <= MOST_EXPERTS
    return (
        fits and obstacle(x_TD, layer.inner_EFD) is None and obstacle(x_TD, layer.down_EDF) is None
    )


def experts_product(
    layer: ExpertLayer,
    x_TD: Tensor,
    onto_TD: Tensor | None,
    kernels: Kernels,
    slots_T: Tensor | None = None,
) -> Product:
    """`onto_TD`: the residual, if the result is added to it as it is; then it may be left in parts.

    `slots_T`: where the tokens lie in the cache; negative for padding, which no expert sees.
    """
    chosen_TK, weights_TK = _routed(layer, x_TD, kernels, slots_T)
    left_in_parts = onto_TD is not None and layer.shared is None and len(x_TD) <= MOST_PARTS
    left_in_parts = left_in_parts and layer.down_bias_ED is None
    pairs: Pairs | FewPairs
    if left_in_parts and chosen_TK.numel() <= FEW_PAIRS:
        pairs = FewPairs(chosen_TK.flatten(), layer.experts.per_token)
    else:
        pairs = sort_pairs(chosen_TK, layer.experts.count)
    one_tile = kernels.invariant
    x_TD = x_TD.contiguous()
    if layer.gate.is_swiglu and layer.inner_bias_EF is None:
        inner_PF = grouped_matmul(
            x_TD, layer.inner_EFD.data, pairs, gather=True, swiglu=True, one_tile=one_tile
        )
    else:
        wide_PF = grouped_matmul(x_TD, layer.inner_EFD.data, pairs, gather=True, one_tile=one_tile)
        inner_PF = layer.gate.fast(_biased(wide_PF, layer, chosen_TK, pairs))
    if isinstance(pairs, FewPairs) or left_in_parts:
        return Parts(
            grouped_parts(inner_PF, layer.down_EDF.data, pairs, weights_TK, one_tile=one_tile)
        )
    results_PD = grouped_matmul(inner_PF, layer.down_EDF.data, pairs, one_tile=one_tile)
    y_TD = combine(results_PD, pairs.places_P, weights_TK)
    if layer.down_bias_ED is None:
        return y_TD
    visited_TK = chosen_TK.clamp(min=0).long()  # of padding, whatever: nobody reads it
    return y_TD + layer.weighed_bias(layer.down_bias_ED, weights_TK.to(x_TD.dtype), visited_TK)


def _biased(
    wide_PF: Tensor, layer: ExpertLayer, chosen_TK: Tensor, pairs: Pairs | FewPairs
) -> Tensor:
    """The first products plus the biases of their experts, where those have any."""
    if layer.inner_bias_EF is None:
        return wide_PF
    chosen_P = chosen_TK.flatten()
    if isinstance(pairs, FewPairs):
        expert_P = chosen_P
    else:  # behind the pairs of experts lie those of padding, whose order is not written
        expert_P = chosen_P[pairs.order_P.long().clamp(0, chosen_P.numel() - 1)]
    return wide_PF + layer.inner_bias_EF.data[expert_P.clamp(min=0).long()]


def _routed(
    layer: ExpertLayer, x_TD: Tensor, kernels: Kernels, slots_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    experts, router = layer.experts, layer.router
    # A tensor: there is no residual that parts could wait for.
    added_E = None if router.logit_bias_E is None else router.logit_bias_E.data
    logits_TE = cast(
        Tensor, gpu_product(x_TD, router.weight.data, added_E, Epilogue(kernels=kernels), kernels)
    )
    routing = Routing(experts.per_token, experts.gate, experts.renormalize, experts.scale)
    bias_E = None if router.bias_E is None else router.bias_E.data
    return route(logits_TE, routing, bias_E, slots_T)
