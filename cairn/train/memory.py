"""Predicted memory of a rank by purpose, from the recipe and before any allocation.

    weights      as they are computed with               gradients    of them, as many as exist at the peak
    states       what the optimizer remembers            masters      float32 copies of 16-bit weights
    activations  what forward keeps for backward         transient    a chunk of logits, or gradients on their way

    bytes
      |        .--loss--.                 a step has two peaks: the loss, where all activations are there and the
      |     .-'          '-.__.--.        gradient of the head, and the end of backward, where all gradients are and
      |__.-'                      '--     one layer's activations. The larger one counts. Near both there is a second
                                          peak, where attention walks backward and keeps its slopes.

Activations are counted tensor by tensor, as the fused form keeps them; the plain form keeps more, and its count is that
of torch's own operations. One process: other layouts divide these numbers, and say how. Pure arithmetic; no torch.
"""

import math
from fnmatch import fnmatchcase

import msgspec

from cairn.kernels.attention.attention_room import slopes_bytes
from cairn.models.spec import ModelSpec
from cairn.train.config import Optim, Precision, Train
from cairn.train.recompute_kinds import KINDS, MOVING, Recompute

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS = 1200 << 20  # the chunk of logits that the kernel works on
WORKSPACE = 64 << 20  # of cuBLAS
# Bytes of a value: 4 bits, a byte for each 64, a float for each 256 of those.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
OF_DEVICE = 0.9  # what a run may plan to use: the allocator and the driver want a share
MARGIN = 1.01  # by which a prediction has to be below a limit that a person has set


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by part, at the peak of a step."""

    weights: int
    gradients: int
    states: int
    masters: int
    activations: int
    transient: int
    workspace: int

    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)

    def table(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


def predict(spec: ModelSpec, config: Train, fused: bool, frozen: int = 0) -> Memory:
    """Predict the memory; undecided settings (recompute auto, layers to offload) follow the recipe's own limit.

    `frozen`: values that are not trained, which have neither gradients nor states nor masters.
    """
    precision = config.precision
    undecided = precision.offload_activations and not precision.offload_layers
    if precision.recompute == "auto" or undecided:
        config = fitting(spec, config, fused, room_of(config.precision), frozen)
    width = WIDTHS[config.precision.kind]
    trained = spec.parameters() - frozen
    tokens = config.data.sequence * config.data.microbatch
    on_device = 0 if config.optim.offload else 1
    gradients, activations, transient = max(_peaks(spec, config, tokens, fused, trained), key=sum)
    return Memory(
        weights=_weight_bytes(spec, config, width, trained),
        gradients=gradients,
        states=on_device * state_bytes(trained, config.optim),
        masters=on_device * (4 * trained if config.precision.masters and width < 4 else 0),
        activations=activations,
        transient=transient,
        workspace=WORKSPACE,
    )


def _weight_bytes(spec: ModelSpec, config: Train, width: int, trained: int) -> int:
    """Bytes of the model and of its adapter, which is what is trained then. Over a base in 4 bits: its layers, and one
    matrix of them that is in floating point for a while.
    """
    count, adapter = spec.parameters(), trained if config.adapter.rank else 0
    if not config.adapter.rank or config.adapter.base != "nf4":
        return (count + adapter) * width
    outside = spec.vocab * spec.hidden * (1 if spec.tied else 2)
    largest = spec.hidden * (2 if spec.gated else 1) * spec.intermediate
    return (outside + largest + adapter) * width + int(NF4 * (count - outside))


def head_is_trained(spec: ModelSpec, config: Train) -> bool:
    """Return whether the whole head gets a gradient; adapters do not change its weights."""
    name = "embedding.weight" if spec.tied else "head.weight"
    frozen = any(fnmatchcase(name, pattern) for pattern in config.model.frozen)
    return not frozen and not config.adapter.rank


def fitting(
    spec: ModelSpec,
    config: Train,
    fused: bool,
    room: float,
    frozen: int = 0,
    host: float = math.inf,
) -> Train:
    """The recipe with the kind of recomputation that computes least and fits into `room` bytes; the thriftiest, if
    none does. With `offload_activations`, what would have to be computed again waits in `host` bytes, if it fits there.
    """
    precision = config.precision
    kinds = KINDS if precision.recompute == "auto" else (precision.recompute,)
    tried = [with_recompute(config, kind) for kind in kinds if fused or kind != "norms"]
    if precision.offload_activations and not precision.offload_layers:
        kept = [with_offloaded(one, 0) for one in tried if one.precision.recompute != "full"]
        most = kept[-1 if fused else 0]  # what the plain form does not compute again can be moved
        moved = [with_offloaded(most, n) for n in range(1, spec.layers + 1)]
        within = [one for one in moved if host_bytes(spec, one, fused) <= host]
        tried = [*kept, *within, *(with_offloaded(one, 0) for one in tried[len(kept) :])]
    fits = (one for one in tried if predict(spec, one, fused, frozen).total() <= room)
    return next(fits, tried[-1])


def host_bytes(spec: ModelSpec, config: Train, fused: bool) -> int:
    """Host memory of offloaded activations."""
    tokens = config.data.sequence * config.data.microbatch
    one = layer_bytes(spec, with_offloaded(config, 0).precision, tokens, fused)[1]
    return min(config.precision.offload_layers, spec.layers) * one


def with_offloaded(config: Train, layers: int) -> Train:
    """The same recipe with so many layers that are moved; none: without offloading."""
    precision = msgspec.structs.replace(
        config.precision, offload_activations=layers > 0, offload_layers=layers
    )
    return msgspec.structs.replace(config, precision=precision)


def with_recompute(config: Train, kind: Recompute) -> Train:
    """The same recipe with this kind; whole layers that are computed again leave nothing to offload."""
    precision = msgspec.structs.replace(config.precision, recompute=kind)
    if kind == "full":
        precision = msgspec.structs.replace(precision, offload_activations=False, offload_layers=0)
    return msgspec.structs.replace(config, precision=precision)


def room_of(precision: Precision, device_bytes: float = math.inf) -> float:
    """Bytes that a run may plan with."""
    limit = precision.memory_gib * 2**30 / MARGIN
    return min(limit, OF_DEVICE * device_bytes) if limit else OF_DEVICE * device_bytes


Peak = tuple[int, int, int]  # bytes of gradients, activations, transient


def _peaks(spec: ModelSpec, config: Train, tokens: int, fused: bool, trained: int) -> list[Peak]:
    """Memory peaks: at the loss, in backward of the first layer, and in attention of the last and first layer."""
    width = WIDTHS[config.precision.kind]
    more = config.microbatches > 1
    wide = more and width < 4 and config.precision.masters  # sums in float32
    before = trained * (4 if wide else width) if more else 0  # of earlier microbatches
    fresh = trained * width if wide or not more else 0
    head = before + spec.vocab * spec.hidden * width * head_is_trained(spec, config)
    stream = tokens * spec.hidden * width
    everything, one = layer_bytes(spec, config.precision, tokens, fused)
    passing = _in_flight(spec, width, tokens, config.precision.recompute)
    at_loss = max(_logits_bytes(spec, width, tokens, fused) + 3 * stream, passing)
    peaks = [(head, everything, at_loss), (before + fresh, one, passing)]
    if sums := head_sum_bytes(spec, width, tokens, fused) * head_is_trained(spec, config):
        peaks += [(before + sums, everything, at_loss), (head + sums, everything, 3 * stream)]
    if fused:
        gone = _kept_behind_attention(spec, width, tokens, config.precision.recompute)
        turning = _in_attention(spec, config, width, tokens)
        peaks += [(head, everything - gone, turning), (before + fresh, one - gone, turning)]
    return peaks


def layer_bytes(spec: ModelSpec, precision: Precision, tokens: int, fused: bool) -> tuple[int, int]:
    """Saved activations of all layers, and the working memory of one layer in backward."""
    width = WIDTHS[precision.kind]
    stream = tokens * spec.hidden * width
    one = _kept(spec, width, tokens, precision.recompute)
    if not fused:
        one = _kept_by_plain(spec, width, tokens)
    if precision.recompute == "full":
        inputs = (2 if fused else 1) * stream
        return spec.layers * inputs + one, one + inputs
    moved = min(precision.offload_layers, spec.layers)
    here = min(moved, MOVING)
    return (spec.layers - moved + here) * one, (1 + here) * one


def _kept(spec: ModelSpec, width: int, tokens: int, recompute: str) -> int:
    """Saved activations of a fused layer; each line is a tensor that an autograd function saves."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inner = (2 if spec.gated else 1) * _inner(spec)
    columns = spec.hidden  # the sum before attention
    columns += queries + 2 * keys  # the joined projection, before its heads are normed and turned
    columns += queries + keys  # q and k as attention took them; v is a part of the projection
    columns += queries  # the result of attention
    columns += spec.hidden  # the sum before the feed-forward
    columns += inner  # gate and up
    if recompute in ("none", "full"):
        columns += 2 * spec.hidden  # outputs of both norms
    if recompute != "selective":
        columns += _inner(spec)  # of the activation
    statistics = 4 * (2 + spec.heads)  # float32: two norms, the log-sum-exp of each head
    return tokens * (columns * width + statistics)


