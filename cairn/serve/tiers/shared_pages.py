"""Pages of this server's host memory, for other servers of the same model that would otherwise compute them.

    listen -> authenticator -> a thread for each connection
                                   ListRequest -> Listing: what came and went since the last one
                                   PagesRequest -> for each key: 0, or 1 | checksum | page

The engine's thread goes on meanwhile and may give a slot to another page. A slot belongs to one entry of the book at a
time, and the entry leaves the book before the slot is written again: a page that was copied counts only if its entry is
still there afterwards. Only pages whose name means the same in every process are shared. Listens on 127.0.0.1 unless
told otherwise; elsewhere both ends have to know a secret (`core/shared_secret`).
"""

import contextlib
import itertools
import socket
import struct
import threading
import zlib
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import numpy as np

from cairn.comm.transfer.sockets import bound, name_of, tune_for_bulk
from cairn.core.client_authenticator import ClientAuthenticator
from cairn.core.shared_secret import Secret
from cairn.serve.tiers.slot_table import Key, SlotEntry, SlotTable

T = TypeVar("T")
LENGTH = struct.Struct(">I")
PAGE = struct.Struct(">BI")  # is it there, and its checksum
MOST_ASKED = 64 << 20  # bytes of a message
MOST_LISTED = 100_000  # pages that came, and that went, in one message: some 12 MB of keys
IDLE_S = 60.0  # without a question, after which a connection is closed
FULL_S = 1.0  # before the next try, where this process has no room for a connection


class ListRequest(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """Request for the blocks that were not yet listed to this connection."""

    model: str  # as `fingerprint` has it
    page_bytes: int


class PagesRequest(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """The bytes of these pages."""

    keys: list[Key]


class Listing(msgspec.Struct, frozen=True, array_like=True, tag="listing"):
    stored: list[tuple[Key, Key, float]] = []  # key, parent, seconds to compute it
    removed: list[Key] = []
    refused: str = ""  # why there will never be any
    more: bool = False  # another one is ready


encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(ListRequest | PagesRequest).decode


class SharedPages:
    def __init__(
        self,
        book: SlotTable,
        memory_SB: np.ndarray,
        model: str,
        where: tuple[str, int] = ("127.0.0.1", 0),
        secret: Secret | None = None,
    ) -> None:
        self._book, self._memory_SB, self._model = book, memory_SB, model
        self._pages: dict[Key, SlotEntry] = {}  # that were offered; some have left the book since
        self._authenticator = ClientAuthenticator(secret, "pages of the KV cache")
        self._listener = bound(socket.AF_INET, "kv pages", where, secret)
        tune_for_bulk(self._listener, where[0])
        self.address = name_of(self._listener)
        self._open: dict[threading.Thread, socket.socket] = {}
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="cairn kv share", daemon=True)
        self._accepting.start()

    def offer(self, key: Key) -> None:
        """Offer a block to readers; called in the engine's thread."""
        self._pages[key] = self._book.get(key)
        if len(self._pages) > 2 * self._book.slots:  # it was not asked what is there
            self.present()

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # which wakes its thread
        self._accepting.join()
        self._listener.close()
        for thread, link in self._open.copy().items():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            thread.join()

    def page(self, key: Key) -> bytes | None:
        """A whole page as it is stored, or None: it is not there, or left while it was copied."""
        kept = self._pages.get(key)
        if kept is None or not self._holds(key, kept):
            return None
        data = self._memory_SB[kept.slot].tobytes()
        return data if self._holds(key, kept) else None

    def present(self) -> dict[Key, SlotEntry]:
        """Blocks that can be read now; evicted ones are forgotten."""
        present = self._pages.copy()
        for key, kept in [one for one in present.items() if not self._holds(*one)]:
            del present[key]
            if self._pages.get(key) is kept:  # else it was offered anew
                self._pages.pop(key, None)
        return present

    def _holds(self, key: Key, kept: SlotEntry) -> bool:
        return self._book.find(key) is kept and kept.ready

    # -- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(FULL_S):
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
            self._open[thread] = link
            thread.start()

    def _serve(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError), link:
            if self._authenticator.admits(link):
                link.settimeout(IDLE_S)
                self._answer(link)
        self._open.pop(threading.current_thread(), None)

    def _answer(self, link: socket.socket) -> None:
        listed: set[Key] = set()
        while True:
            question = _decode_question(read_frame(link))
            if isinstance(question, ListRequest):
                write_frame(link, encode(self._listing(question, listed)))
            else:
                for key in question.keys:
                    self._send(link, key)

    def _listing(self, question: ListRequest, listed: set[Key]) -> Listing:
        page_bytes = self._memory_SB.shape[1]
        if (question.model, question.page_bytes) != (self._model, page_bytes):
            mismatch = f"pages here are of {self._model[:12]} with {page_bytes} bytes, not of "
            return Listing(refused=f"{mismatch}{question.model[:12]} with {question.page_bytes}")
        present = self.present()
        fresh = (one for one in present.items() if one[0] not in listed)
        stored = [(key, one.parent, one.seconds) for key, one in _portion(fresh)]
        removed = _portion(key for key in listed if key not in present)
        listed.difference_update(removed)
        listed.update(key for key, _, _ in stored)
        return Listing(stored, removed, more=MOST_LISTED in (len(stored), len(removed)))

    def _send(self, link: socket.socket, key: Key) -> None:
        page = self.page(key)
        if page is None:
            link.sendall(PAGE.pack(0, 0))
        else:
            link.sendall(PAGE.pack(1, zlib.crc32(page)) + page)


def _portion(items: Iterable[T]) -> list[T]:
    """Items that fit into one message."""
    return list(itertools.islice(items, MOST_LISTED))


def write_frame(link: socket.socket, body: bytes) -> None:
    link.sendall(LENGTH.pack(len(body)) + body)


def read_frame(link: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(read_bytes(link, LENGTH.size))
    if size > MOST_ASKED:
        raise EOFError(f"a message of {size} bytes")
    return read_bytes(link, size)


def read_bytes(link: socket.socket, count: int) -> bytes:
    into_B = bytearray(count)
    read_into(link, memoryview(into_B))
    return bytes(into_B)


def read_into(link: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        received = link.recv_into(into[at:])
        if not received:
            raise EOFError("the connection was closed")
        at += received
