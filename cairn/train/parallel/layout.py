"""Parallel layout: the number of ranks along each dimension.

    world = dp * fsdp * pp * cp * tp

    dp     replicas of everything, each with other samples
    fsdp   as dp, but parameters, gradients and optimizer states are cut over the ranks
    pp     each rank some of the layers; microbatches flow through
    cp     each rank some of the tokens of every sequence
    tp     each rank some of the heads and some of the feed-forward
    ep     each rank some of the experts: taken from the dp * fsdp ranks, so it adds none

Numbers only: no torch, no process groups (see `mesh`). What cannot work is refused here, before anything starts,
with the equation that does not hold.
"""

import math
from typing import Annotated, Literal

import msgspec

from cairn.core.errors import ConfigError
from cairn.models.spec import ModelSpec
from cairn.train.parallel.pipeline.schedules import schedule

AXES = ("dp", "fsdp", "pp", "cp", "tp")  # ep is not among them: it reuses ranks of dp and fsdp
Order = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]
Attention = Literal["ring", "ulysses"]
SPLIT = ("zb-h1", "zbv", "dualpipev")  # schedules that compute weight gradients later
IN_V = ("zbv", "dualpipev")  # each rank holds one stage of the way down and one of the way up
SHARED_SCALE = 256  # neighbours in a row that share a scale, in optimizer states of 8 bits


