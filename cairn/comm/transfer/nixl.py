"""Bytes through NIXL: RDMA and GPUDirect where the hardware has them, shared memory or TCP where it does not.

    ours                                    theirs
    agent, regions registered               agent, regions registered
    hello: the agent's meta data and the regions' addresses, both ways, over our own socket
    read / write -> descriptors -> UCX      the owner does nothing

NIXL's agent is used from one thread, which posts, polls and releases. Notes, signs of life and lost peers come
through our socket, as with the other transports. An optional package: `pip install nixl` (tested: 1.5.1). `import`
of this module does not need it.
"""

import contextlib
import importlib
import importlib.util
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns, Offsets
from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.mover import PATIENCE, End, Patience, TransferPeer
from cairn.comm.transfer.transport import MemoryRegion
from cairn.comm.transfer.wire import ConnectionGone, Frame
from cairn.core.shared_secret import Secret

# Each works alone; where both are installed, `nixl` picks one by the CUDA it finds, and imports torch to find it.
BUILDS = ("nixl_cu13", "nixl_cu12")
PLUGIN = "UCX"
SPINS = 50  # polls before the thread sleeps between them
NAP_S = 50e-6


class NixlMetadata(msgspec.Struct, frozen=True, array_like=True):
    """NIXL metadata that a peer needs to access the registered memory."""

    agent: bytes
    regions: dict[str, tuple[int, int]]  # address and device


class NixlTransfer(NamedTuple):
    peer: TransferPeer
    ticket: int
    handle: Any


def why_not() -> str | None:
    """Why NIXL cannot be used here, or None. Imports nothing."""
    return None if _builds() else "NIXL is not installed (pip install nixl)"


def _builds() -> list[str]:
    return [build for build in BUILDS if importlib.util.find_spec(build)]


