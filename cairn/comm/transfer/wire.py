"""Frames over one socket: a short header, a little meta data, and bytes that lie scattered in memory.

    | kind | ticket | meta length | payload length |  meta  |  payload ...

The payload is sent from where it lies and received to where it belongs: `sendmsg` and `recvmsg_into` take up to 1024
pieces at a time, and no copy is made in between. Only runs too short for that go through a small packed buffer. A
writer thread has a queue, so that a reader never waits for the other side to read: two ends that answer each other
cannot block. Knows no transport.
"""

import contextlib
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cairn.comm.transfer.byte_runs import ByteRuns, Offsets
from cairn.comm.transfer.copies import SHORT, Bytes, copy_runs

HEADER = struct.Struct("<4sBQIQ")
MAGIC = b"CRN1"
MOST_META = 256 << 20  # what a sane peer would never exceed
MOST_HELLO = 16 << 20  # of a stranger
MOST_PIECES = 1024  # IOV_MAX
STAGED = 1 << 20  # bytes of short runs that go together


class Frame(NamedTuple):
    kind: int
    ticket: int
    meta: bytes
    payload: int = 0  # bytes that follow


class Scattered(NamedTuple):
    """Bytes of a region, in the order in which they travel."""

    memory: Bytes
    starts: Offsets
    sizes: Offsets

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def short(self) -> bool:
        return len(self.sizes) > 1 and self.nbytes < SHORT * len(self.sizes)


class ConnectionGone(Exception):
    """The other side has closed, or sends what is no frame of ours."""

    def __init__(self, reason: str, dead: bool = False) -> None:
        super().__init__(reason)
        self.dead = dead  # its own kernel says so


class Wire:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._queue: queue.SimpleQueue[tuple[Frame, Scattered | None] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True, name="transfer-writer")
        self.received_bytes = 0  # bytes received so far, frames or not: a sign of life

    def start(self) -> None:
        self._writer.start()

    def send(self, frame: Frame, payload: Scattered | None = None) -> None:
        self._queue.put((frame, payload))

    def finish(self) -> None:
        """Send what is queued, then stop sending."""
        self._queue.put(None)

    def drain(self, deadline: float) -> None:
        """Wait until everything queued before finish() is sent, or until `deadline` of the monotonic clock."""
        if self._writer.ident is not None:  # a connection that is just being made has no writer yet
            self._writer.join(timeout=max(deadline - time.monotonic(), 0))

    def close(self) -> None:
        """Close both directions immediately and drop what is queued."""
        self._queue.put(None)
        with contextlib.suppress(OSError):  # the other side may have closed it
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Release the connection; called by the reading thread after close()."""
        self._writer.join(timeout=5)
        self.socket.close()

    def readable(self) -> bool:
        """Return whether data has arrived that has not been read yet."""
        poll = select.poll()  # not select(), which knows no descriptor beyond 1023
        try:
            poll.register(self.socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            return False

    # -- sending ------------------------------------------------------------------------------

    def send_now(self, frame: Frame, payload: Scattered | None = None) -> None:
        size = payload.nbytes if payload is not None else 0
        header = HEADER.pack(MAGIC, frame.kind, frame.ticket, len(frame.meta), size)
        self._send_pieces([memoryview(header), memoryview(frame.meta)])
        for pieces in outgoing(payload) if payload is not None else ():
            self._send_pieces(pieces)

    def _write(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self.send_now(*item)
        except OSError:
            pass  # the reader sees it as well, and tells

    def _send_pieces(self, pieces: list[memoryview]) -> None:
        while pieces:
            pieces = behind(pieces, self.socket.sendmsg(pieces))

    # -- receiving ----------------------------------------------------------------------------

    def receive(self, most_meta: int = MOST_META) -> Frame:
        """The next header and its meta data; the payload is still on its way."""
        header = bytearray(HEADER.size)
        self.fill([memoryview(header)])
        magic, kind, ticket, meta, payload = HEADER.unpack(header)
        if magic != MAGIC or meta > most_meta:
            raise ConnectionGone("it sends what is not of this protocol")
        body = bytearray(meta)
        self.fill([memoryview(body)])
        return Frame(kind, ticket, bytes(body), payload)

    def receive_into(self, place: Scattered) -> None:
        if place.short():
            for start, stop in in_stages(place.sizes):
                self._receive_staged(place, start, stop)
            return
        for pieces in direct(place):
            self.fill(pieces)

    def skip(self, nbytes: int) -> None:
        room = memoryview(bytearray(min(nbytes, STAGED)))
        while nbytes:
            self.fill([room[: min(nbytes, len(room))]])
            nbytes -= min(nbytes, len(room))

    def fill(self, pieces: list[memoryview]) -> None:
        pieces = [piece for piece in pieces if len(piece)]
        while pieces:
            try:
                count = self.socket.recvmsg_into(pieces)[0]
            except OSError as error:
                reset = isinstance(error, ConnectionResetError)
                raise ConnectionGone(error.strerror or str(error), dead=reset) from None
            if count == 0:
                raise ConnectionGone("it closed the connection", dead=True)
            self.received_bytes += count
            pieces = behind(pieces, count)

    def _receive_staged(self, place: Scattered, start: int, stop: int) -> None:
        sizes = place.sizes[start:stop]
        packed = np.empty(int(sizes.sum()), np.uint8)
        self.fill([packed.data])
        copy_runs(
            packed, place.memory, ByteRuns(packed_starts(sizes), place.starts[start:stop], sizes)
        )


def outgoing(payload: Scattered) -> Iterator[list[memoryview]]:
    """Yield the buffers of one system call after the other."""
    if not payload.short():
        yield from direct(payload)
        return
    for start, stop in in_stages(payload.sizes):
        sizes = payload.sizes[start:stop]
        packed = np.empty(int(sizes.sum()), np.uint8)
        runs = ByteRuns(payload.starts[start:stop], packed_starts(sizes), sizes)
        copy_runs(payload.memory, packed, runs)
        yield [packed.data]


def direct(place: Scattered) -> Iterator[list[memoryview]]:
    memory = place.memory.data
    starts, sizes = place.starts.tolist(), place.sizes.tolist()
    for first in range(0, len(starts), MOST_PIECES):
        some = slice(first, first + MOST_PIECES)
        yield [
            memory[start : start + size]
            for start, size in zip(starts[some], sizes[some], strict=True)
            if size
        ]


def in_stages(sizes: Offsets) -> Iterator[tuple[int, int]]:
    """Ranges of runs that together have about STAGED bytes."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + STAGED, side="right")))
        yield start, stop
        start = stop


def packed_starts(sizes: Offsets) -> Offsets:
    return np.cumsum(sizes) - sizes


def behind(pieces: list[memoryview], skip: int) -> list[memoryview]:
    """The pieces that remain after the first `skip` bytes."""
    for place, piece in enumerate(pieces):
        if skip < len(piece):
            return [piece[skip:], *pieces[place + 1 :]]
        skip -= len(piece)
    return []
