"""Streams through a TCP socket: zero copies of our own on the way out, and in unless it reduces.

    | header 32 B | payload |  | header | payload | ...

The socket never blocks; what the kernel does not take stays in the stream. To reduce, a piece is
received into a buffer that stays in the cache, and combined from there. A peer that dies closes its
sockets, so it is seen at once; a host that vanishes is seen by the timeout of the operation.
"""

import select
import socket

import torch

from cairn.labs.torch_backend.link import Incoming, Outgoing, bytes_of
from cairn.labs.torch_backend.wire import HEADER_BYTES

PIECE_BYTES = 256 << 10
GONE = "has closed the connection"


def sleep_for_any(reading: "TcpLink", writing: list["TcpLink"], seconds: float) -> bool:
    """Until one has something to pull or another has room; whether there is something to pull."""
    poll = select.poll()
    events_of = {link.fileno(): select.POLLOUT for link in writing}
    events_of[reading.fileno()] = events_of.get(reading.fileno(), 0) | select.POLLIN
    for fd, events in events_of.items():
        poll.register(fd, events)
    ready = dict(poll.poll(seconds * 1000))
    return bool(ready.get(reading.fileno(), 0) & ~select.POLLOUT)


class TcpLink:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._header = bytearray(HEADER_BYTES)
        self._header_at = 0  # bytes of the header that have come
        self._header_out = 0  # bytes of the header that have left
        self._payload_at = 0  # bytes of the stream that is coming in
        self._payload_out = 0
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._buffer_bytes = bytes_of(self._buffer)
        self._lost: str | None = None
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def push(self, stream: Outgoing) -> bool:
        moved, size = False, stream.view.element_size()
        payload = stream.memory()
        while not stream.done:
            header = stream.header[self._header_out :]
            try:
                sent = self._socket.sendmsg([header, payload[self._payload_out :]])
            except BlockingIOError:
                return moved
            except OSError as error:
                self._lost = f"{GONE} ({error.strerror})"
                return moved
            in_header = min(sent, len(header))
            self._header_out += in_header
            self._payload_out += sent - in_header
            stream.at = self._payload_out // size
            moved = True
            if stream.done:
                self._header_out = self._payload_out = 0
        return moved

    def pull(self, stream: Incoming) -> bool:
        """A piece at most: a rank with much to read has to send meanwhile."""
        if self._payload_at == 0:
            header = self.peek()
            if header is None:
                return False
            stream.check(header)
        moved = self._receive(stream) > 0
        if stream.done:
            self._header_at = self._payload_at = 0
        return moved

    def peek(self) -> bytes | None:
        """The header of what is next, once all of it has come."""
        complete = self._header_at == HEADER_BYTES or self._receive_header()
        return bytes(self._header) if complete else None

    def ready(self) -> bool:
        return bool(self._readable.poll(0))

    def sleep(self, seconds: float) -> bool:
        return bool(self._readable.poll(seconds * 1000))

    def sleep_for_room(self, seconds: float) -> None:
        self._writable.poll(seconds * 1000)

    def lost(self) -> str | None:
        return self._lost

    def close(self) -> None:
        self._socket.close()

    def _receive_header(self) -> bool:
        """Receive more of the header; return whether it is complete."""
        while self._header_at < HEADER_BYTES:
            count = self._read(memoryview(self._header)[self._header_at :])
            if not count:
                return False
            self._header_at += count
        return True

    def _receive(self, stream: Incoming) -> int:
        """Bytes of the payload that came: into their place, or into the buffer and combined."""
        if stream.combine is None:
            most = self._payload_at + PIECE_BYTES
            count = self._read(stream.memory()[self._payload_at : most])
            self._payload_at += count
            stream.at = self._payload_at // stream.view.element_size()
            return count
        size = stream.view.element_size()
        whole = min(PIECE_BYTES // size * size, stream.view.nbytes - stream.at * size)
        buffered = self._payload_at - stream.at * size  # of the piece that is coming
        count = self._read(self._buffer_bytes[buffered:whole]) if buffered < whole else 0
        self._payload_at += count
        if buffered + count == whole and stream.may_take(whole // size):
            stream.take(self._buffer[:whole].view(stream.view.dtype))
        return count

    def _read(self, into: memoryview) -> int:
        try:
            count = self._socket.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lost = f"{GONE} ({error.strerror})"
            return 0
        if count == 0:
            self._lost = GONE
        return count
