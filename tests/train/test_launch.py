"""Several processes on one machine, and what is reported when one of them fails."""

import contextlib
import multiprocessing
import os
import pty
import signal
import time
import traceback
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from tiny_runs import recipe

from cairn.core.errors import ConfigError, UsageError
from cairn.train import launch
from cairn.train.checkpoint import folder as folders
from cairn.train.config import Checkpoint, Data, Schedule
from cairn.train.launch import (
    PeerLost,
    RankFailed,
    from_environment,
    reporting_lost_peers,
    run_local,
)
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout
from cairn.train.run import run
from cairn.train.stop_signals import leave_terminal, tolerant


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


def test_ranks_that_would_share_a_gpu_are_refused():
    """With the CPU's process group; which GPU a rank has is asked of CUDA."""

    def join(rank, world):
        launch.refuse_shared_gpus(f"GPU {rank % 2} of here")
        return "joined"

    assert run_local(2, join) == "joined"
    with pytest.raises(ConfigError) as caught:
        run_local(3, join)
    assert caught.match(r"ranks 0, 2 would share one GPU \(GPU 0 of here\): 3 ranks have 2 GPUs")
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in caught.value.hint


@pytest.mark.parametrize("allowed", [False, True])
def test_gpus_are_compared_when_ranks_meet(monkeypatch, allowed):
    """`join_group` on a machine with one GPU, as far as torch says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H", uuid="u1")
    )
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, _start=dist.init_process_group, **options: _start("gloo", **options)
    )  # fmt: skip
    if allowed:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        assert run_local(2, lambda rank, world: world, "cuda") == 2
        return
    with pytest.raises(ConfigError, match="ranks 0, 1 would share one GPU"):
        run_local(2, lambda rank, world: world, "cuda")


def test_the_collective_that_failed_is_named():
    def mismatch(rank, world):
        if rank == 0:
            dist.all_reduce(torch.ones(2), op="no such operation")
        dist.all_reduce(torch.ones(2))

    with pytest.raises(RankFailed, match="last collective: all_reduce"):
        run_local(2, mismatch)


def test_a_run_is_done_however_long_rank_0_works_after_the_others(monkeypatch):
    """An export may take longer than the timeout of a collective; the others must not fail meanwhile."""
    monkeypatch.setattr(launch, "TIMEOUT", timedelta(seconds=2))

    def export(rank, world):
        dist.barrier()
        time.sleep(4 if rank == 0 else 0)
        return "exported"

    assert run_local(2, export) == "exported"


def test_a_lost_peer_is_no_bug_of_the_rank_that_lost_it():
    """Ranks of a launcher: the error of gloo on the rank that is left."""
    gloo = "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31. Check the other rank."
    match = r"rank 1 lost the connection .*: Connection closed by peer"
    with pytest.raises(PeerLost, match=match) as lost, reporting_lost_peers(1, "go on with it"):
        raise RuntimeError(gloo)
    assert lost.value.hint == "go on with it"
    with pytest.raises(RuntimeError, match="shapes differ"), reporting_lost_peers(1, ""):
        raise RuntimeError("shapes differ")


# -- a parent that is signalled ----------------------------------------------------------------------

ASKED = recipe(
    parallel=Layout(dp=2),
    data=Data(sources=["random"], sequence=16, sequences=4, microbatch=1),
    schedule=Schedule(kind="constant"),
    checkpoint=Checkpoint(every=0, export=False),
)


REACHED = "the first record"


def train_in_a_child(folder, steps=100_000, slow_s=0.02):
    """A parent with two ranks in a process group of its own, as a shell starts it; and its pid, once it trains."""
    config = msgspec.structs.replace(ASKED, out=folder, steps=steps)

    def on_record(record):
        (folder / REACHED).touch()
        time.sleep(slow_s)

    def one_rank(rank, world):
        return run(config, rank, lambda text: None, on_record if rank == 0 else lambda record: None)

    def parent():
        os.setpgid(0, 0)
        for number in (signal.SIGHUP, signal.SIGINT):  # ignored where the tests run under nohup
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        try:
            outcome = run_local(2, one_rank).outcome
            os._exit(10 if outcome.stopped_early else 0)
        except KeyboardInterrupt:
            os._exit(11)
        except BaseException:  # noqa: BLE001  shown below, by its exit status
            traceback.print_exc()
            os._exit(12)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    return process


def wait_for_steps(folder, count=5):
    deadline = time.monotonic() + 60
    while len(read_log(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def logged(folder):
    return [(record.step, record.loss, record.norm) for record in read_log(folder)]


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGHUP, True), (signal.SIGINT, True)],
    ids=["SIGTERM", "SIGTERM to all", "closed terminal", "Ctrl-C"],
)
def test_a_signal_to_the_parent_saves_and_resumes_exactly(tmp_path, number, group):
    process = train_in_a_child(tmp_path / "a")
    wait_for_steps(tmp_path / "a")
    (os.killpg if group else os.kill)(process.pid, number)
    process.join(90)
    assert process.exitcode == 10
    (step,) = folders.complete_steps(tmp_path / "a" / "checkpoints")
    assert step == read_log(tmp_path / "a")[-1].step >= 5
    if not group:
        train_in_a_child(tmp_path / "a", steps=step + 3, slow_s=0).join(60)
        train_in_a_child(tmp_path / "b", steps=step + 3, slow_s=0).join(60)
        assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """Before the step is over; two that come before the process has its turn are one."""
    process = train_in_a_child(tmp_path, slow_s=90.0)
    until = time.monotonic() + 60
    while not (tmp_path / REACHED).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    until = time.monotonic() + 60
    while process.is_alive() and time.monotonic() < until:
        os.kill(process.pid, signal.SIGINT)
        process.join(1)
    assert process.exitcode == 11


def test_output_to_a_closed_terminal_is_discarded():
    """What a run prints after its terminal has gone must not end it."""
    ours, terminal = pty.openpty()
    inside = os.fork()
    if not inside:
        os.dup2(terminal, 1)
        os.close(ours)
        os.close(terminal)
        with contextlib.suppress(OSError):
            while os.write(1, b"lost"):  # until the other side is closed
                time.sleep(0.01)
        leave_terminal()
        os._exit(0 if os.write(1, b"discarded") == 9 else 2)
    os.close(terminal)
    os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) == 0
    tolerant(lambda text: os.write(10_000, b""))("a reader that has gone")
