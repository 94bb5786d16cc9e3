"""Runs with recovery for tests: four small ranks on two nodes, and faults at exact steps."""

import os
import signal
import time
from pathlib import Path

import msgspec
import torch
from tiny_runs import TINY, recipe

from cairn.train.checkpoint.peer_restore import ask_holdings
from cairn.train.config import Checkpoint, Data, Schedule
from cairn.train.launch import run_local
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.journal import read_status
from cairn.train.recovery.launched_loop import LaunchedLoop
from cairn.train.recovery.local_driver import run_on_nodes
from cairn.train.recovery.settings import Recovery
from cairn.train.run import run

DATA = Data(sources=["random"], sequence=16, sequences=4, microbatch=1)
MODEL = msgspec.structs.replace(TINY, kv_heads=2)


def config(folder, steps=24, layout=Layout(dp=4), model=MODEL, every=0, **recovery):  # noqa: B008
    settings = dict(on=True, memory_every=5, checksum_every=5, same_place=1000, silent_s=2.0)
    return recipe(
        folder,
        steps=steps,
        parallel=layout,
        data=DATA,
        schedule=Schedule(kind="constant"),
        model=model,
        checkpoint=Checkpoint(every=every, export=False),
        recovery=Recovery(**(settings | recovery)),
    )


def unbroken(wanted):
    """The same layout without faults and without a driver."""
    run_local(
        wanted.parallel.world(),
        lambda rank, world: run(wanted, rank, log_line=lambda t: None).outcome,
    )


def recovered(wanted, fault=lambda loop: None, log_line=lambda text: None):
    """`fault(loop)` runs in every rank after every step, copies included."""
    step = LaunchedLoop._one_step

    def stepped(loop):
        step(loop)
        fault(loop)

    LaunchedLoop._one_step = stepped  # the ranks are forked from this process
    try:
        return run_on_nodes(wanted, log_line=log_line)
    finally:
        LaunchedLoop._one_step = step


def once(folder: Path, name: str) -> bool:
    """True for the first caller only, over all lives of a run."""
    try:
        os.close(os.open(folder / f".once-{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def kill_node(folder: Path, node: int) -> None:
    """Its memory and its ranks, as when the power goes."""
    status = read_status(folder)
    assert status is not None
    mine = os.getpid()
    pids = [status.memories[node], *(r.pid for r in status.ranks if r.node == node)]
    others = [pid for pid in pids if pid != mine]
    for pid in others:  # none may tell of another's end before its own
        os.kill(pid, signal.SIGSTOP)
    for pid in [*others, *([mine] if mine in pids else [])]:
        os.kill(pid, signal.SIGKILL)
    time.sleep(60)


def wait_for_copies(loop, step: int) -> None:
    """Until the memory of this rank's node has those of all ranks, which come while the next steps are computed."""
    reach, deadline = loop.assignment.reach, time.monotonic() + 20
    wanted = {(rank, step) for rank in range(loop.world)}
    while not wanted <= {
        (one.rank, one.step) for one in ask_holdings(reach.addresses[0], reach.secret)
    }:
        assert time.monotonic() < deadline, "the copies do not come"
        time.sleep(0.02)


def flip_bit(loop) -> None:
    """In one weight of this rank: the numbers stay finite, the replicas differ."""
    weight = next(iter(loop.state.parallel.parameters().values()))
    weight.detach().view(-1).view(torch.int32)[3] ^= 1 << 19


def logged(folder):
    return [(record.step, record.loss, record.norm, record.lr) for record in read_log(folder)]


def left_behind(folder: Path) -> list[int]:
    """Processes of a run that still live."""
    status = read_status(folder)
    assert status is not None
    pids = [*status.memories.values(), *(rank.pid for rank in status.ranks)]
    return [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]
