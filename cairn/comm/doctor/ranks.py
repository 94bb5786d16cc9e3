"""Ranks as forked processes on this host, with a process group over gloo or over a backend written in Python.

    parent --fork--> rank 0 .. n-1        each sends one result; a rank that hangs or dies sends none

Ranks that send no result are killed before the call returns. `interfaces` and `enter` let a test place ranks on
hosts of their own (network namespaces), the only difference from a real cluster.

A torch.distributed backend in Python cannot write to torch's flight recorder, so its process groups carry a recorder of
their own in the attribute `flight`. `python_backend_dump` merges those recorders into one document in torch's format.
"""

import contextlib
import importlib
import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import HardwareError

RankFunction = Callable[[int, int], Any]
# Modules that register a backend of torch.distributed when they are imported, by the name of the backend.
BACKEND_MODULES = {"cairn": "cairn.labs.torch_backend"}
DUMP_VERSION = "2.10"  # of torch's format
JOIN_S = 30.0  # to find each other, on a loaded machine


class _NoAnswer:
    pass


NO_ANSWER = _NoAnswer()


def run_ranks(
    world: int,
    work: RankFunction,
    *,
    timeout_s: float = 60.0,
    interfaces: Sequence[str] | None = None,
    enter: Callable[[int], None] = lambda rank: None,
    backend: str = "gloo",
) -> list[Any]:
    """Run `work(rank, world)` on each rank and return the results; NO_ANSWER for a rank without one."""
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="cairn-doctor-") as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            name = interfaces[rank] if interfaces else "lo"
            about = (Path(folder) / "join", rank, world, work, name, enter, backend)
            process = context.Process(target=_child, args=(sender, *about), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _answers(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def import_backend(name: str) -> None:
    """Register a backend that is a Python module; gloo, NCCL and MPI come with torch."""
    if name in BACKEND_MODULES:
        importlib.import_module(BACKEND_MODULES[name])


def python_backend_dump(collectives: bool = True) -> dict[str, Any]:
    """The flight recorders of all groups of Python backends that this process belongs to, as one document."""
    import torch.distributed as dist

    groups = dist.distributed_c10d._world.pg_map
    recorders = [group.flight for group in list(groups) if hasattr(group, "flight")]
    return {
        "version": DUMP_VERSION,
        "pg_config": {one.name: one.config() for one in recorders},
        "pg_status": {one.name: one.status() for one in recorders},
        "entries": [entry for one in recorders for entry in one.entries()] if collectives else [],
    }


def flight_recording(backend: str = "gloo", stacks: bool = False) -> bytes:
    """This rank's dump, as torch writes it; to name the lines of the stacks takes seconds."""
    if backend in BACKEND_MODULES:
        return msgspec.json.encode(python_backend_dump())
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace", None) or getattr(c10d, "_dump_nccl_trace", None)
    if dump is None:
        raise HardwareError("this torch records no collectives", hint="use torch 2.9 or newer")
    return dump(includeCollectives=True, includeStackTraces=stacks, onlyActive=False)


def _child(
    sender: Connection,
    join: Path,
    rank: int,
    world: int,
    work: RankFunction,
    interface: str,
    enter: Callable[[int], None],
    backend: str,
) -> None:
    import torch.distributed as dist

    import_backend(backend)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    # A rank that is made to fail says so on stderr in many lines; the doctor says it in one.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    with contextlib.suppress(BaseException):
        enter(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{join}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=JOIN_S),
        )
        sender.send(work(rank, world))
        time.sleep(0.2)  # the others may still read from us
    os._exit(0)


def _answers(pipes: list[Connection], timeout_s: float) -> list[Any]:
    found: list[Any] = [NO_ANSWER] * len(pipes)
    left, deadline = set(range(len(pipes))), time.monotonic() + timeout_s
    while left:
        ready = wait([pipes[rank] for rank in left], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank in left if pipes[rank] in ready]:
            left.discard(rank)
            with contextlib.suppress(EOFError, OSError):
                found[rank] = pipes[rank].recv()
    return found


def default_interface(peer: str = "192.0.2.1") -> tuple[str, str]:
    """The interface and address from which this host would reach another; no packet is sent."""
    import psutil

    wanted = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    addresses = {
        one.address: name
        for name, all_ in psutil.net_if_addrs().items()
        for one in all_
        if one.family == socket.AF_INET
    }
    for address, name in addresses.items():
        if wanted and name.startswith(wanted.lstrip("=").split(",")[0]):
            return name, address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            udp.connect((peer, 9))
            address = udp.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    return addresses.get(address, "lo"), address
