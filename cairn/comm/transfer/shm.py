"""Bytes through shared pages, between processes of one machine: one copy, made by the reader.

    allocate  -> a memory file without a name         its descriptor goes to each peer through a Unix socket
    read      -> copy from their pages into ours      by our own thread; the owner does nothing

Nothing has a name in a file system, so nothing is left behind by a process that is killed. A region has to be made by
`allocate`, because memory that exists already cannot be shared. A peer that was dropped but lives can still write to
pages it has mapped: give such pages away only when its lease is over.
"""

import array
import fcntl
import mmap
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.copies import Bytes, copy_runs
from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.mover import PATIENCE, End, Patience, TransferPeer
from cairn.comm.transfer.transport import MemoryRegion
from cairn.comm.transfer.wire import ConnectionGone, Frame

CREDENTIALS = struct.Struct("iii")  # process, user, group
MARK = b"F"  # the byte that descriptors travel with


class ShmMover:
    kind = "shm"
    family = socket.AF_UNIX

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # address of our memory -> its descriptor
        self._theirs: dict[TransferPeer, dict[str, Bytes]] = {}  # their pages, by region
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._copying = threading.Lock()
        self._worker = threading.Thread(target=self._work, daemon=True, name="transfer-copier")

    def allocate(self, nbytes: int) -> Bytes:
        if not hasattr(os, "memfd_create"):
            raise TransferError("this system has no memfd_create", hint="use tcp")
        file = os.memfd_create("cairn-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, max(1, nbytes))
        # It cannot be truncated under a reader, which would die of SIGBUS.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = _mapped(file, nbytes)
        self._files[memory.ctypes.data] = file
        return memory

    def open(self, end: End) -> bytes:
        self._end = end
        private = [one.name for one in end.regions.values() if one.address not in self._files]
        if private:
            raise TransferError(
                f"region {private[0]!r} is private memory of this process",
                hint="make it with allocate(), or use tcp or nixl",
            )
        self._worker.start()
        self._names = [(one.name, one.nbytes) for one in end.regions.values()]
        return msgspec.msgpack.encode(self._names)

    def greet(self, connection: socket.socket) -> None:
        _, user, _ = CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        if user != os.getuid():  # an abstract socket has no permissions of its own
            raise ConnectionGone(f"it belongs to another user ({user})")
        files = [self._files[one.address] for one in self._end.regions.values()]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        connection.sendmsg([MARK], rights)

    def admit(self, peer: TransferPeer, about: bytes, connection: socket.socket) -> None:
        regions = msgspec.msgpack.decode(about, type=list[tuple[str, int]])
        mark, files, _, _ = socket.recv_fds(connection, 1, max(1, len(regions)))
        try:
            if mark != MARK or len(files) != len(regions):
                raise ConnectionGone(f"it shares {len(files)} regions of {len(regions)}")
            pages = {}
            for (name, nbytes), file in zip(regions, files, strict=True):
                if os.fstat(file).st_size < nbytes:
                    raise ConnectionGone(f"its region {name!r} is shorter than it says")
                pages[name] = _mapped(file, nbytes)
            self._theirs[peer] = pages
        finally:
            for file in files:
                os.close(file)

    def frame(self, peer: TransferPeer, frame: Frame) -> None:
        raise ConnectionGone(f"it sends frames of kind {frame.kind}")

    def read(
        self, peer: TransferPeer, ticket: int, source: str, target: MemoryRegion, runs: ByteRuns
    ) -> None:
        self._tasks.put(lambda: self._copy(peer, ticket, source, target, runs, into_ours=True))

    def write(
        self, peer: TransferPeer, ticket: int, source: MemoryRegion, target: str, runs: ByteRuns
    ) -> None:
        self._tasks.put(lambda: self._copy(peer, ticket, target, source, runs, into_ours=False))

    def forget(self, peer: TransferPeer) -> None:
        with self._copying:  # whatever is being copied is finished first
            self._theirs.pop(peer, None)

    def close(self) -> None:
        self._tasks.put(None)
        if self._worker.is_alive():
            self._worker.join(timeout=5)
        self._theirs.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _copy(
        self,
        peer: TransferPeer,
        ticket: int,
        theirs: str,
        ours: MemoryRegion,
        runs: ByteRuns,
        into_ours: bool,
    ) -> None:
        with self._copying:
            pages = self._theirs.get(peer, {}).get(theirs)
            if pages is not None and ours.memory is not None:
                pair = (pages, ours.memory) if into_ours else (ours.memory, pages)
                copy_runs(*pair, runs)
        if pages is not None:
            self._end.settle(peer, ticket)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _mapped(file: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(file, max(1, nbytes)), np.uint8, count=nbytes)


def shm(name: str, patience: Patience = PATIENCE) -> TransferEndpoint:
    return TransferEndpoint(name, ShmMover(), patience=patience)
