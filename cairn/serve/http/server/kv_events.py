"""KV-cache events in vLLM's ZMQ format, for routers that support vLLM: llm-d, Dynamo, smg.

    PUB      topic | number, 8 bytes, big endian | MessagePack [time, [event, ...], 0]
    ROUTER   a number, 8 bytes  -->  (number | batch) from there on, as far as they are remembered, then -1 | nothing

    BlockStored{block_hashes, parent_block_hash, token_ids, block_size, ...}
    BlockRemoved{block_hashes}      AllBlocksCleared{}

Pages are published when the request that filled them ends, because its tokens are needed for that. Those of requests
with a cache salt, an adapter or pictures are not published: a router that compares tokens alone would find them for
others. When the weights change, everything is cleared: pages of those before are never found.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

from cairn.core.errors import ConfigError
from cairn.serve.engine.page_events import PageEvent
from cairn.serve.engine.prefix_cache import page_hashes
from cairn.serve.engine.request import Request

REMEMBERED = 10_000  # batches that can be asked for again
MOST_UNSENT = 100_000  # batches for a follower that does not read; then it misses some
END = (-1).to_bytes(8, "big", signed=True)
POLL_MS = 200


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KvEvents:
    """Turns events of pages into those of blocks. Pure."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._live: set[bytes] = set()  # pages that can be found
        self._told: set[bytes] = set()

    def note(self, pages: Iterable[PageEvent]) -> list[Event]:
        events: list[Event] = []
        for stored, digest in pages:
            if stored:
                self._live.add(digest)
            elif not digest:
                self._live.clear()
                self._told.clear()
                events.append(AllBlocksCleared())
            else:
                self._live.discard(digest)
                if digest in self._told:
                    self._told.discard(digest)
                    events.append(BlockRemoved([_number(digest)]))
        return events

    def stored(self, digests: Sequence[bytes], ids: Sequence[int]) -> list[Event]:
        """The pages of a request that has ended, those that are new; `ids` are the tokens in them."""
        size, events, at = self.page_size, list[Event](), 0
        while at < len(digests) and digests[at] in self._live:
            begin = at
            while at < len(digests) and digests[at] in self._live and digests[at] not in self._told:
                at += 1
            if fresh := digests[begin:at]:
                parent = _number(digests[begin - 1]) if begin else None
                tokens = list(ids[begin * size : at * size])
                events.append(BlockStored([_number(one) for one in fresh], parent, tokens, size))
                self._told.update(fresh)
            else:
                at += 1
        return events


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class KvPublisher:
    """Sends them, and again on request. Its methods belong to one thread; the answers have one of their own."""

    def __init__(self, page_size: int, endpoint: str, replay: str | None, topic: str = "") -> None:
        self.events = KvEvents(page_size)
        self._topic, self._number = topic.encode(), 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REMEMBERED)
        self._context, self._closed = zmq.Context(), threading.Event()
        self._socket = self._bound(zmq.PUB, endpoint)
        self._replay = self._bound(zmq.ROUTER, replay) if replay is not None else None
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(MOST_UNSENT)
        socket.linger = 0
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"KV events cannot be sent from {endpoint!r}: {error}", hint="such as tcp://*:5557"
            ) from None
        return socket

    @property
    def endpoints(self) -> list[str]:
        both = (self._socket, self._replay)
        return [one.get_string(zmq.LAST_ENDPOINT) for one in both if one is not None]

    def note(self, pages: Iterable[PageEvent]) -> None:
        self._send(self.events.note(pages))

    def stored(self, request: Request, ids: Sequence[int], weights: bytes = b"") -> None:
        """A request has ended with these tokens; `weights`: the identity of those that serve now."""
        if not (request.salt or request.adapter or request.pieces):
            digests = page_hashes(request, ids, self.events.page_size, weights)
            self._send(self.events.stored(digests, ids))

    def _send(self, events: list[Event]) -> None:
        if not events:
            return
        batch = msgspec.msgpack.encode([time.time(), events, 0])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._sent.append((number, batch))
        self._socket.send_multipart((self._topic, number, batch))

    def _answer(self) -> None:
        while self._replay is not None and not self._closed.is_set():
            if self._replay.poll(POLL_MS):
                *address, start = self._replay.recv_multipart()
                for number, batch in [one for one in self._sent.copy() if one[0] >= start]:
                    self._replay.send_multipart((*address, number, batch))
                self._replay.send_multipart((*address, END, b""))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close()
        self._context.term()
