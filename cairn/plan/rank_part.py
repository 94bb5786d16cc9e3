"""Part of a model on a rank of a layout, and its shards, as `train.parallel` distributes it.

    tp, pp     heads, feed-forward and vocabulary of one rank; layers of one stage
    ep         some of the experts, whole: they are not cut further, `expert_replicas` ranks hold the same ones
    fsdp       everything else is cut over fsdp x cp ranks, and copied over dp
    no fsdp    everything else is copied over dp x cp ranks

A stage has the embedding or the head, not both. Numbers only; no bytes and no seconds.
"""

from functools import lru_cache

import msgspec

from cairn.models.spec import ModelSpec
from cairn.train.parallel.layout import Layout


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one rank before fsdp cuts them, and how many ranks share them."""

    dense: int  # all that fsdp cuts: with ep 1 the experts too
    experts: int  # that ep has spread, which fsdp leaves whole
    layer: int  # of `dense`, one layer: fsdp gathers them one by one
    ends: int  # of `dense`, embedding and head: fsdp gathers them together
    shards: int  # ranks over which `dense` is cut
    replicas: int  # ranks with the same shard, whose gradients are summed
    expert_replicas: int

    @property
    def updated(self) -> float:
        """Parameters that this rank updates."""
        return self.dense / self.shards + self.experts


def rank_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The model as one rank computes it; experts keep their number, since a token visits as many as ever."""
    tp, layers = layout.tp, max(1, -(-spec.layers // layout.pp))
    first = _first_layer(spec, layers)
    experts = spec.experts
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            intermediate=max(1, experts.intermediate // tp),
            shared_intermediate=experts.shared_intermediate // tp,
        )
    delta = spec.delta
    if delta is not None:
        heads = max(1, delta.key_heads // tp), max(1, delta.value_heads // tp)
        delta = msgspec.structs.replace(delta, key_heads=heads[0], value_heads=heads[1])
    return msgspec.structs.replace(
        spec,
        layers=layers,
        heads=max(1, spec.heads // tp),
        kv_heads=max(1, spec.kv_heads // tp),
        intermediate=max(1, spec.intermediate // tp),
        vocab=-(-spec.vocab // tp),
        tied=spec.tied or layout.pp > 1,
        windows=spec.windows[first : first + layers],
        mixers=spec.mixers[first : first + layers],
        experts=experts,
        delta=delta,
    )


def _first_layer(spec: ModelSpec, layers: int) -> int:
    """First layer of a representative stage: one that includes an attention layer."""
    return max(0, spec.token_layers[0] - layers + 1)


@lru_cache(maxsize=65536)
def part(spec: ModelSpec, layout: Layout) -> Part:
    local = rank_spec(spec, layout)
    everything, routed = local.parameters() - _elsewhere(local, layout.tp), _routed(local)
    ends = local.vocab * local.hidden * (1 if local.tied else 2)
    spread = layout.ep > 1 and spec.experts is not None
    dense = everything - routed if spread else everything
    cut = layout.fsdp > 1
    return Part(
        dense=dense,
        experts=routed // layout.ep if spread else 0,
        layer=(dense - ends) // local.layers,
        ends=ends,
        shards=layout.fsdp * layout.cp if cut else 1,
        replicas=layout.dp if cut else layout.dp * layout.cp,
        expert_replicas=layout.data_ranks() * layout.cp // layout.ep,
    )


def _elsewhere(spec: ModelSpec, tp: int) -> int:
    """Parameters of short convolutions that other tensor-parallel ranks hold."""
    convolutions = [layer for layer in range(spec.layers) if spec.mixer_of(layer) == "short_conv"]
    whole = sum(spec.mixer_shape(layer).parameters(spec) for layer in convolutions)
    return whole - whole // tp


def _routed(spec: ModelSpec) -> int:
    """Parameters of all experts but the shared one."""
    if spec.experts is None:
        return 0
    layers = sum(spec.experts_of(layer) is not None for layer in range(spec.layers))
    one = (2 + spec.gated) * spec.hidden * spec.experts.intermediate
    return layers * spec.experts.count * one