def _kept_by_plain(spec: ModelSpec, width: int, tokens: int) -> int:
    """Saved activations of a layer with torch operations, including float32 copies around norms of 16-bit models."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norm = spec.hidden * (width if width == 4 else 8 + 2 * width)
    heads = (queries + keys) * (width if width == 4 else 8 + 2 * width) * spec.qk_norm
    turned = 2 * (queries + keys) * width
    columns = queries + 2 * keys + queries + spec.hidden * 2 + 4 * _inner(spec)
    return tokens * (2 * norm + heads + turned + columns * width + 4 * spec.heads)


def _in_flight(spec: ModelSpec, width: int, tokens: int, recompute: str) -> int:
    """Gradients of the widest product and of the residual stream, which exist while a layer is walked backward."""
    inner = (2 if spec.gated else 1) * _inner(spec)
    again = _inner(spec) if recompute == "selective" else 0  # what the activation gives once more
    return tokens * (inner + _inner(spec) + again + 2 * spec.hidden) * width


def _kept_behind_attention(spec: ModelSpec, width: int, tokens: int, recompute: str) -> int:
    """The part of `_kept` that is gone when a layer's attention is walked backward."""
    columns = spec.hidden + (2 if spec.gated else 1) * _inner(spec)
    columns += spec.hidden if recompute in ("none", "full") else 0
    columns += _inner(spec) if recompute != "selective" else 0
    return tokens * (columns * width + 4)


