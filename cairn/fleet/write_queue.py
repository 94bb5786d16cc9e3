"""Writes of one turn of the event loop, made together at its end.

A write wakes its reader. On a busy machine the reader gets the processor at once, and the router goes on later with
cold caches; so everything that came is handled first. Knows no HTTP.
"""

import asyncio

JOINED = 16 * 1024  # bytes of a body up to which one write of head and body is cheaper than two


class WriteQueue:
    """Of all connections of a router: each one's bytes go out in the order in which they were written here."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.Transport, bytes, bytes]] = []

    def write(self, transport: asyncio.Transport, head: bytes, body: bytes = b"") -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((transport, head, body))

    def write_piece(self, transport: asyncio.Transport, data: bytes) -> None:
        """Of a stream: at once, unless something waits. Pieces come one by one, and a turn that waits costs a poll."""
        if self._waiting:
            self._waiting.append((transport, data, b""))
        else:
            transport.write(data)

    def flush(self) -> None:
        """Now; before a connection is closed whose last bytes may wait here."""
        waiting, self._waiting = self._waiting, []
        for transport, head, body in waiting:
            if transport.is_closing():  # it was lost or given up in the same turn
                continue
            if len(body) <= JOINED:
                transport.write(head + body)
            else:
                transport.writelines((head, body))
