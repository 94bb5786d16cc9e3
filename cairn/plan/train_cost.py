"""How long does a training step take with this layout, and where does the time go?

    one microbatch through one stage     products + attention + between, at what the device sustains
    tp, cp, ep                           collectives inside the layers: their time counts in full
    fsdp, dp                             collectives beside the layers: what does not fit under compute counts
    pp                                   the real schedule, simulated: its bubble
    update                               bytes of weights, gradients and states

The schedule is `train.parallel.pipeline`, the collectives are `comm.nccl_model`, FLOPs are the spec's. A few constants,
below, are what separates a roofline from a real step; they are the same for every model and layout. Pure.
"""

import math
from functools import lru_cache
from typing import Literal

import msgspec

from cairn.comm.nccl_model import cluster_of, times
from cairn.models.spec import ModelSpec
from cairn.plan.device import Device
from cairn.plan.layer_cost import LayerCost, head_cost, layer_cost
from cairn.train.parallel.layout import Layout
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import Costs, Timeline, simulate
from cairn.train.recompute_kinds import Recompute

# Attention, forward and backward, as a share of the rate of products: cuDNN and our own reach 600 and 500 of 680
# TFLOP/s on an H200; torch's older flash attention, 340.
ATTENTION: dict[str, tuple[float, float]] = {"fused": (0.85, 0.72), "plain": (0.50, 0.45)}
FP8 = 0.82  # of the rate of fp8 products is left once values are scaled and cast
CONTENTION = (
    0.25  # a collective that hides behind compute still slows it by this share of its own time
)
TP_SHARE = 0.93  # each halving of the products by tp: smaller products run slower
FEW = 300  # tokens of a microbatch on a rank for which products reach half of their rate
UNFUSED = 2.5  # times the bytes between products, where no compiler and no kernel joins operations

Kernels = Literal["fused", "plain"]  # our kernels or a compiler; one operation after another


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be trained."""

    spec: ModelSpec
    sequence: int
    sequences: int  # of one step, all ranks together
    fp8: bool = False
    kernels: Kernels = "fused"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is chosen."""

    layout: Layout
    microbatch: int
    recompute: Recompute
    order: str = "1f1b"

    def words(self) -> str:
        order = f", {self.order}" if self.layout.pp > 1 else ""
        return f"{self.layout.words()}, microbatch {self.microbatch}, recompute {self.recompute}{order}"


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step by part; they add up."""

    products: float
    attention: float
    between: float
    recompute: float
    tensor: float  # collectives of tp
    context: float
    expert: float
    data: float  # collectives of dp and fsdp that are not hidden, and what hidden ones slow down
    bubble: float
    update: float

    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__struct_fields__)

    def table(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


def step_time(job: Job, choice: Choice, device: Device) -> StepTime:
    layout, spec = choice.layout, job.spec
    microbatches = job.sequences // (layout.data_ranks() * choice.microbatch)
    tokens = job.sequence * choice.microbatch / layout.cp
    layer = layer_cost(spec, tokens, job.sequence, layout.tp, layout.ep)
    head = head_cost(spec, tokens, layout.tp)
    layers = math.ceil(spec.layers / layout.pp)  # of the longest stage, which the others wait for
    share = 1 / layout.pp  # of the head: stages are balanced with it
    rate = (FP8 * device.fp8_flops_per_s if job.fp8 else device.flops_per_s) * TP_SHARE ** _log2(
        layout.tp
    )
    rate *= tokens / (tokens + FEW)
    bytes_factor = UNFUSED if job.kernels == "plain" else 1.0
    forward = (layer.products * layers) / rate + head.products * share / (
        device.flops_per_s * tokens / (tokens + FEW)
    )
    ahead, back = ATTENTION[job.kernels]
    attention = layer.attention * layers / device.flops_per_s * (1 / ahead + 2.5 / back)
    between = (layer.between * layers + head.between * share) * bytes_factor / device.bytes_per_s
    again = _recompute(layer, layers, choice.recompute, rate, device, bytes_factor)
    tensor, context, expert = _inside(job, choice, device, tokens, layers)
    one = 3 * forward + attention + 3 * between
    stage = one + again + tensor + context + expert
    stretched = _pipeline(choice.order, layout.pp, microbatches)
    update = _update(job, layout, device)
    compute = stage * microbatches
    return StepTime(
        products=3 * forward * microbatches,
        attention=attention * microbatches,
        between=3 * between * microbatches,
        recompute=again * microbatches,
        tensor=tensor * microbatches,
        context=context * microbatches,
        expert=expert * microbatches,
        data=_beside(job, choice, device, compute, microbatches),
        bubble=compute * (stretched - 1),
        update=update,
    )


def _recompute(
    layer: LayerCost, layers: float, kind: Recompute, rate: float, device: Device, factor: float
) -> float:
    """Computed again in backward: norms and activations are bytes only, a whole layer is a forward."""
    moved = layer.between * layers * factor / device.bytes_per_s
    if kind == "full":
        again = layer.products / rate + layer.attention / (device.flops_per_s * 0.85)
        return again * layers + moved
    return {"none": 0.0, "norms": 0.2, "selective": 0.5}[kind] * moved


def _inside(
    job: Job, choice: Choice, device: Device, tokens: float, layers: float
) -> tuple[float, float, float]:
    """Collectives in the middle of a layer, forward and backward, of one microbatch."""
    layout, spec = choice.layout, job.spec
    stream = int(tokens * spec.hidden * 2)
    passes = 3 if choice.recompute == "full" else 2
    tensor = layers * 2 * passes * collective("all_reduce", layout.tp, stream, device)
    keys = int(tokens * 2 * spec.kv_heads * spec.head_dim / layout.tp * 2)
    context = 0.0
    if layout.cp > 1:  # a ring: half of it hides behind the attention of the block before
        context = (
            0.5
            * layers
            * (passes + 1)
            * (layout.cp - 1)
            * wire(keys, layout.cp * layout.tp, device)
        )
    expert = 0.0
    if layout.ep > 1 and spec.experts is not None:
        sent = int(stream * spec.experts.per_token)
        expert = (
            layers
            * 2
            * passes
            * wire(int(sent * (layout.ep - 1) / layout.ep), layout.ep * layout.tp, device)
        )
    return tensor, context, expert


def _beside(job: Job, choice: Choice, device: Device, compute: float, microbatches: int) -> float:
    """Gather weights twice and scatter gradients (fsdp), reduce gradients (dp): hidden where compute lasts."""
    layout = choice.layout
    weights = stage_parameters(job.spec, layout)
    span = layout.tp * layout.cp  # ranks that lie between two of one fsdp group
    cost = 0.0
    if layout.fsdp > 1:
        rounds = microbatches if layout.pp == 1 else 1  # a stage keeps its weights whole for a step
        gather = collective("all_gather", layout.fsdp, int(2 * weights), device, span)
        scatter = collective("reduce_scatter", layout.fsdp, int(4 * weights), device, span)
        cost += rounds * (2 * gather + scatter)
    if layout.dp > 1:
        share = weights / layout.fsdp
        cost += collective("all_reduce", layout.dp, int(4 * share), device, span * layout.fsdp)
    hidden = min(cost, 0.9 * compute)
    return cost - hidden + CONTENTION * hidden


def _update(job: Job, layout: Layout, device: Device) -> float:
    """AdamW over this rank's shard: weights 2+2, gradients 4, masters and two states 4+4 each, and the norm."""
    held = stage_parameters(job.spec, layout) / layout.fsdp
    return held * (4 + 4 + 24 + 4) / device.bytes_per_s


