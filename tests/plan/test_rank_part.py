"""What the planner says a rank holds is what a rank of the trainer holds."""

import msgspec
import pytest
import torch._dynamo  # noqa: F401  fully_shard imports it: once here, rather than in every rank
from forked import run_ranks

from cairn.models.presets import preset
from cairn.plan.rank_part import part
from cairn.train.parallel.layout import Layout
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize

EXPERTS = msgspec.structs.replace(preset("tiny-moe"), layers=2)
CONVOLUTIONS = msgspec.structs.replace(
    preset("lfm2-1.2b"), hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=80
)
DENSE = msgspec.structs.replace(preset("tiny-llama"), layers=4)


def updated(rank: int, world: int, spec, layout: Layout) -> int:
    """Parameters that this rank updates."""
    found = parallelize(spec, Mesh.join(layout)).parameters()
    return sum(parameter.numel() for parameter in found.values())


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        pytest.param(EXPERTS, Layout(dp=2, fsdp=2, ep=2), id="experts are not cut by fsdp"),
        pytest.param(DENSE, Layout(fsdp=2, cp=2), id="fsdp cuts over cp as well"),
        pytest.param(DENSE, Layout(pp=2, tp=2), id="stages and heads"),
        pytest.param(preset("tiny-qwen3-next"), Layout(tp=2), id="heads of delta nets"),
        pytest.param(CONVOLUTIONS, Layout(tp=2), id="columns of convolutions"),
    ],
)
def test_a_rank_holds_what_the_planner_says(spec, layout):
    most = max(run_ranks(layout.world(), updated, spec, layout))
    assert part(spec, layout).updated == pytest.approx(most, rel=0.05)
