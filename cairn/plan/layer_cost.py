"""Cost of a layer on a rank: FLOPs of matmuls and attention, memory traffic of everything else.

    products      2 * weights * tokens; backward twice that
    attention     pairs of a query and a key that the mask leaves; backward 2.5 times that, at a lower rate
    between       norms, rotations, activations, residuals: bytes through memory, whatever they compute

Divided by tp (heads, feed-forward) and cp (tokens). Pure arithmetic over a ModelSpec; no seconds here.
"""

import msgspec

from cairn.models.mixer import MIXERS
from cairn.models.spec import ModelSpec

WIDTH = 2  # bytes of bf16


class LayerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Forward cost of a layer for a microbatch on a rank."""

    products: float  # FLOPs
    routed: float  # of them, those of experts that tokens are sent to
    attention: float  # FLOPs
    between: float  # bytes
    weights: float  # parameters of this rank's part, all experts of it


def layer_cost(
    spec: ModelSpec,
    tokens: float,
    sequence: int,
    tp: int = 1,
    ep: int = 1,
    *,
    sequence_parallel: bool = False,
) -> LayerCost:
    """`tokens` on this rank; `sequence` is the length of a sample, over all ranks of cp.

    Between the layers every rank of tp has all of the stream; with `sequence_parallel`, its share of the tokens.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    mixers = spec.mixers or (spec.mixer,)  # of layers that differ, the mean
    shapes = [MIXERS[mixer].shape for mixer in mixers]
    projections = sum(shape.matmul_parameters(spec) for shape in shapes) / len(shapes)
    feed, all_feed, inner = _feed_forward(spec, ep)
    experts = spec.experts
    visited = 0 if experts is None else experts.per_token * experts.intermediate
    stream = 8 * spec.hidden / (tp if sequence_parallel else 1)
    columns = stream + (2 + spec.gated) * inner / tp + 4 * (queries + keys) / tp
    return LayerCost(
        products=2 * tokens * (projections + feed) / tp,
        routed=2 * tokens * (2 + spec.gated) * spec.hidden * visited / tp,
        attention=spec.attention_flops(sequence) / spec.layers / sequence * tokens / tp,
        between=tokens * columns * WIDTH,
        weights=(projections + all_feed) / tp,
    )


def head_cost(spec: ModelSpec, tokens: float, tp: int = 1) -> LayerCost:
    """The output projection and the loss: logits are written, read for the loss, and their gradients read twice."""
    return LayerCost(
        products=2 * tokens * spec.vocab * spec.hidden / tp,
        routed=0.0,
        attention=0.0,
        between=4 * tokens * spec.vocab / tp * WIDTH,
        weights=spec.vocab * spec.hidden / tp,
    )


def _feed_forward(spec: ModelSpec, ep: int) -> tuple[float, float, float]:
    """Weights that a token visits, weights that a rank holds, and the width between them."""
    per_width = (2 + spec.gated) * spec.hidden
    if spec.experts is None:
        return per_width * spec.intermediate, per_width * spec.intermediate, spec.intermediate
    experts = spec.experts
    inner = experts.per_token * experts.intermediate + experts.shared_intermediate
    rank_width = experts.count / ep * experts.intermediate + experts.shared_intermediate
    return per_width * inner, per_width * rank_width, inner
