"""Blocks of zeros stay at home: the sums are the dense ones, the choice is by density, DDP trains the same."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import require
from cairn.core.errors import ConfigError
from cairn.labs.torch_backend import SparseState, sparse_hook
from cairn.labs.torch_backend.sparse import ASK_EVERY, share_of_dense

BLOCK = 8


@given(st.integers(2, 5), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
@example(2, 37, 0.046875, 37)  # an owner does not receive what it has
def test_its_bytes_are_those_of_the_proved_schedule(ranks, rounds, density, seed):
    """The share counts blocks as the schedule sends them; the proof counts the same from its operations."""
    blocks = ranks * rounds
    present = np.random.default_rng(seed).random((ranks, blocks)) < density
    proof = require(make("all_reduce", "sparse", ranks, present=present))
    dense = 2 * (ranks - 1) / ranks
    # The proof adds up each direction over both halves; the share takes the busier one of each half.
    assert share_of_dense(present) * dense >= proof.traffic - 1e-9
    assert share_of_dense(present) * dense <= 2 * proof.traffic + 1e-9


def test_one_rank_alone_sends_nothing_either_way():
    assert share_of_dense(np.ones((1, 4), bool)) == 1.0


def blocks_of(rank, count, density, seed):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randint(-5, 6, (count, BLOCK), generator=generator).float()
    x[torch.rand(count, generator=generator) >= density] = 0
    return x.view(-1)


def sums(rank, world, extra):
    chosen = []
    for seed, density in enumerate((0.0, 0.02, 0.3, 1.0)):
        x = torch.cat([blocks_of(rank, 300, density, seed), torch.full((extra,), float(rank))])
        wanted = x.clone()
        dist.all_reduce(wanted)
        dist.group.WORLD.sparse_all_reduce(x, BLOCK, 0.6, chosen.append).wait()
        assert torch.equal(x, wanted)
    small = torch.full((3,), float(rank))
    dist.group.WORLD.sparse_all_reduce(small, BLOCK, 0.6, chosen.append).wait()
    assert (small == world * (world - 1) / 2).all()
    return chosen


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_sums_are_the_dense_ones(world):
    shares = run_ranks(world, sums, world - 1, backend="cairn")
    assert all(one == shares[0] for one in shares)
    assert shares[0][0] == 0
    assert shares[0][1] < 0.1
    assert shares[0][3] >= 1.0


class Words(nn.Module):
    """A large table of which each step touches a few rows."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, BLOCK)
        self.out = nn.Linear(BLOCK, 3)

    def forward(self, x):
        return self.out(self.table(x).mean(1))


def train(model, slices, steps):
    optimizer, draw, found = (
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.Generator().manual_seed(3),
        [],
    )
    for _ in range(steps):
        x, y = (
            torch.randint(high, shape, generator=draw)
            for high, shape in ((2000, (12, 4)), (3, (12,)))
        )
        loss = nn.functional.cross_entropy(model(x[slices]), y[slices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def ddp(rank, world, with_hook):
    model = nn.parallel.DistributedDataParallel(Words(2000), bucket_cap_mb=1)
    state = SparseState(block=BLOCK)
    if with_hook:
        model.register_comm_hook(state, sparse_hook)
    each = 12 // world
    losses = train(model, slice(rank * each, (rank + 1) * each), 6)
    mean = torch.stack(losses)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.tolist(), state.sparse, state.share


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_with_a_table_of_words(world):
    wanted = [float(loss) for loss in train(Words(2000), slice(None), 6)]
    for losses, sparse, share in run_ranks(world, ddp, True, backend="cairn"):
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert sparse >= 6
        assert share < 0.1


def dense_ddp(rank, world):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    state = SparseState(block=BLOCK)
    model.register_comm_hook(state, sparse_hook)
    for _ in range(ASK_EVERY + 2):
        model(torch.randn(4, 64)).sum().backward()
    return state.dense, state.sparse, dict(state.skip)


def test_a_dense_gradient_is_asked_about_now_and_then():
    for dense, sparse, skip in run_ranks(2, dense_ddp, backend="cairn"):
        assert (dense, sparse) == (ASK_EVERY + 2, 0)
        assert skip == {0: ASK_EVERY - 2}


def on_gloo(rank, world):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(SparseState(), sparse_hook)
    try:
        model(torch.randn(4, 4)).sum().backward()
    except (ConfigError, RuntimeError) as error:
        return str(error)


def test_other_backends_are_refused_by_name():
    for text in run_ranks(2, on_gloo):
        assert "backend 'gloo'" in text
