"""Processes of a lab: results by rank, one rank's error whole and once, nothing that outlives the call."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from cairn.core.errors import ConfigError
from cairn.labs.ranks import RankFailed, run_ranks


def summed(rank, count, start):
    vector = torch.full((3,), float(start + rank))
    dist.all_reduce(vector)
    return rank, count, torch.get_num_threads(), vector


def raises(rank, count):
    if rank == 1:
        raise ValueError("the data of rank 1 is odd")
    dist.barrier()  # the others only lose a connection


def refuses(rank, count):
    raise ConfigError(f"rank {rank} has no batch", hint="give it one")


def dies(rank, count):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def sleeps(rank, count):
    time.sleep(60 * rank)


def test_results_come_in_order_of_rank():
    for rank, (mine, count, threads, vector) in enumerate(run_ranks(3, summed, 10)):
        assert (mine, count, threads) == (rank, 3, 1)
        assert vector.tolist() == [33.0] * 3


def test_the_projects_own_backend_serves_as_well():
    assert [result[3][0].item() for result in run_ranks(2, summed, 1, backend="cairn")] == [3.0] * 2


def test_the_first_error_is_told_whole_and_not_what_followed():
    with pytest.raises(RankFailed, match="rank 1 failed") as told:
        run_ranks(3, raises)
    assert "the data of rank 1 is odd" in str(told.value)
    assert "in raises" in str(told.value)


def test_a_mistake_of_the_user_keeps_its_words():
    with pytest.raises(ConfigError, match="has no batch") as told:
        run_ranks(2, refuses)
    assert told.value.hint == "give it one"


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailed, match="exit status 7"):
        run_ranks(2, dies)


def test_time_is_up_and_nothing_is_left():
    run_ranks(2, summed, 0)  # where ranks are forks of a clean process, that one stays
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(RankFailed, match=r"ranks \[.*1\] of 2 did not end within 1.5 s"):
        run_ranks(2, sleeps, timeout_s=1.5)
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


SEVERAL_THREADS = """
import torch; torch.set_num_threads(2); torch.randn(1 << 20).exp().sum()
from cairn.cluster import reliability
from cairn.labs.planted_fault import find_mutant, planted
from cairn.labs.ranks import run_ranks
place, line = "cairn/cluster/reliability.py:young", "return math.sqrt(2 * write * mean)"
print(run_ranks(2, max), run_ranks(2, reliability.young))
with planted(place, find_mutant(place, line, "returned twice as large").number):
    print(run_ranks(2, reliability.young))
print(run_ranks(2, reliability.young, timeout_s=30.0))
"""


def test_a_process_that_has_used_several_threads_can_start_ranks():
    """A plain fork of it would hang in its first parallel operation; a planted fault reaches those ranks, too."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_THREADS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    sound = "[0.0, 2.0]"
    assert done.stdout.splitlines() == [f"[2, 2] {sound}", "[0.0, 4.0]", sound], done.stderr
