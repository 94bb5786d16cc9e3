"""A rank that plays the switch: the sum of the others, by the schedule that is proved."""

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks

import cairn.labs.torch_backend  # noqa: F401  registers it
from cairn.labs.torch_backend import CommError, GroupStopped, RankLost, RankMismatch


def sums(rank, world, aggregator):
    """Sizes that do and do not fill the slots, and none at all; more and fewer slots than chunks."""
    group = dist.group.WORLD
    for size, chunk_bytes, pool in (
        (0, 64, 2),
        (1, 64, 1),
        (1000, 256, 3),
        (33_333, 4096, 8),
        (40, 4096, 9),
    ):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            x = (torch.arange(size) % 5 + rank).to(dtype)
            workers = [r for r in range(world) if r != aggregator]
            wanted = sum((torch.arange(size) % 5 + r).to(dtype) for r in workers)
            before = x.clone()
            group.switch_all_reduce(x, aggregator, chunk_bytes, pool).wait()
            assert torch.equal(x, before if rank == aggregator else wanted)
    dist.barrier()  # and everything else still works
    return True


@pytest.mark.parametrize(("world", "aggregator"), [(2, 0), (4, 1), (4, 3)])
def test_the_sum_of_the_workers(world, aggregator):
    assert run_ranks(world, sums, aggregator, backend="cairn") == [True] * world


def wrong(rank, world):
    """What each rank hears: of a switch that is no rank, and of sizes that differ."""
    group, on_message = dist.new_group(backend="cairn"), []
    for aggregator, size in ((7, 10), (1, 10 + (rank == 2))):
        try:
            group.switch_all_reduce(torch.ones(size), aggregator).wait()
            dist.barrier(group)
            on_message.append("nothing")
        except CommError as error:
            on_message.append((type(error), str(error)))
    return on_message


def test_mistakes_are_heard_by_every_rank():
    for first, second in run_ranks(3, wrong):
        assert first[0] is CommError
        assert "rank 7 of 3 cannot be the aggregator" in first[1]
        assert second[0] in (RankMismatch, GroupStopped)
        assert "switch_all_reduce #1" in second[1]
        assert "rank 2" in second[1]


def goes(rank, world):
    group = dist.new_group(backend="cairn")
    if rank == 1:
        dist.destroy_process_group(group)
        return "left"
    try:
        group.switch_all_reduce(torch.ones(10), 1).wait()
    except (RankLost, GroupStopped) as error:
        return str(error)
    return "nothing"


def test_a_switch_that_leaves_is_named():
    for rank, said in enumerate(run_ranks(3, goes)):
        assert said == "left" if rank == 1 else "rank 1 has left the group" in said
