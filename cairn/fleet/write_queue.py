"""Writes of one turn of the event loop, made together at its end.

A write wakes its reader. On a busy machine the reader gets the processor at once, and the router goes on later with
cold caches; so everything that came is handled first. Knows no HTTP.
"""

import asyncio

JOINED = (
    16 * 1024
)  # bytes of a body up to which joining it with its head is cheaper than a write of two buffers


class WriteQueue:
    """Write queue of all connections of a router, which preserves the order of each connection."""

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.Transport, tuple[bytes, ...]]] = []

    def write(self, transport: asyncio.Transport, parts: tuple[bytes, ...]) -> None:
        """Queue parts in order; the last one may be large."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((transport, parts))

    def write_piece(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write a stream piece immediately unless data is queued, because queueing costs a poll."""
        if self._waiting:
            self._waiting.append((transport, (data,)))
        else:
            transport.write(data)

    def flush(self) -> None:
        """Now; before a connection is closed whose last bytes may wait here."""
        waiting, self._waiting = self._waiting, []
        for transport, parts in waiting:
            if transport.is_closing():  # it was lost or given up in the same turn
                continue
            if len(parts[-1]) <= JOINED:
                transport.write(b"".join(parts))
            else:
                transport.writelines((b"".join(parts[:-1]), parts[-1]))