Ranks = Annotated[int, msgspec.Meta(ge=1)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of ranks of each parallel dimension; 1 is off."""

    dp: Ranks = 1
    """replicas of the whole model, each with its own samples"""
    fsdp: Ranks = 1
    """ranks over which parameters and optimizer states are cut, each with its own samples"""
    pp: Ranks = 1
    """pipeline stages"""
    cp: Ranks = 1
    """ranks that share the tokens of a sequence"""
    tp: Ranks = 1
    """ranks that share each layer"""
    ep: Ranks = 1
    """ranks that share the experts; part of dp * fsdp"""

    def world(self) -> int:
        return self.dp * self.fsdp * self.pp * self.cp * self.tp

    def data_ranks(self) -> int:
        """Number of data-parallel parts of each step's samples."""
        return self.dp * self.fsdp

    def words(self) -> str:
        """dp 2 x tp 4; `alone` for one rank."""
        named = [(axis, getattr(self, axis)) for axis in (*AXES, "ep")]
        return " x ".join(f"{axis} {size}" for axis, size in named if size > 1) or "alone"


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Execution strategy of a layout, which does not change the result."""

    order: Order = "1f1b"
    """pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev"""
    chunks: int = 2
    """stages on each rank, for interleaved; zbv and dualpipev always have two, the others one"""
    attention: Attention = "ring"
    """how ranks of cp share attention: keys go round a ring, or ulysses exchanges tokens for heads"""
    sequence_parallel: bool = False
    """with tp: cut the tokens between the layers as well, which keeps fewer activations"""
    zero: int = 0
    """with dp: cut optimizer states over the replicas (1), and gradients too (2)"""
    reshard: bool = True
    """with fsdp: free a layer's weights between its forward and its backward"""
    whole_gradients: bool = False
    """with fsdp and several microbatches: gradients leave once a step; fewer bytes travel, more stay on each rank"""


class Balance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load balancing of experts, which changes the result, equally for every layout."""

    loss: float = 0.0
    """weight of the loss that keeps them equally busy; 0: none"""
    bias: float = 0.0
    """how fast a bias steers tokens to experts that had too few; 0: none"""


class StepDemand(msgspec.Struct, frozen=True):
    """Step sizes that determine whether a layout is possible; 0 if unknown."""

    tokens: int = 0  # of one microbatch
    microbatches: int = 0  # of one data rank in one step
    strategy: Strategy = Strategy()
    int8_states: bool = False  # of the optimizer


def stages(layout: Layout, strategy: Strategy) -> int:
    """Into how many parts the layers are cut."""
    return layout.pp * _chunks(strategy) if layout.pp > 1 else 1


def _chunks(strategy: Strategy) -> int:
    return (
        2 if strategy.order in IN_V else strategy.chunks if strategy.order == "interleaved" else 1
    )


def check(
    layout: Layout,
    world: int,
    spec: ModelSpec | None = None,
    work: StepDemand = StepDemand(),  # noqa: B008
) -> None:
    """Raises ConfigError, with the equation and its values, if this cannot run."""
    for axis in (*AXES, "ep"):
        if getattr(layout, axis) < 1:
            raise ConfigError(f"{axis} is {getattr(layout, axis)}", hint="1 switches it off")
    _check_world(layout, world)
    _check_expert_ranks(layout, spec)
    if spec is not None:
        _check_model(layout, spec, work)
    _check_work(layout, spec, work)


def _check_world(layout: Layout, world: int) -> None:
    if layout.world() == world:
        return
    factors = " * ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES)
    others = layout.world() // layout.dp
    needed = f"{layout.world()} rank{'s' if layout.world() > 1 else ''}"
    hint = (
        f"use dp {world // others}, or start {needed}"
        if world % others == 0
        else f"start {needed}, or {others} or a multiple with another dp"
    )
    raise ConfigError(f"{factors} = {needed}, but there are {world}", hint=hint)


def _check_expert_ranks(layout: Layout, spec: ModelSpec | None) -> None:
    if layout.ep == 1:
        return
    if layout.data_ranks() % layout.ep:
        raise ConfigError(
            f"dp {layout.dp} * fsdp {layout.fsdp} = {layout.data_ranks()} ranks cannot be cut into "
            f"groups of ep {layout.ep}",
            hint=f"ep divides dp * fsdp: {_divisors(layout.data_ranks())}",
        )
    if spec is not None and spec.experts is None:
        raise ConfigError(
            f"ep {layout.ep} for a {spec.family} model without experts", hint="use ep 1"
        )
    if spec is not None and spec.experts is not None:
        _divides("ep", layout.ep, spec.experts.count, "experts")
        if spec.experts.biases:
            raise ConfigError(
                f"ep {layout.ep} for a {spec.family} model, whose experts have biases",
                hint="use ep 1: only experts without biases are spread over ranks",
            )


def _check_model(layout: Layout, spec: ModelSpec, work: StepDemand) -> None:
    _divides("tp", layout.tp, spec.heads, "attention heads")
    _divides("tp", layout.tp, spec.kv_heads, "key/value heads")
    for layer in range(spec.layers):
        experts = spec.experts_of(layer)
        width = spec.intermediate if experts is None else experts.intermediate
        _divides("tp", layout.tp, width, "columns of the feed-forward")
        if experts is not None and experts.shared_intermediate:
            _divides("tp", layout.tp, experts.shared_intermediate, "columns of the shared expert")
    _check_mixers(layout, spec)
    if work.int8_states and layout.tp > 1:
        _check_scales(layout, spec)
    if work.strategy.attention == "ulysses":
        local = spec.kv_heads // layout.tp
        _divides(
            "cp", layout.cp, local, f"key/value heads of a rank ({spec.kv_heads} / tp {layout.tp})"
        )
    if stages(layout, work.strategy) > spec.layers:
        raise ConfigError(
            f"pp {layout.pp} * {stages(layout, work.strategy) // layout.pp} stages per rank = "
            f"{stages(layout, work.strategy)} stages for {spec.layers} layers",
            hint=f"each stage needs at least one layer: at most {spec.layers} stages",
        )


def _check_mixers(layout: Layout, spec: ModelSpec) -> None:
    """Layers that look along the sequence: what of them can be cut by heads, and what by tokens."""
    if layout.tp > 1 and spec.qk_norm and spec.qk_norm_over == "width":
        raise ConfigError(
            f"tp {layout.tp} for a {spec.family} model, which norms all heads of a token at once",
            hint="use tp 1",
        )
    if spec.delta is not None:
        _divides("tp", layout.tp, spec.delta.key_heads, "key heads of a delta net")
    if spec.short_conv is not None:
        _divides("tp", layout.tp, spec.hidden, "columns of a short convolution")
    if layout.cp > 1 and spec.is_recurrent:
        raise ConfigError(
            f"cp {layout.cp} for a {spec.family} model, some of whose layers carry a state along the sequence",
            hint="use cp 1: ranks that share a sequence would have to wait for each other",
        )


def _check_scales(layout: Layout, spec: ModelSpec) -> None:
    """Two ranks must not share a scale: each would find its own, and a checkpoint has room for one."""
    widths: dict[str, int] = {}
    for layer in range(spec.layers):
        widths |= _mixed(spec, layer)
        experts = spec.experts_of(layer)
        if experts is None:
            widths["feed-forward"] = spec.intermediate
        else:
            widths |= {
                "experts": experts.intermediate,
                "shared expert": experts.shared_intermediate,
            }
    for what, width in widths.items():
        if (rest := width // layout.tp % SHARED_SCALE) != 0:
            raise ConfigError(
                f"optim.states int8 with tp {layout.tp}: {width} columns of the {what} / {layout.tp} % "
                f"{SHARED_SCALE} that share a scale = {rest}",
                hint=f"use another tp, such that a rank has a multiple of {SHARED_SCALE}, or optim.states float32",
            )


def _mixed(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Columns of the output projection behind what a layer does along the sequence."""
    mixer = spec.mixer_of(layer)
    if mixer == "delta" and spec.delta is not None:
        return {"delta net's output": spec.delta.values}
    if mixer == "short_conv":
        return {"convolution's output": spec.hidden}
    width = spec.head_dim if spec.latent is None else spec.latent.value
    return {"attention's output": spec.heads * width}


def _check_work(layout: Layout, spec: ModelSpec | None, work: StepDemand) -> None:
    if layout.pp > 1:
        _check_pipeline(layout, work)
    if work.strategy.sequence_parallel and layout.tp == 1:
        raise ConfigError("sequence_parallel with tp 1", hint="it cuts tokens over the ranks of tp")
    if work.strategy.zero and layout.fsdp > 1:
        raise ConfigError(
            f"zero {work.strategy.zero} with fsdp {layout.fsdp}: both cut the optimizer states",
            hint="use fsdp 1 and more dp, or zero 0",
        )
    if work.strategy.zero not in (0, 1, 2):
        raise ConfigError(
            f"zero is {work.strategy.zero}", hint="1 or 2; for the third stage use fsdp"
        )
    _check_tokens(layout, spec, work)


def _check_pipeline(layout: Layout, work: StepDemand) -> None:
    if work.strategy.order in SPLIT and layout.fsdp > 1:
        raise ConfigError(
            f"the schedule {work.strategy.order} computes weight gradients later, but fsdp {layout.fsdp} "
            f"gathers weights only around each backward",
            hint="use 1f1b, interleaved or gpipe with fsdp; or dp with zero 1 in its place",
        )
    if work.microbatches:
        schedule(work.strategy.order, layout.pp, work.microbatches, _chunks(work.strategy))


def _check_tokens(layout: Layout, spec: ModelSpec | None, work: StepDemand) -> None:
    if not work.tokens:
        return
    parts = layout.cp * (2 if layout.cp > 1 and work.strategy.attention == "ring" else 1)
    seq = layout.tp if work.strategy.sequence_parallel else 1
    if work.tokens % (parts * seq):
        zigzag = "2 * " if parts > layout.cp else ""
        raise ConfigError(
            f"{work.tokens} tokens of a microbatch % ({zigzag}cp {layout.cp} * tp {seq}) = "
            f"{work.tokens % (parts * seq)}",
            hint=f"make the tokens of a microbatch a multiple of {parts * seq}",
        )


def _divides(axis: str, size: int, total: int, what: str) -> None:
    if total % size:
        raise ConfigError(
            f"{axis} {size} does not divide {total} {what}: {total} % {size} = {total % size}",
            hint=f"use {axis} {math.gcd(total, size)}, or one of {_divisors(total)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