def _in_attention(spec: ModelSpec, config: Train, width: int, tokens: int) -> int:
    """Gradients of its result, of the joined projection and of the residual stream; slopes, where heads are wide."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    slopes = 0
    if width == 2 and spec.head_dim == 128 and spec.heads > spec.kv_heads:
        slopes = slopes_bytes(tokens, config.data.sequence, spec.heads)
    return tokens * (2 * queries + 2 * keys + spec.hidden) * width + slopes


def _inner(spec: ModelSpec) -> int:
    if spec.experts is None:
        return spec.intermediate
    return spec.experts.per_token * spec.experts.intermediate + spec.experts.shared_intermediate


def _logits_bytes(spec: ModelSpec, width: int, tokens: int, fused: bool) -> int:
    if fused:
        return min(LOGITS, tokens * spec.vocab * width)
    return min(tokens, 4096) * spec.vocab * (width + 8)


def head_sum_bytes(spec: ModelSpec, width: int, tokens: int, fused: bool) -> int:
    """Bytes of the head's gradient, which is accumulated in float32 over several chunks of logits."""
    several = tokens * spec.vocab * width > LOGITS if fused else tokens > 4096
    return 4 * spec.vocab * spec.hidden if several and width < 4 else 0


def checkpoint_bytes(spec: ModelSpec, config: Train, frozen: int = 0) -> int:
    """Bytes of a checkpoint: weights, states and masters of trained parameters; frozen weights are referenced."""
    width = WIDTHS[config.precision.kind]
    masters = 4 if config.precision.masters and width < 4 else 0
    trained = spec.parameters() - frozen
    return math.ceil(trained * (width + masters) + state_bytes(trained, config.optim))


def state_bytes(trained: int, optim: Optim) -> int:
    """Bytes of AdamW's states; Muon has one state instead of two and needs less."""
    per_value = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.0 + 8.0 / 256}[optim.states]
    return math.ceil(trained * per_value)
