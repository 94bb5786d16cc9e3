"""A mixture of experts through our kernels, for serving on a GPU: five launches, none of which waits for the host.

    router product | route | sort pairs | gate, up, SwiGLU of every expert | down, weighed

Few tokens leave a float32 part for each of their experts, many tokens a row of 16 bits, and the norm that follows sums
them; where none follows, a launch of their own does. What the kernels cannot express (other types, slices of experts)
is computed by torch.
"""

from typing import cast

from torch import Tensor

from cairn.kernels.experts.combine import combine
from cairn.kernels.experts.combine_norm import Choices
from cairn.kernels.experts.grouped_matmul import (
    Gating,
    Rows,
    grouped_matmul,
    grouped_parts,
    listed,
    obstacle,
)
from cairn.kernels.experts.matrices import ExpertMatrices, Fp8Experts
from cairn.kernels.experts.route import MOST_EXPERTS, Routing, route
from cairn.kernels.experts.sort_pairs import FEW_PAIRS, FewPairs, Pairs, sort_pairs
from cairn.kernels.norm.join_norm import Parts
from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.models.activation import Gate
from cairn.models.expert_ranks import spreads_experts
from cairn.models.experts import ExpertLayer
from cairn.models.linear.form import Epilogue, Kernels, Product
from cairn.models.linear.gpu_product import gpu_product

MOST_PARTS = 512  # tokens: above, their parts in float32 are more bytes than a pass that sums them


def has_kernels(layer: ExpertLayer, x_TD: Tensor) -> bool:
    experts = layer.experts
    # `route` chooses among all experts, not among groups of them.
    whole = layer.shards.size == 1 or spreads_experts(layer.shards)
    fits = experts.groups == 1 and whole and experts.count <= MOST_EXPERTS
    return fits and all(obstacle(x_TD, w) is None for w in layer.matrices())


def experts_product(
    layer: ExpertLayer,
    x_TD: Tensor,
    onto_TD: Tensor | None,
    kernels: Kernels,
    slots_T: Tensor | None = None,
    rows_TD: Quantized | None = None,
) -> Product:
    """`onto_TD`: the residual, if the result is added to it as it is; then it may be left in parts.

    `slots_T`: where the tokens lie in the cache; negative for padding, which no expert sees. `rows_TD`: x in float8, if
    it is known.
    """
    alone = layer.shards.size == 1
    chosen_TK, weights_TK = _routed(layer, x_TD, kernels, slots_T)
    weights_TK, chosen_TK = layer.visits_here(weights_TK, chosen_TK)
    left_in_parts = onto_TD is not None and layer.shared is None and len(x_TD) <= MOST_PARTS
    left_in_parts = left_in_parts and alone  # parts of one rank would be added before the others'
    # Parts are rounded once, results of many tokens twice: a row would depend on how many there are.
    left_in_parts = left_in_parts and not kernels.invariant
    pairs: Pairs | FewPairs
    if left_in_parts and chosen_TK.numel() <= FEW_PAIRS:
        pairs = FewPairs(chosen_TK.flatten(), layer.experts.per_token)
    else:
        pairs = sort_pairs(chosen_TK.contiguous(), layer.matrices()[0].shape[0])
    one_tile, (inner, down) = kernels.invariant, layer.matrices()
    inner_bias_EF, down_bias_ED = layer.biases()
    gating = _gating(layer.gate)
    if isinstance(pairs, Pairs) and not one_tile:
        pairs = listed(pairs, inner, gating)
    inner_PF = grouped_matmul(
        _entering(x_TD.contiguous(), inner) if rows_TD is None else rows_TD,
        inner,
        pairs,
        gather=True,
        gating=gating,
        bias_EN=inner_bias_EF,
        one_tile=one_tile,
    )
    rows = _entering(inner_PF if gating else layer.gate.fast(inner_PF), down)
    if isinstance(pairs, FewPairs) or left_in_parts:
        return Parts(
            grouped_parts(rows, down, pairs, weights_TK, bias_EN=down_bias_ED, one_tile=one_tile)
        )
    results_PD = grouped_matmul(rows, down, pairs, bias_EN=down_bias_ED, one_tile=one_tile)
    choices = Choices(results_PD, pairs.places_P, weights_TK)
    if onto_TD is not None and layer.shared is None and alone and not one_tile:
        return choices
    return layer.shards.reduce(combine(*choices))


def takes_float8(layer: ExpertLayer) -> bool:
    return isinstance(layer.matrices()[0], Fp8Experts)


def _gating(gate: Gate) -> Gating | None:
    """Gating in the epilogue of the kernel; None if the activation is a separate launch."""
    if gate.is_swiglu:
        return Gating()
    clamped = gate.gated and gate.activation == "clamped_silu"
    return Gating(gate.limit) if clamped else None


def _entering(x: Tensor, w: ExpertMatrices) -> Rows:
    return quantize(x) if isinstance(w, Fp8Experts) else x


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
