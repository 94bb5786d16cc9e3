"""How much memory will a rank need, and for what? Predicted from the recipe, before anything is allocated.

    weights      as they are computed with               gradients    as wide as the weights, or float32 sums
    states       what the optimizer remembers            masters      float32 copies of 16-bit weights
    activations  what forward keeps for backward         logits       one chunk of them, and the head's gradient

Activations are counted tensor by tensor, as the fused form keeps them; the plain form keeps more, and its count is that
of torch's own operations. One process: other layouts divide these numbers, and say how. Pure arithmetic; no torch.
"""

import math

import msgspec

from cairn.models.spec import ModelSpec
from cairn.train.config import Optim, Precision, Train

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS = 512 << 20  # the chunk of logits that the kernel works on
WORKSPACE = 64 << 20  # of cuBLAS


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by part."""

    weights: int
    gradients: int
    states: int
    masters: int
    activations: int
    logits: int
    workspace: int

    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)

    def table(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


def predict(spec: ModelSpec, config: Train, fused: bool) -> Memory:
    width = WIDTHS[config.precision.kind]
    count = spec.parameters()
    tokens = config.data.sequence * config.data.microbatch
    accumulates = config.microbatches > 1 and width < 4 and config.precision.masters
    on_device = 0 if config.optim.offload else 1
    layers = layer_bytes(spec, config.precision, tokens, fused)
    return Memory(
        weights=count * width,
        gradients=count * width + (4 * count if accumulates else 0),
        states=on_device * state_bytes(spec, config.optim),
        masters=on_device * (4 * count if config.precision.masters and width < 4 else 0),
        activations=layers,
        logits=_logits_bytes(spec, width, tokens, fused),
        workspace=WORKSPACE,
    )


def layer_bytes(spec: ModelSpec, precision: Precision, tokens: int, fused: bool) -> int:
    """What all layers together keep, and what the last of them needs on top while it is walked backward."""
    width = WIDTHS[precision.kind]
    stream = tokens * spec.hidden * width
    one = _kept(spec, width, tokens, precision.recompute if fused else "none")
    if not fused:
        one = _kept_by_plain(spec, width, tokens)
    if precision.recompute == "full":
        return spec.layers * 2 * stream + one + _in_flight(spec, width, tokens)
    return spec.layers * one + 2 * stream + _in_flight(spec, width, tokens)


def _kept(spec: ModelSpec, width: int, tokens: int, recompute: str) -> int:
    """Of one layer, in the fused form; each line is a tensor that an autograd function saves."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = (2 if spec.gated else 1) * _inner(spec)
    columns = spec.hidden  # the sum before attention
    columns += queries + 2 * keys  # the joined projection, before its heads are normed and turned
    columns += queries + keys  # q and k as attention took them; v is a part of the projection
    columns += queries  # the result of attention
    columns += spec.hidden  # the sum before the feed-forward
    columns += inner  # gate and up
    if recompute != "selective":
        columns += 2 * spec.hidden + _inner(spec)  # outputs of both norms and of the activation
    statistics = 4 * (2 + spec.heads)  # float32: two norms, the log-sum-exp of each head
    return tokens * (columns * width + statistics)


def _kept_by_plain(spec: ModelSpec, width: int, tokens: int) -> int:
    """Of one layer by torch's operations, which keep float32 copies around norms where weights have 16 bits."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norm = spec.hidden * (width if width == 4 else 8 + 2 * width)
    heads = (queries + keys) * (width if width == 4 else 8 + 2 * width) * spec.qk_norm
    turned = 2 * (queries + keys) * width
    columns = queries + 2 * keys + queries + spec.hidden * 2 + 4 * _inner(spec)
    return tokens * (2 * norm + heads + turned + columns * width + 4 * spec.heads)


def _in_flight(spec: ModelSpec, width: int, tokens: int) -> int:
    """Gradients of the widest product and of the residual stream, which exist while a layer is walked backward."""
    inner = (2 if spec.gated else 1) * _inner(spec)
    return tokens * (inner + _inner(spec) + 2 * spec.hidden) * width


def _inner(spec: ModelSpec) -> int:
    if spec.experts is None:
        return spec.intermediate
    return spec.experts.per_token * spec.experts.intermediate + spec.experts.shared_intermediate


def _logits_bytes(spec: ModelSpec, width: int, tokens: int, fused: bool) -> int:
    if fused:
        return min(LOGITS, tokens * spec.vocab * width) + 2 * spec.vocab * spec.hidden * width
    return min(tokens, 4096) * spec.vocab * (width + 8) + spec.vocab * spec.hidden * width


def checkpoint_bytes(spec: ModelSpec, config: Train) -> int:
    """On disk: weights, states and masters."""
    width = WIDTHS[config.precision.kind]
    masters = 4 if config.precision.masters and width < 4 else 0
    return math.ceil(spec.parameters() * (width + masters) + state_bytes(spec, config.optim))


def state_bytes(spec: ModelSpec, optim: Optim) -> int:
    """What AdamW remembers; Muon, which has one state in place of two, takes less."""
    per_value = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.0 + 8.0 / 256}[optim.states]
    return math.ceil(spec.parameters() * per_value)
