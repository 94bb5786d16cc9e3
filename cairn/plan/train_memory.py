"""Memory of one rank of a layout: `train.memory` counts a rank's part of the model, this file divides what is shared.

    tp, pp, ep   a part of the model (`rank_part`); with pp the activations of all microbatches in flight
    cp           tokens of one rank
    fsdp         weights, gradients, states and masters are cut; two layers and the ends are whole at a time. Rows of
                 several microbatches are added in float32, beside those that have just come

                     one microbatch     gradients 2 * parameters / shards
                     more               gradients 4 * parameters / shards + 2 * parameters / shards
                     more, kept whole   gradients 4 * parameters

    no fsdp      gradients are whole, and float32 where there are other ranks

Pure; bytes.
"""

from functools import lru_cache

from cairn.models.spec import ModelSpec
from cairn.plan.rank_part import Part, part, rank_spec
from cairn.plan.train_cost import Choice, Job, States, stash
from cairn.train.config import Data, Optim, Precision, Train
from cairn.train.memory import Memory, head_sum_bytes, layer_bytes, predict
from cairn.train.recompute_kinds import Recompute

GATHERED = 2  # layers whose weights are whole at a time: the one in use and the next
NCCL = 1 << 30  # buffers of communicators, and what the allocator cannot use


def rank_memory(job: Job, choice: Choice, trained: float = 1.0, head: bool = True) -> Memory:
    """`trained`: of a rank's weights, the share that gets gradients; frozen ones have no states either. `head`: the
    loss makes a gradient of the head.

    Activations are counted as if all were trained: fewer are kept where whole stages are frozen.
    """
    layout = choice.layout
    local, shard = rank_spec(job.spec, layout), part(job.spec, layout)
    microbatches = max(1, job.sequences // (layout.data_ranks() * choice.microbatch))
    config, single = _alone(
        local,
        max(1, job.sequence // layout.cp),
        choice.microbatch,
        microbatches > 1,
        choice.recompute,
        job.states,
    )
    in_flight = stash(choice.order, layout.pp, microbatches, choice.chunks)
    cut = layout.tp if choice.sequence_parallel else 1
    many = layout.world() > 1
    before, at_end = _gradients(shard, config, many, choice.whole_gradients)
    counted = (int(trained * before), int(trained * at_end))
    gradients, activations = _peak(local, config, counted, head, in_flight, cut)
    share = trained * 2 * shard.updated / single.weights  # of what a process alone would update
    return Memory(
        weights=int(2 * (shard.updated + _gathered(shard))),
        gradients=gradients,
        states=int(single.states * share),
        masters=int(single.masters * share),
        activations=activations,
        transient=single.transient,
        workspace=single.workspace + (NCCL if many else 0),
    )


@lru_cache(maxsize=65536)
def _alone(
    local: ModelSpec,
    sequence: int,
    microbatch: int,
    more: bool,
    recompute: Recompute,
    states: States,
) -> tuple[Train, Memory]:
    """A rank's share of a step as a recipe of its own, and the trainer's count of it.

    `more`: it has more than one microbatch. Many layouts have a rank's part in common.
    """
    masters = states != "bfloat16"  # such states go with weights that are rounded at random
    config = Train(
        precision=Precision(kind="bfloat16", recompute=recompute, masters=masters),
        data=Data(sequence=sequence, sequences=microbatch * (1 + more), microbatch=microbatch),
        optim=Optim(states=states),
    )
    return config, predict(local, config, fused=True)


def _gathered(shard: Part) -> int:
    """Parameters that are whole at a time although fsdp has cut them."""
    return min(shard.dense, GATHERED * shard.layer + shard.ends) if shard.shards > 1 else 0


def _peak(
    local: ModelSpec,
    config: Train,
    gradients: tuple[int, int],
    head: bool,
    in_flight: float,
    cut: int,
) -> tuple[int, int]:
    """Gradients and activations where they are most together: at the loss, or at the end of backward.

    `train.memory` has the same two peaks for one process; which is the higher changes once fsdp cuts gradients.
    `gradients`: at each. `cut`: ranks that share the two sums of the residual stream which each layer keeps.
    """
    tokens = config.data.sequence * config.data.microbatch
    everything, one = layer_bytes(local, config.precision, tokens, True)
    elsewhere = 2 * tokens * local.hidden * 2 * (cut - 1) // cut  # of one layer
    everything, one = everything - local.layers * elsewhere, one - elsewhere
    others = int((in_flight - 1) * everything)  # of microbatches that are still on their way
    before, at_end = gradients
    of_head = head_sum_bytes(local, 2, tokens, True) or 2 * local.vocab * local.hidden
    at_loss = before + of_head * head
    return max((at_loss, everything + others), (at_end, one + others), key=sum)


def _gradients(shard: Part, config: Train, many: bool, whole: bool) -> tuple[int, int]:
    """Gradient memory before the last backward of a step and at its end, as in `Replicas` and `Fsdp`.

    `many`: there are other ranks, and sums are float32.
    """
    more = config.microbatches > 1
    if shard.shards > 1:
        rows = shard.dense if whole and more else shard.dense // shard.shards
        before = 4 * (rows + shard.experts) if more else 0
        fresh = 2 * (shard.dense // shard.shards + shard.experts)
        return before, before + fresh + 2 * _gathered(shard)
    count = shard.dense + shard.experts
    wide = many or config.precision.masters
    if more:  # added to float32 sums, or in place
        return (4 if wide else 2) * count, (6 if wide else 2) * count
    leaves = shard.replicas > 1  # in buckets, each of which is float32 on its way
    return 0, (4 if leaves else 2) * count
