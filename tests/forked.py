"""Runs a function on several ranks at once, by fork: torch is imported already, so a test costs 0.1-0.5 s.

    results = run_ranks(2, train_step, model_spec)

Each rank has its own process, one thread and a group over loopback: gloo, or the one that `backend` names. An exception
on any rank reaches the test with the rank's own traceback, once; the other ranks are killed. Nothing outlives the call.
"""

import io
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """What a rank raised, where it raised it."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    backend: str = "gloo",
) -> list[Any]:
    """`function(rank, world, *args)` on every rank; the results in order of rank."""
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            "start Python with OMP_NUM_THREADS=1: a thread pool does not survive a fork"
        )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank,
                args=(sender, rendezvous, rank, world, backend, function, args),
                daemon=True,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    sender: Connection,
    rendezvous: Path,
    rank: int,
    world: int,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world
        )
        result = function(rank, world, *args)
        dist.barrier()  # nobody leaves while others still talk to it
        sender.send((True, _by_value(result)))
    except BaseException:  # noqa: BLE001  whatever it was, the test has to see it
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()


def _collect(pipes: list[Connection], processes: list[Any], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankFailed(f"ranks {silent} said nothing for {timeout_s} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            results[rank] = _receive(rank, pipes[rank], processes[rank])
    return [results[rank] for rank in range(len(pipes))]


def _receive(rank: int, pipe: Connection, process: Any) -> Any:
    try:
        fine, payload = pipe.recv()
    except EOFError:
        process.join(5)
        raise RankFailed(f"rank {rank} died with exit code {process.exitcode}") from None
    if not fine:
        raise RankFailed(f"rank {rank} failed:\n{payload}")
    return torch.load(io.BytesIO(payload), weights_only=False)


def _by_value(result: Any) -> bytes:
    """Tensors as bytes: sent as they are, they would be handles to the memory of a dying process."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()
