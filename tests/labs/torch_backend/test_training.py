"""DDP, FSDP2, DTensor, the trainer's own layouts and distributed checkpoints over the backend, unmodified."""

import functools

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from torch import nn
from train.parallel.spread_training import alone, assert_same, one_rank, spec_of

import cairn.labs.torch_backend  # noqa: F401  registers it
from cairn.train.parallel.layout import Layout, Strategy

STEPS, EACH, WIDTH, CLASSES = 4, 6, 24, 5
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TIED = spec_of("tiny-qwen3", layers=4)
EXPERTS = spec_of("tiny-moe", layers=2)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def losses(wrapped: nn.Module, world: int, mine: slice) -> list[float]:
    """Plain gradient descent on this slice of each batch; the mean over everybody's loss."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        x = torch.randn(EACH * world, WIDTH, generator=draw)
        y = torch.randint(CLASSES, (EACH * world,), generator=draw)
        loss = nn.functional.cross_entropy(wrapped(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        found.append(float(mean))
    return found


def spread(rank, world, how):
    mine = slice(rank * EACH, (rank + 1) * EACH)
    if how == "ddp":
        return losses(
            nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.002), world, mine
        )
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    return losses(fully_shard(sharded), world, mine)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_as_in_one_process(world, how):
    wanted = losses(model(), world, slice(None))
    for found in run_ranks(world, spread, how, backend="cairn"):
        assert found == pytest.approx(wanted, abs=1e-5)


@functools.cache
def expected(spec, per_step):
    return alone(spec, 2, per_step)


@pytest.mark.parametrize(
    ("spec", "layout", "options", "per_step"),
    [
        pytest.param(TIED, Layout(tp=2), Strategy(sequence_parallel=True), 4, id="tp-sp"),
        pytest.param(TIED, Layout(pp=2), Strategy(order="zbv"), 4, id="pp"),
        pytest.param(TIED, Layout(cp=2), Strategy(), 4, id="ring-attention"),
        pytest.param(TIED, Layout(fsdp=3), Strategy(), 3, id="fsdp3"),
        pytest.param(TIED, Layout(dp=3), Strategy(zero=2), 3, id="zero2-3"),
        pytest.param(EXPERTS, Layout(dp=2, ep=2), Strategy(), 4, id="experts"),
        pytest.param(TIED, Layout(pp=2, tp=2), Strategy(), 4, id="pp-tp"),
        pytest.param(
            TIED, Layout(fsdp=2, tp=2), Strategy(sequence_parallel=True), 4, id="fsdp-tp-sp"
        ),
    ],
)
def test_the_trainers_layouts(spec, layout, options, per_step):
    arguments = (spec, layout, options, 2, per_step)
    traces = run_ranks(layout.world(), one_rank, *arguments, backend="cairn")
    assert_same(traces, expected(spec, per_step))


def functional(rank, world):
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import Shard, distribute_tensor

    x = torch.full((10,), float(rank + 1))
    assert functional.all_reduce(x, "sum", dist.group.WORLD)[0] == world * (world + 1) / 2
    gathered = functional.all_gather_tensor(torch.full((4,), float(rank)), 0, dist.group.WORLD)
    assert gathered.view(world, 4)[:, 0].tolist() == list(range(world))
    part = functional.reduce_scatter_tensor(torch.ones(4 * world), "avg", 0, dist.group.WORLD)
    assert part.tolist() == [1.0] * 4
    exchanged = functional.all_to_all_single(
        torch.arange(float(world)), None, None, dist.group.WORLD
    )
    assert (exchanged == rank).all()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(8, 4 * world, generator=generator),
        torch.randn(4 * world, 6, generator=generator),
    )
    product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    assert torch.allclose(product.full_tensor(), a @ b, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_functional_collectives_and_dtensor(world):
    run_ranks(world, functional, backend="cairn")


def checkpoint(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    saved = fully_shard(model())
    dcp.save({"model": saved.state_dict()}, checkpoint_id=folder)
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other = fully_shard(other)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    for name, value in state["model"].items():
        assert torch.equal(value.full_tensor(), saved.state_dict()[name].full_tensor()), name


def test_distributed_checkpoint(tmp_path):
    run_ranks(2, checkpoint, str(tmp_path / "checkpoint"), backend="cairn")
