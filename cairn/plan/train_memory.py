"""What one rank of a layout holds: `train.memory` counts a rank's part of the model, this divides what is shared.

    tp     heads, feed-forward and vocabulary of one rank
    pp     layers of one stage, and activations of the microbatches in flight
    cp     tokens of one rank
    ep     experts of one rank
    fsdp   weights, gradients, states and masters; two layers are whole at a time, with pp a whole stage
    zero   states and masters over dp

Pure; bytes.
"""

import msgspec

from cairn.models.spec import ModelSpec
from cairn.plan.layer_cost import layer_cost
from cairn.plan.train_cost import Choice, Job, stage_parameters, stash
from cairn.train.config import Data, Precision, Train
from cairn.train.memory import Memory, layer_bytes, predict
from cairn.train.parallel.layout import Layout

GATHERED = 2  # layers whose weights are whole at a time: the one in use and the next
NCCL = 1 << 30  # buffers of communicators, and what the allocator cannot use


def rank_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The model as one rank has it: a stage of the pipeline has the embedding or the head, not both."""
    tp, changes = layout.tp, {}
    if spec.experts is not None and layout.ep > 1:
        experts = spec.experts
        count = max(1, experts.count // layout.ep)
        changes["experts"] = msgspec.structs.replace(experts, count=max(count, experts.per_token))
    return msgspec.structs.replace(
        spec, layers=max(1, -(-spec.layers // layout.pp)), heads=spec.heads // tp,
        kv_heads=max(1, spec.kv_heads // tp), intermediate=max(1, spec.intermediate // tp),
        vocab=-(-spec.vocab // tp), tied=spec.tied or layout.pp > 1,
        windows=spec.windows[: -(-spec.layers // layout.pp)], **changes,
    )  # fmt: skip


def rank_memory(job: Job, choice: Choice) -> Memory:
    layout = choice.layout
    local = rank_spec(job.spec, layout)
    precision = Precision(kind="bfloat16", recompute=choice.recompute)
    microbatches = max(1, job.sequences // (layout.data_ranks() * choice.microbatch))
    tokens = max(1, job.sequence // layout.cp)
    config = Train(
        precision=precision,
        data=Data(
            sequence=tokens,
            sequences=choice.microbatch * microbatches,
            microbatch=choice.microbatch,
        ),
    )
    alone = predict(local, config, fused=True)
    gradients, activations = _summit(
        local, config, stash(choice.order, layout.pp, microbatches), layout.fsdp
    )
    gathered, summed = _whole(job, layout)
    return Memory(
        weights=alone.weights // layout.fsdp + gathered,
        gradients=gradients + summed,
        states=alone.states // layout.fsdp,
        masters=alone.masters // layout.fsdp,
        activations=activations,
        transient=alone.transient,
        workspace=alone.workspace + (NCCL if layout.world() > 1 else 0),
    )


def _summit(local: ModelSpec, config: Train, in_flight: float, cut: int) -> tuple[int, int]:
    """Gradients and activations where they are most together: at the loss, or at the end of backward.

    `train.memory` has the same two summits for one process; which is the higher changes once fsdp cuts gradients.
    """
    count, more = local.parameters(), config.microbatches > 1
    before = 4 * count if more else 0  # sums of earlier microbatches, in float32
    head = 2 * local.vocab * local.hidden
    everything, one = layer_bytes(
        local, config.precision, config.data.sequence * config.data.microbatch, True
    )
    others = int((in_flight - 1) * everything)  # of microbatches that are still on their way
    at_loss = ((before + head) // cut, everything + others)
    at_end = ((before + 2 * count) // cut, one + others)
    return max(at_loss, at_end, key=sum)


def _whole(job: Job, layout: Layout) -> tuple[int, int]:
    """Bytes of weights and gradients that fsdp has not cut: two layers, or with pp a stage, for a whole step."""
    if layout.fsdp == 1:
        return 0, 0
    if layout.pp > 1:
        stage = int(stage_parameters(job.spec, layout))
        return 2 * stage, 4 * stage
    layers = int(layer_cost(job.spec, 1, 1, layout.tp, layout.ep).weights) * GATHERED
    return 2 * layers, 2 * layers
