"""Sums over the memory of several ranks, in the interpreter: buffers of one process stand for the ranks."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import itertools

import pytest
import torch

from cairn.comm.gpu.peer_sum import BLOCK, one_shot, part_of, peer_sum_reference, two_shot
from cairn.kernels.interpret import reachable

SIZES = [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def ranks_of(world: int, size: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each rank's memory: something else, the vector, the place of the result; and where they are."""
    memory = [torch.full((3 * size,), torch.nan, dtype=dtype) for _ in range(world)]
    for one in memory:
        one[size : 2 * size] = torch.randn(size).to(dtype)
    return memory, torch.tensor([one.data_ptr() for one in memory], dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_one_shot(world, size, dtype):
    memory, addresses = ranks_of(world, size, dtype)
    wanted = peer_sum_reference([one[size : 2 * size] for one in memory])
    out = torch.empty(size, dtype=dtype)
    with reachable(**{f"rank{r}": one for r, one in enumerate(memory)}):
        one_shot(addresses, out, offset=size)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_two_shot(world, size, dtype):
    """One rank after another: each writes its part to everybody, and nothing else."""
    memory, addresses = ranks_of(world, size, dtype)
    before = [one.clone() for one in memory]
    wanted = peer_sum_reference([one[size : 2 * size] for one in memory])
    with reachable(**{f"rank{r}": one for r, one in enumerate(memory)}):
        for rank in range(world):
            two_shot(addresses, wanted, rank, offset=size, result=2 * size)
    for one, old in zip(memory, before, strict=True):
        assert torch.equal(one[2 * size :], wanted)
        assert torch.equal(one[size : 2 * size], old[size : 2 * size])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 5 * BLOCK + 3])
def test_the_parts_are_the_whole(world, count):
    parts = [part_of(count, rank, world) for rank in range(world)]
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
