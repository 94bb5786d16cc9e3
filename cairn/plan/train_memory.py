"""What one rank of a layout holds: `train.memory` counts a rank's part of the model, this divides what is shared.

    tp, pp, ep   a part of the model (`rank_part`); with pp the activations of all microbatches in flight
    cp           tokens of one rank
    fsdp         weights, states and masters are cut; two layers and the ends are whole at a time. Gradients are cut
                 as well if a step has one microbatch: they leave in the last backward, and until then they are whole

                     one microbatch     gradients 2 * parameters / shards
                     more               gradients 4 * parameters, in float32

Pure; bytes.
"""

from functools import lru_cache

from cairn.models.spec import ModelSpec
from cairn.plan.rank_part import Part, part, rank_spec
from cairn.plan.train_cost import Choice, Job, States, stash
from cairn.train.config import Data, Optim, Precision, Train
from cairn.train.memory import Memory, layer_bytes, predict
from cairn.train.recompute_kinds import Recompute

GATHERED = 2  # layers whose weights are whole at a time: the one in use and the next
NCCL = 1 << 30  # buffers of communicators, and what the allocator cannot use


def rank_memory(job: Job, choice: Choice) -> Memory:
    layout = choice.layout
    local, held = rank_spec(job.spec, layout), part(job.spec, layout)
    microbatches = max(1, job.sequences // (layout.data_ranks() * choice.microbatch))
    config, alone = _alone(
        local, max(1, job.sequence // layout.cp), choice.microbatch, microbatches > 1, choice.recompute, job.states
    )  # fmt: skip
    in_flight = stash(choice.order, layout.pp, microbatches, choice.chunks)
    cut = layout.tp if choice.sequence_parallel else 1
    gradients, activations = _summit(local, held, config, in_flight, cut)
    share = 2 * held.updated / alone.weights  # of what a process on its own would update
    return Memory(
        weights=int(2 * (held.updated + _gathered(held))),
        gradients=gradients,
        states=int(alone.states * share),
        masters=int(alone.masters * share),
        activations=activations,
        transient=alone.transient,
        workspace=alone.workspace + (NCCL if layout.world() > 1 else 0),
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


def _gathered(held: Part) -> int:
    """Parameters that are whole at a time although fsdp has cut them."""
    return min(held.dense, GATHERED * held.layer + held.ends) if held.shards > 1 else 0


def _summit(
    local: ModelSpec, held: Part, config: Train, in_flight: float, cut: int
) -> tuple[int, int]:
    """Gradients and activations where they are most together: at the loss, or at the end of backward.

    `train.memory` has the same two summits for one process; which is the higher changes once fsdp cuts gradients.
    `cut`: ranks that share the two sums of the residual stream which each layer keeps.
    """
    tokens = config.data.sequence * config.data.microbatch
    everything, one = layer_bytes(local, config.precision, tokens, True)
    elsewhere = 2 * tokens * local.hidden * 2 * (cut - 1) // cut  # of one layer
    everything, one = everything - local.layers * elsewhere, one - elsewhere
    others = int((in_flight - 1) * everything)  # of microbatches that are still on their way
    if config.microbatches > 1:  # sums of earlier microbatches, and what is being added to them
        wide = config.precision.masters or held.shards > 1
        before = (4 if wide else 2) * (held.dense + held.experts)
        fresh = 2 * ((_gathered(held) if held.shards > 1 else held.dense) + held.experts)
        at_loss, at_end = before + 2 * local.vocab * local.hidden, before + wide * fresh
    else:
        at_loss = 2 * local.vocab * local.hidden
        at_end = 2 * int(held.updated) + 2 * _gathered(held)
    return max((at_loss, everything + others), (at_end, one + others), key=sum)