def stage_parameters(spec: ModelSpec, layout: Layout) -> float:
    """Of one rank before fsdp cuts them; a stage has the embedding or the head, not both."""
    layer = layer_cost(spec, 1, 1, layout.tp, layout.ep).weights
    ends = spec.vocab * spec.hidden / layout.tp * (1 if spec.tied or layout.pp > 1 else 2)
    return layer * math.ceil(spec.layers / layout.pp) + ends


@lru_cache(maxsize=4096)
def _simulated(order: str, pp: int, microbatches: int) -> Timeline:
    return simulate(schedule(order, pp, microbatches), Costs())


def _pipeline(order: str, pp: int, microbatches: int) -> float:
    """By how much the bubble stretches a step: the schedule itself, run on paper.

    Ranks idle while the pipeline fills and drains, so beyond twice the stages more microbatches add none.
    """
    if pp == 1:
        return 1.0
    enough = min(microbatches, 2 * pp)
    idle = _simulated(order, pp, enough).idle[0]
    busy = microbatches * sum(Costs().of(kind, 1) for kind in ("F", "I", "W"))
    return 1 + idle / busy


def stash(order: str, pp: int, microbatches: int) -> float:
    """The most microbatches whose activations a stage keeps, in shares of its model."""
    return 1.0 if pp == 1 else max(_simulated(order, pp, min(microbatches, 2 * pp)).stash)


@lru_cache(maxsize=65536)
def collective(
    kind: Literal["all_reduce", "all_gather", "reduce_scatter"],
    ranks: int,
    size: int,
    device: Device,
    apart: int = 1,
) -> float:
    """Seconds of NCCL's best choice. `apart`: how far ranks of the group lie from each other in the node."""
    if ranks == 1 or size == 0:
        return 0.0
    near = max(1, min(ranks, device.gpus_per_node // apart))
    nodes = ranks // near if ranks % near == 0 else ranks
    cluster = cluster_of(device.fabric, ranks // nodes, nodes, device.nic_gb_per_s)
    return times(cluster, kind, size)[0].us * 1e-6


def wire(size: int, span: int, device: Device) -> float:
    """Seconds for bytes from one rank to another, `span` ranks of the machine apart."""
    from cairn.comm.nccl_model import FABRICS

    fabric = FABRICS[device.fabric]
    near = span <= device.gpus_per_node
    rate = fabric.channels * fabric.channel_gb_per_s if near else device.nic_gb_per_s
    return 1e-5 + size / (rate * 1e9)


def _log2(number: int) -> int:
    return number.bit_length() - 1
