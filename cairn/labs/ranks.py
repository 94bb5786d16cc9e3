"""Runs a function on several ranks at once and brings back what each returned: the processes of a lab.

    parent --> clean process with torch --fork--> rank 0 .. n-1 --> [result of rank 0, .. of rank n-1]
       `--- first failure, or the time is up: the others are ended, and the rank's own error is raised, once

Every rank has one thread and a process group over loopback (gloo, or "cairn": this project's own backend). A process
that has computed with several threads, or on a GPU, cannot be forked: its children would wait for threads that they
do not have. So ranks are forks of a clean process, which imports torch once (two seconds, with the first call) and ends
with the parent. `function` is one of a module, not a lambda; it and its arguments can be pickled. No rank outlives the
call. Knows nothing about labs. A rank that breaks its group on purpose destroys it before it returns.
"""

import contextlib
import importlib
import io
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cairn.core.die_with_parent import die_with_parent
from cairn.core.errors import CairnError
from cairn.labs.planted_fault import Fault, plant_again, standing
from cairn.train.launch import LOST, Failure, failure_of

# What the clean process imports before it is forked.
BASE = ("torch", "cairn.labs.torch_backend", "cairn.labs.ranks")
TRAINER = ("torch._dynamo", "cairn.train.parallel.parallelize", "cairn.train.objective")
SAVER = ("cairn.train.checkpoint.save", "cairn.train.checkpoint.load")
NEEDED = {"cairn.labs.training": TRAINER, "cairn.labs.cluster": SAVER}
GRACE_S = 1.0  # after the first failure, for another rank that failed for a reason of its own


class RankFailed(CairnError):
    """What a rank raised, where it raised it; or how it died; or who said nothing in time."""

    exit_status = 1


def run_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """`function(rank, count, *arguments)` on every rank; the results in order of rank."""
    context = process_context(function)
    pipes: list[Connection] = []
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="cairn-ranks-") as folder:
        meeting = str(Path(folder) / "meeting")
        try:
            for rank in range(count):
                receiver, sender = context.Pipe(duplex=False)
                place = (sender, meeting, rank, count, backend, timeout_s)
                process = context.Process(
                    target=_rank, args=(*place, function, arguments, list(standing)), daemon=True
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
                    process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def process_context(function: Callable[..., Any]) -> Any:
    """Forks of this process where it never had a second thread of torch's; of a clean one otherwise."""
    import torch

    needed = NEEDED.get(function.__module__.rpartition(".")[0], ())
    if os.environ.get("OMP_NUM_THREADS") == "1" and not torch.cuda.is_available():
        for module in (*BASE, *needed):  # once here, instead of in every fork
            importlib.import_module(module)
        return multiprocessing.get_context("fork")
    return _clean_process(needed)


@contextlib.contextmanager
def ranks_prepared() -> Generator[None]:
    """The clean process imports what the ranks of any lab need, beside what is done in the block."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        yield
        return
    first = _clean_process(itertools.chain(*NEEDED.values())).Process(target=os.getpid)
    first.start()
    yield
    first.join()  # it is forked when all is imported


def _clean_process(needed: Iterable[str]) -> Any:
    clean = multiprocessing.get_context("forkserver")
    preloaded = getattr(forkserver._forkserver, "_preload_modules", ())
    modules = dict.fromkeys((*BASE, *preloaded, *needed))  # what it had before stays: labs go on
    if not set(modules) <= set(preloaded):
        _end_clean_process()
        clean.set_forkserver_preload([name for name in modules if name != "__main__"])
    return clean


def _end_clean_process() -> None:
    """So that the next one imports more; without this, each rank would import it for itself."""
    stop = getattr(forkserver._forkserver, "_stop", None)
    if stop is not None:
        stop()


def _rank(
    sender: Connection,
    meeting: str,
    rank: int,
    count: int,
    backend: str,
    timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    faults: list[Fault],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)  # the parent's pool of threads does not survive a fork
        if backend == "cairn":
            import cairn.labs.torch_backend  # noqa: F401  registers itself
        if faults:  # the clean process began without them, and so did what it knows as `function`
            plant_again(faults)
            function = getattr(importlib.import_module(function.__module__), function.__name__)

        dist.init_process_group(
            backend,
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(rank, count, *arguments)
        if dist.is_initialized():
            dist.barrier()  # no rank leaves while others still talk to it
        sender.send((True, _by_value(result)))
    except BaseException as error:  # noqa: BLE001  whatever it was, the parent tells it
        with contextlib.suppress(OSError):
            sender.send((False, failure_of(rank, error)))
    finally:
        sender.close()
        os._exit(0)  # without the threads and sockets of a library that does not like to end


def _by_value(result: Any) -> bytes:
    """Tensors as bytes: sent as they are, they would be handles to the memory of a dying process."""
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _collect(pipes: list[Connection], processes: list[Any], timeout_s: float) -> list[Any]:
    import torch

    results: dict[int, bytes] = {}
    failures: list[Failure] = []
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(pipes):
        on_message = results.keys() | {failure.rank for failure in failures}
        silent = [rank for rank in range(len(pipes)) if rank not in on_message]
        ready = wait([pipes[rank] for rank in silent], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank in silent if pipes[rank] in ready]:
            fine, value = _received(rank, pipes[rank], processes[rank])
            if fine:
                results[rank] = value
            else:
                failures.append(value)
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise _told(failures)
    if len(results) < len(pipes):
        silent = [rank for rank in range(len(pipes)) if rank not in results]
        raise RankFailed(
            f"ranks {silent} of {len(pipes)} did not end within {timeout_s:g} s",
            hint="a rank waits for another, or the machine is very busy",
        )
    return [torch.load(io.BytesIO(results[rank]), weights_only=False) for rank in range(len(pipes))]


def _received(rank: int, pipe: Connection, process: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        process.join(5)
        text = f"it died with exit status {process.exitcode}, without a word"
        return False, Failure(rank, "", time.time(), None, text, "unknown")


def _told(failures: list[Failure]) -> CairnError:
    """The one that failed first for a reason of its own, not because another was gone."""
    own = [one for one in failures if not LOST.search(one.traceback.rpartition("\n  File ")[2])]
    first = min(own or failures, key=lambda failure: failure.at)
    if first.error is not None:
        return first.error
    return RankFailed(f"rank {first.rank} failed:\n{first.traceback.rstrip()}")
