"""Several processes of one run on this machine, and the report of the one that failed first.

    parent --fork--> rank 0 .. rank n-1, joined over loopback
       |--- first failure: the others are ended; its rank, host, traceback and last collective are reported, once
       '--- SIGTERM, Ctrl-C, a closed terminal: forwarded, the ranks save and end, and the parent with them

A rank that dies takes the others down with it, each with an error of its own about a lost connection; the one that is
reported is the one that failed for another reason. On many machines a launcher such as torchrun starts the processes
instead; `from_environment` is for those. Knows nothing about training.
"""

import contextlib
import multiprocessing
import os
import pickle
import re
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from cairn.core.die_with_parent import die_with_parent
from cairn.core.errors import CairnError, ConfigError, UsageError
from cairn.train.stop_signals import forwarding, obey_parent

GRACE_S = 2.0  # after the first failure, for others that may know more
LEAVE_S = 5.0  # for a rank to leave its process group once all are done
TIMEOUT = timedelta(minutes=10)  # of a collective: a rank that says nothing for so long hangs
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # of the environment: NCCL takes several ranks on one GPU
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|timed out|Timed out|recvBytes")


class RankFailed(CairnError):
    """A process of the run has failed; the others were ended."""

    exit_status = 1


class PeerLost(CairnError):
    """Another rank has gone; this one only lost the connection to it."""

    exit_status = 1


class Failure(NamedTuple):
    rank: int
    host: str
    at: float
    error: CairnError | None  # a mistake of the user, which keeps its own message
    traceback: str
    collective: str  # the one it was in, if it was


def run_local(world: int, function: Callable[[int, int], Any], device: str = "cpu") -> Any:
    """`function(rank, world)` in `world` processes with a process group; the result of rank 0."""
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes: list[Any] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        forwarding(lambda: [one.pid for one in processes if one.exitcode is None]) as stopping,
    ):
        address = f"file://{Path(folder) / 'rendezvous'}"
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                arguments = (theirs, address, rank, world, function, device)
                process = context.Process(target=_child, args=arguments)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, processes, stopping)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def from_environment() -> tuple[int, int] | None:
    """Rank and world, where a launcher such as torchrun has started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    words = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        rank, world = map(int, words)
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise UsageError(
            f"RANK is {words[0]!r} and WORLD_SIZE {words[1]!r} in the environment",
            hint="a launcher sets both: a rank is from 0 to WORLD_SIZE - 1; alone, unset them",
        )
    return rank, world


def join_group(rank: int, world: int, address: str, device: str, hang_s: float = 0.0) -> None:
    """Creates the process group. A recovery that ends hung ranks after `hang_s` comes before torch's timeout,
    which does not name the rank."""
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", rank))
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=address,
        rank=rank,
        world_size=world,
        timeout=max(TIMEOUT, timedelta(seconds=2 * hang_s)),
    )
    if on_gpu and os.environ.get(SHARED_GPU) != "1":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        refuse_shared_gpus(f"{gpu.name} {getattr(gpu, 'uuid', '')} of {socket.gethostname()}")


def refuse_shared_gpus(own: str) -> None:
    """All ranks call this with the name of their GPU. NCCL would refuse two ranks on one, and not say what to do."""
    import torch.distributed as dist

    gpus: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gpus, own)
    ranks: dict[str, list[str]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu, []).append(str(rank))
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            raise ConfigError(
                f"ranks {', '.join(sharing)} would share one GPU ({gpu}): {len(gpus)} ranks have {len(ranks)} "
                f"GPU{'s' if len(ranks) > 1 else ''}",
                hint=f"use one rank for each GPU; NCCL 2.30 or later takes several with {SHARED_GPU}=1",
            )


@contextmanager
def reporting_lost_peers(rank: int, hint: str) -> Iterator[None]:
    """An error of torch about a lost connection becomes PeerLost, which is no bug of this process."""
    try:
        yield
    except RuntimeError as error:
        if not LOST.search(str(error)):
            raise
        inside = _collective(error)
        raise PeerLost(
            f"rank {rank} lost the connection to another rank (last collective: {inside}): {_short(error)}",
            hint=hint,
        ) from None


def _short(error: RuntimeError) -> str:
    """Gloo's text, without its own file and its advice."""
    text = str(error).splitlines()[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or text


def _child(
    pipe: Connection, address: str, rank: int, world: int, function: Any, device: str
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    obey_parent()
    die_with_parent()
    try:
        import torch
        import torch.distributed as dist

        if device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        join_group(rank, world, address, device)
        result = function(rank, world)
        pipe.send((True, result if rank == 0 else None))
        # Not a collective, which has a timeout: rank 0 may export a large model meanwhile.
        pipe.recv()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  the parent reports it
        with contextlib.suppress(BrokenPipeError):
            pipe.send((False, failure_of(rank, error)))
        os._exit(1)
    finally:
        pipe.close()


def failure_of(rank: int, error: BaseException) -> Failure:
    text = traceback.format_exc()
    own_error = error if isinstance(error, CairnError) else None
    return Failure(rank, socket.gethostname(), time.time(), own_error, text, _collective(error))


def _collective(error: BaseException) -> str:
    """The function of torch.distributed that was called last, from the outside."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if "distributed" in path and path.endswith(
            ("distributed_c10d.py", "_functional_collectives.py")
        ):
            name = frame.f_code.co_name
            if name not in ("wrapper", "func_wrapper"):
                return name
    return "none"


def _collect(pipes: list[Connection], processes: list[Any], stopping: threading.Event) -> Any:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline: float | None = None
    while len(results) + len(failures) < len(pipes):
        done = {f.rank for f in failures} | results.keys()
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in done]
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(left, timeout=patience)
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            fine, value = _received(rank, pipes[rank], processes[rank])
            if fine:
                results[rank] = value
            else:
                failures.append(value)
                deadline = deadline or time.monotonic() + GRACE_S
    if failures:
        if stopping.is_set() and all(f.error is None for f in failures):
            raise KeyboardInterrupt  # asked to stop before there was a step to save
        raise first_failure(failures)
    for pipe, process in zip(pipes, processes, strict=True):
        with contextlib.suppress(BrokenPipeError):
            pipe.send(None)  # all ranks are done: it may leave
        process.join(LEAVE_S)
    return results[0]


def _received(rank: int, pipe: Connection, process: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError, pickle.UnpicklingError):
        process.join(5)
        code = process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        text = f"the process ended with {how} and reported no error"
        return False, Failure(rank, socket.gethostname(), time.time(), None, text, "unknown")


def first_failure(failures: list[Failure]) -> CairnError:
    """The error of the rank that failed first for a reason of its own."""
    own = [f for f in failures if not LOST.search(f.traceback.rpartition("\n  File ")[2])]
    first = min(own or failures, key=lambda failure: failure.at)
    if first.error is not None:
        return first.error
    others = f"; {len(failures) - 1} others followed" if len(failures) > 1 else ""
    return RankFailed(
        f"rank {first.rank} on {first.host} failed (last collective: {first.collective}){others}\n"
        f"{first.traceback.rstrip()}",
        hint="run it again with the same --out: it goes on from the newest complete checkpoint",
    )
