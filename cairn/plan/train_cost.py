"""Time of a training step by layout, with its breakdown.

    one microbatch through one stage     products + attention + between, at what the device sustains
    tp, cp, ep                           collectives inside the layers: their time counts in full, unless those of tp
                                         are cut into pieces that travel beside products (`tensor_overlap`)
    fsdp, dp                             collectives beside the layers: what does not fit under compute counts
    pp                                   the real schedule, simulated: its bubble; activations from stage to stage
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
from cairn.plan.rank_part import part
from cairn.train.parallel.layout import Layout, Order
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import Costs, Timeline, simulate
from cairn.train.recompute_kinds import Recompute

# Attention, forward and backward, as a share of the rate of products: cuDNN and our own reach 600 and 500 of 680
# TFLOP/s on an H200; torch's older flash attention, 340.
ATTENTION = {"fused": (0.85, 0.72), "compiled": (0.50, 0.45), "plain": (0.50, 0.45)}
FP8 = 0.82  # of the rate of fp8 products is left once values are scaled and cast
# A collective that hides behind compute still slows it by this share of its own time.
CONTENTION = 0.25
NARROW = 200  # columns of a rank's projection with which products reach half of their rate, when tp cuts them
FEW = 300  # rows (tokens of a microbatch on a rank, or of an expert) with which products reach half of their rate
UNFUSED = 2.5  # with `plain`: times the bytes between products, where no compiler and no kernel joins operations

# Bytes that AdamW moves for a parameter: weights 2+2, gradients 4 and once more for the norm, two states; and masters
# 4+4, which bfloat16 states do without.
UPDATE = {"float32": 12 + 16 + 8, "bfloat16": 12 + 8, "int8": 12 + 4 + 8}

# Our kernels; torch's compiler and attention; one operation after another.
Kernels = Literal["fused", "compiled", "plain"]
States = Literal["float32", "bfloat16", "int8"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Training job."""

    spec: ModelSpec
    sequence: int
    sequences: int  # of one step, all ranks together
    fp8: bool = False
    kernels: Kernels = "fused"
    states: States = "float32"  # what the optimizer remembers


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Chosen layout and options."""

    layout: Layout
    microbatch: int
    recompute: Recompute
    order: Order = "1f1b"
    chunks: int = 2  # stages on each rank, where the order is `interleaved`
    sequence_parallel: bool = False  # with tp: the tokens between the layers are cut, too
    whole_gradients: bool = False  # with fsdp: they leave once a step, not once a microbatch
    # With tp: pieces of a collective travel beside the products that need them, as by Transformer Engine's user
    # buffers (Megatron's tp_comm_overlap). `cairn train` does not do it.
    tensor_overlap: bool = False

    def words(self) -> str:
        order = f", {self.order}" if self.layout.pp > 1 else ""
        whole = ", whole gradients" * self.whole_gradients
        return f"{self.layout.words()}, microbatch {self.microbatch}, recompute {self.recompute}{order}{whole}"


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step by part; they add up."""

    products: float
    attention: float
    between: float
    recompute: float
    tensor: float  # collectives of tp
    context: float
    expert: float
    stages: float  # activations and their gradients from one stage of pp to the next
    data: float  # collectives of dp and fsdp that are not hidden, and what hidden ones slow down
    uneven: float  # stages that wait for one which has more to do
    bubble: float
    update: float

    def total(self) -> float:
        return sum(getattr(self, name) for name in self.__struct_fields__)

    def table(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


def step_time(job: Job, choice: Choice, device: Device) -> StepTime:
    """Parts of an even share of the model, and what the others wait for the longest stage.

    That is one with a layer more, or the last, which has the head as well.
    """
    layers, pp = job.spec.layers, choice.layout.pp
    if pp == 1:
        return _stage_time(job, choice, device, layers, 1.0)
    chunks = choice.chunks if choice.order == "interleaved" else 1
    even = _stage_time(job, choice, device, layers / pp, 1 / pp)
    longest = max(
        _stage_time(job, choice, device, math.ceil(layers / pp), 0.0),
        _stage_time(job, choice, device, layers // (pp * chunks) * chunks, 1.0),
        key=StepTime.total,
    )
    uneven = (longest.total() - longest.bubble) - (even.total() - even.bubble)
    return msgspec.structs.replace(even, uneven=max(0.0, uneven), bubble=longest.bubble)


def _stage_time(job: Job, choice: Choice, device: Device, layers: float, head: float) -> StepTime:
    """Time of a stage by its layers and its share of the head."""
    layout, spec = choice.layout, job.spec
    microbatches = job.sequences // (layout.data_ranks() * choice.microbatch)
    tokens = job.sequence * choice.microbatch / layout.cp
    layer = layer_cost(
        spec, tokens, job.sequence, layout.tp, layout.ep, sequence_parallel=choice.sequence_parallel
    )
    end = head_cost(spec, tokens, layout.tp)
    rate = (FP8 * device.fp8_flops_per_s if job.fp8 else device.flops_per_s) * _narrow(spec, layout)
    products = _products(job, layer, layout, tokens, rate)
    forward = products * layers + head * end.products / (device.flops_per_s * _of_many(tokens))
    ahead, back = ATTENTION[job.kernels]
    attention = layer.attention * layers / device.flops_per_s * (1 / ahead + 2.5 / back)
    bytes_factor = UNFUSED if job.kernels == "plain" else 1.0
    between = (layer.between * layers + head * end.between) * bytes_factor / device.bytes_per_s
    again = layers * _recompute(layer, products, choice.recompute, device, bytes_factor)
    tensor, context, expert = _inside(job, choice, device, tokens, layers)
    if choice.tensor_overlap:
        tensor = _exposed(tensor, 3 * forward)
    transfers = _between_stages(job, choice, device, tokens)
    one = 3 * forward + attention + 3 * between
    stage = one + again + tensor + context + expert + transfers
    bubble_factor = _pipeline(choice, microbatches)
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
        stages=transfers * microbatches,
        data=_beside(job, choice, device, compute, microbatches),
        uneven=0.0,
        bubble=compute * (bubble_factor - 1),
        update=update,
    )


def _products(job: Job, layer: LayerCost, layout: Layout, tokens: float, rate: float) -> float:
    """Forward matmul time of a layer. A rank's experts get tokens of all expert-parallel ranks."""
    experts, rows = job.spec.experts, tokens
    if experts is not None:
        rows = tokens * experts.per_token * layout.ep / experts.count
    dense = layer.products - layer.routed
    return dense / (rate * _of_many(tokens)) + layer.routed / (rate * _of_many(rows))


def _narrow(spec: ModelSpec, layout: Layout) -> float:
    """Share of the matmul rate when tensor parallelism cuts the columns."""
    whole = spec.heads * spec.head_dim
    return (whole + NARROW) / (whole + NARROW * layout.tp)


def _of_many(rows: float) -> float:
    """Share of the large-matmul rate that a matmul with this number of rows reaches."""
    return rows / (rows + FEW)


def _recompute(
    layer: LayerCost, products: float, kind: Recompute, device: Device, factor: float
) -> float:
    """Computed again in backward: norms and activations are bytes only, a whole layer is a forward."""
    moved = layer.between * factor / device.bytes_per_s
    if kind == "full":
        return products + layer.attention / (device.flops_per_s * 0.85) + moved
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
        hop = wire(keys, layout.cp * layout.tp, device)
        context = 0.5 * layers * (passes + 1) * (layout.cp - 1) * hop
    expert = 0.0
    if layout.ep > 1 and spec.experts is not None:
        dispatched = int(stream * spec.experts.per_token)
        remote = int(dispatched * (layout.ep - 1) / layout.ep)
        expert = layers * 2 * passes * wire(remote, layout.ep * layout.cp * layout.tp, device)
    return tensor, context, expert


def _between_stages(job: Job, choice: Choice, device: Device, tokens: float) -> float:
    """Slowdown by the transfers of activations and gradients between stages, which overlap with computation."""
    layout = choice.layout
    if layout.pp == 1:
        return 0.0
    chunks = choice.chunks if choice.order == "interleaved" else 1
    size = tokens * job.spec.hidden * 2 / (layout.tp if choice.sequence_parallel else 1)
    return CONTENTION * 2 * chunks * wire(int(size), layout.world(), device)


def _beside(job: Job, choice: Choice, device: Device, compute: float, microbatches: int) -> float:
    """Gather weights twice and scatter gradients once a microbatch (fsdp), reduce gradients once a step (dp, ep).

    Whole gradients are scattered once a step.
    Hidden where compute lasts. Ranks of one fsdp group lie tp apart, those of dp a whole group.
    """
    layout, shard = choice.layout, part(job.spec, choice.layout)
    apart, cost = layout.tp, 0.0
    if shard.shards > 1:
        gather = collective("all_gather", shard.shards, 2 * shard.dense, device, apart)
        scatter = collective("reduce_scatter", shard.shards, 4 * shard.dense, device, apart)
        cost += (
            2 * microbatches * gather + (1 if choice.whole_gradients else microbatches) * scatter
        )
        apart *= shard.shards
    size = 4 * shard.dense // shard.shards
    cost += collective("all_reduce", shard.replicas, size, device, apart)
    if shard.experts:
        apart = layout.tp * layout.cp * layout.ep
        cost += collective("all_reduce", shard.expert_replicas, 4 * shard.experts, device, apart)
    return _exposed(cost, 0.9 * compute)


def _exposed(cost: float, compute: float) -> float:
    """Time that overlapped collectives add: they slow the computation down, and may outlast it."""
    hidden = min(cost, compute)
    return cost - hidden + CONTENTION * hidden


def _update(job: Job, layout: Layout, device: Device) -> float:
    """AdamW over what this rank updates."""
    return part(job.spec, layout).updated * UPDATE[job.states] / device.bytes_per_s


@lru_cache(maxsize=4096)
def _simulated(order: str, pp: int, microbatches: int, chunks: int | None) -> Timeline:
    return simulate(schedule(order, pp, microbatches, chunks), Costs())


def timeline(order: str, pp: int, microbatches: int, chunks: int = 2) -> Timeline:
    """The schedule, run on paper; `chunks` matters to `interleaved` alone."""
    return _simulated(order, pp, microbatches, chunks if order == "interleaved" else None)


def _pipeline(choice: Choice, microbatches: int) -> float:
    """Factor by which the pipeline bubble extends a step, from the schedule itself.

    Ranks idle while the pipeline fills and drains, so beyond twice the stages more microbatches add none.
    """
    pp = choice.layout.pp
    if pp == 1:
        return 1.0
    enough = min(microbatches, 2 * pp)
    idle = timeline(choice.order, pp, enough, choice.chunks).idle[0]
    busy = microbatches * sum(Costs().of(kind, 1) for kind in ("F", "I", "W"))
    return 1 + idle / busy


def stash(order: str, pp: int, microbatches: int, chunks: int = 2) -> float:
    """The most microbatches whose activations a stage keeps, in shares of its model."""
    return 1.0 if pp == 1 else max(timeline(order, pp, min(microbatches, 2 * pp), chunks).stash)


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
