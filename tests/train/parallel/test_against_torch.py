"""The executor against torch.distributed.pipelining's: the same stages, the same gradients."""

import pytest
import torch
import torch.nn.functional as F
from forked import run_ranks
from spread_training import SEED, spec_of
from torch import nn

from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.weights import fill_random
from cairn.train.data.batch import make_batch
from cairn.train.objective import Objective
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import build_stages, parallelize

SPEC = spec_of("tiny-llama", layers=4)
MICROBATCHES, TOKENS, LENGTHS = 4, 12, [7, 5]
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def microbatches():
    tokens = torch.randint(
        SPEC.vocab, (MICROBATCHES, TOKENS + 1), generator=torch.Generator().manual_seed(3)
    )
    return [make_batch(row[:-1], row[1:], LENGTHS, [i]) for i, row in enumerate(tokens)]


class Adapter(nn.Module):
    """One of our stages as torch's pipeline wants it: one tensor in, one tensor out."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        attend = PackedDocuments(LENGTHS)
        out = self.stage(x, attend.positions_T(), attend)
        return self.stage.vocabulary().logits(out) if self.stage.share.last else out


def by_torch(mesh, options, theirs):
    from torch.distributed.pipelining import PipelineStage, schedules

    held = build_stages(SPEC, ModelBuild("meta"), mesh, options)
    for stage in held:
        fill_random(stage, stage.slots(), "cpu", SEED)
    parts = [
        PipelineStage(
            Adapter(s), s.share.stage, s.share.stages, torch.device("cpu"), group=mesh.group("pp")
        )
        for s in held
    ]
    total = MICROBATCHES * TOKENS

    def loss(logits, targets):
        return F.cross_entropy(logits, targets, reduction="sum") / total

    kind = getattr(schedules, theirs)
    plan = kind(
        parts[0] if theirs == "Schedule1F1B" else parts, MICROBATCHES, loss, scale_grads=False
    )
    every = microbatches()
    first = [torch.cat([b.tokens_T for b in every])] if mesh.rank("pp") == 0 else []
    targets = torch.cat([b.targets_T for b in every])
    last = any(stage.share.last for stage in held)
    plan.step(*first, **({"target": targets} if last else {}))
    return {name: p.grad for stage in held for name, p in stage.named_parameters()}


def compare(rank, world, order):
    mesh = Mesh.join(Layout(pp=world))
    options = Strategy(order=order)
    expected = by_torch(mesh, options, SCHEDULES[order])
    mine = parallelize(SPEC, mesh, options, seed=SEED)
    mine.forward_backward(
        microbatches(), Objective(SPEC), torch.tensor(float(MICROBATCHES * TOKENS))
    )
    assert mine.gradients().keys() == expected.keys()
    return max(float((g - expected[name]).abs().max()) for name, g in mine.gradients().items())


@pytest.mark.parametrize("order", SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_gradients_are_torch_s(order):
    assert max(run_ranks(2, compare, order)) < 1e-6