class NixlMover:
    kind = "nixl"
    family = socket.AF_INET

    def __init__(self, name: str) -> None:
        self._name = name
        self._agents: dict[
            TransferPeer, tuple[str, NixlMetadata]
        ] = {}  # its agent's name, and its regions
        self._under_way: list[NixlTransfer] = []
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True, name="transfer-nixl")

    def allocate(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def open(self, end: End) -> bytes:
        self._end, self._api = end, load_api()
        try:
            self._start(end)
        except Exception as error:  # noqa: BLE001  NIXL has its own family of errors
            raise TransferError(
                f"NIXL does not start: {type(error).__name__}: {error}",
                hint="check UCX_TLS and UCX_NET_DEVICES, or use tcp or shm",
            ) from None
        self._worker.start()
        places = {one.name: (one.address, one.device) for one in end.regions.values()}
        return msgspec.msgpack.encode(NixlMetadata(self._agent.get_agent_metadata(), places))

    def _start(self, end: End) -> None:
        config = self._api.nixl_agent_config(backends=[PLUGIN])
        self._agent = self._api.nixl_agent(f"{self._name}-{os.getpid()}", config)
        if PLUGIN not in self._agent.backends:
            raise TransferError(f"it has no plugin {PLUGIN}")
        self._registered = [
            self._agent.register_memory(
                [(region.address, region.nbytes, max(0, region.device), "")], memory_kind(region)
            )
            for region in end.regions.values()
            if region.nbytes
        ]

    def greet(self, connection: socket.socket) -> None:
        pass

    def admit(self, peer: TransferPeer, about: bytes, connection: socket.socket) -> None:
        theirs = msgspec.msgpack.decode(about, type=NixlMetadata)
        failure: list[Exception] = []

        def add() -> None:
            try:
                agent = self._agent.add_remote_agent(theirs.agent)
                name = agent.decode() if isinstance(agent, bytes) else str(agent)
                self._agents[peer] = (name, theirs)
            except Exception as error:  # noqa: BLE001  NIXL has its own family of errors
                failure.append(error)

        self._ask(add)
        if failure:
            raise ConnectionGone(f"NIXL does not accept its agent: {failure[0]}")

    def frame(self, peer: TransferPeer, frame: Frame) -> None:
        raise ConnectionGone(f"it sends frames of kind {frame.kind}")

    def read(
        self, peer: TransferPeer, ticket: int, source: str, target: MemoryRegion, runs: ByteRuns
    ) -> None:
        columns = (runs.target, runs.source, runs.sizes)
        self._tasks.put(lambda: self._post(peer, ticket, "READ", target, source, columns))

    def write(
        self, peer: TransferPeer, ticket: int, source: MemoryRegion, target: str, runs: ByteRuns
    ) -> None:
        columns = (runs.source, runs.target, runs.sizes)
        self._tasks.put(lambda: self._post(peer, ticket, "WRITE", source, target, columns))

    def forget(self, peer: TransferPeer) -> None:
        self._ask(lambda: self._abandon(peer))
        self._tasks.put(lambda: self._remove(peer))  # takes UCX a while, and needs no waiting

    def close(self) -> None:
        if not self._worker.is_alive():
            return
        self._tasks.put(None)
        self._worker.join(timeout=5)
        for descriptors in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(descriptors)

    # -- on the one thread that uses the agent ------------------------------------------------

    def _post(
        self,
        peer: TransferPeer,
        ticket: int,
        way: str,
        ours: MemoryRegion,
        theirs: str,
        columns: tuple[Offsets, Offsets, Offsets],
    ) -> None:
        here, there, sizes = columns
        if not len(sizes):
            self._end.settle(peer, ticket)
            return
        try:
            name, about = self._agents[peer]
            address, device = about.regions[theirs]
            local = self._descriptors(ours.address, here, sizes, ours.device)
            remote = self._descriptors(address, there, sizes, device)
            handle = self._agent.initialize_xfer(way, local, remote, name)
            state = self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001  NIXL has its own family of errors
            self._end.settle(peer, ticket, f"NIXL: {type(error).__name__}: {error}")
            return
        self._under_way.append(NixlTransfer(peer, ticket, handle))
        if state != "PROC":
            self._settle(self._under_way[-1], state)

    def _descriptors(self, address: int, starts: Offsets, sizes: Offsets, device: int) -> Any:
        table = np.empty((len(sizes), 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = address + starts, sizes, max(0, device)
        return self._agent.get_xfer_descs(table, "DRAM" if device < 0 else "VRAM")

    def _poll(self) -> None:
        for one in list(self._under_way):
            try:
                state = self._agent.check_xfer_state(one.handle)
            except Exception as error:  # noqa: BLE001  NIXL has its own family of errors
                state = f"{type(error).__name__}: {error}"
            if state != "PROC":
                self._settle(one, state)

    def _settle(self, one: NixlTransfer, state: str) -> None:
        self._under_way.remove(one)
        with contextlib.suppress(Exception):
            one.handle.release()
        self._end.settle(one.peer, one.ticket, None if state == "DONE" else f"NIXL: {state}")

    def _abandon(self, peer: TransferPeer) -> None:
        for one in [one for one in self._under_way if one.peer is peer]:
            self._settle(one, "the peer is lost")

    def _remove(self, peer: TransferPeer) -> None:
        agent = self._agents.pop(peer, None)
        again = agent is not None and any(agent[0] == name for name, _ in self._agents.values())
        if agent is not None and not again:  # it may have come back already
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(agent[0])

    def _ask(self, task: Callable[[], None]) -> None:
        """Have the agent's thread do it, and wait."""
        done = threading.Event()
        if not self._worker.is_alive():
            return

        def work() -> None:
            task()
            done.set()

        self._tasks.put(work)
        while not done.wait(1.0) and self._worker.is_alive():
            pass

    def _work(self) -> None:
        idle = 0
        while True:
            try:
                task = self._tasks.get_nowait() if self._under_way else self._tasks.get()
            except queue.Empty:
                self._poll()
                idle += 1
                time.sleep(0 if idle < SPINS else NAP_S)
                continue
            if task is None:
                return
            idle = 0
            task()


def memory_kind(region: MemoryRegion) -> str:
    return "DRAM" if region.device < 0 else "VRAM"


def load_api() -> Any:
    """NIXL's Python module; a TransferError that says what to install where there is none."""
    missing = why_not()
    if missing is not None:
        raise TransferError(missing, hint="or use tcp between machines, shm within one")
    if not any(Path("/sys/class/infiniband").glob("*")):
        # Without InfiniBand its module only does harm: with some distributions' rdma-core it crashes at exit.
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault(
        "UCX_LOG_LEVEL", "fatal"
    )  # a lost peer is an event here, not a line on stderr
    builds = _builds()
    module = builds[0] if len(builds) == 1 else "nixl"
    try:
        return importlib.import_module(f"{module}._api")
    except ImportError as error:
        raise TransferError(f"NIXL does not import: {error}", hint="pip install nixl") from None


def nixl(
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    patience: Patience = PATIENCE,
    secret: Secret | None = None,
) -> TransferEndpoint:
    return TransferEndpoint(name, NixlMover(name), host, port, patience, secret)
