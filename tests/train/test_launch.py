"""Several processes on one machine, and what is told when one of them fails."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from cairn.core.errors import ConfigError, UsageError
from cairn.train.launch import RankFailed, from_environment, run_local


def test_a_launcher_says_who_one_is(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert from_environment() is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert from_environment() == (1, 2)
    for rank, world in (("x", "2"), ("2", "2"), ("-1", "2"), ("0", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(UsageError, match=f"RANK is {rank!r}"):
            from_environment()


def test_ranks_work_together():
    def add(rank, world):
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return total.item(), world

    assert run_local(3, add) == (3.0, 3)


def test_the_first_failure_is_told_once_and_the_others_are_ended():
    def fail(rank, world):
        if rank == 1:
            raise ArithmeticError("this is what went wrong")
        dist.all_reduce(torch.ones(1))

    began = time.monotonic()
    with pytest.raises(RankFailed) as error:
        run_local(3, fail)
    assert "rank 1 on" in error.value.message
    assert error.value.message.endswith("ArithmeticError: this is what went wrong")
    assert error.value.message.count("Traceback") == 1
    assert time.monotonic() - began < 60


def test_a_killed_rank_is_blamed_and_not_those_who_lost_it():
    def die(rank, world):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailed, match=r"rank 2 on .*\n.*signal 9"):
        run_local(3, die)


def test_a_mistake_of_the_user_stays_one():
    def refuse(rank, world):
        raise ConfigError("wrong", hint="right")

    with pytest.raises(ConfigError, match="wrong"):
        run_local(2, refuse)


def test_the_collective_that_failed_is_named():
    def mismatch(rank, world):
        if rank == 0:
            dist.all_reduce(torch.ones(2), op="no such operation")
        dist.all_reduce(torch.ones(2))

    with pytest.raises(RankFailed, match="last collective: all_reduce"):
        run_local(2, mismatch)
