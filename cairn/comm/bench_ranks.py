"""Runs a function on several ranks at once, here or in other network namespaces, and brings back what it returns.

    results = run_ranks(4, measure, spec, enter=rig.enter, on_message=print)

The ranks are forks, so torch is not imported again; where CUDA is used they are new interpreters instead. A rank that
fails ends the call with its own traceback, one that dies with its exit status; nothing outlives the call.
"""

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from cairn.core.errors import CairnError

Tell = Callable[[object], None]  # from a rank to its parent
Enter = Callable[[int], None]  # called by each rank first: goes to the rank's host


class BenchRankFailed(CairnError):
    """A rank raised an exception or its process died."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    enter: Enter | None = None,
    on_message: Callable[[int, object], None] = lambda rank, message: None,
    timeout_s: float = 600.0,
    start: Literal["fork", "spawn"] = "fork",
) -> list[Any]:
    """`function(rank, world, tell, *args)` on every rank; the results in order of rank."""
    context: Any = multiprocessing.get_context(start)
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(sender, rank, world, enter, function, args), daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        return _collect(pipes, processes, on_message, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    sender: Connection,
    rank: int,
    world: int,
    enter: Enter | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if enter is not None:
            enter(rank)
        result = function(rank, world, lambda message: sender.send(("message", message)), *args)
        sender.send(("done", result))
    except CairnError as error:
        sender.send(("refused", error))
    except BaseException:  # noqa: BLE001  whatever it was, the caller has to see it
        sender.send(("failed", traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # without the threads and sockets of a library that does not like to end


def _collect(
    pipes: list[Connection],
    processes: list[Any],
    on_message: Callable[[int, object], None],
    timeout_s: float,
) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        silent = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in silent], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BenchRankFailed(f"ranks {silent} did not end within {timeout_s:g} s")
        for rank in silent:
            if pipes[rank] not in ready:
                continue
            kind, value = _receive(rank, pipes[rank], processes[rank])
            match kind:
                case "message":
                    on_message(rank, value)
                case "done":
                    results[rank] = value
                case "refused":
                    raise value
                case _:
                    raise BenchRankFailed(f"rank {rank} failed:\n{value}")
    return [results[rank] for rank in range(len(pipes))]


def _receive(rank: int, pipe: Connection, process: Any) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        process.join(5)
        raise BenchRankFailed(f"rank {rank} died with exit status {process.exitcode}") from None
