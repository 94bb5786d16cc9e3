"""Pages in the host memory of other servers, as the engine sees them: known, read by threads, never written.

    PeerPages   follows one server: which pages it has (`shared_pages.Listing`), twice a second; reads them
    PeerTier    all of them, with the methods of `disk_tier` that `page_tiers` calls

The engine's thread asks and looks later. A server that is gone has no pages until it answers again; a page that has
left there meanwhile, or that was cut off or damaged on its way, is computed here. How fast pages come is measured by
those that came, so that a slow network is not waited for (`load_plan`).
"""

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from socket import AF_INET, MSG_PEEK, socket
from typing import NamedTuple

import msgspec
import numpy as np

from cairn.comm.transfer.sockets import dialled
from cairn.core.shared_secret import Secret
from cairn.serve.tiers.disk_tier import Read
from cairn.serve.tiers.load_plan import Source
from cairn.serve.tiers.shared_pages import (
    PAGE,
    Listing,
    ListRequest,
    PagesRequest,
    encode,
    read_bytes,
    read_frame,
    read_into,
    write_frame,
)
from cairn.serve.tiers.slot_table import Key

log = logging.getLogger("cairn")
PERIOD_S = 0.5  # between two listings
AGAIN_S = 2.0  # after a server that could not be reached
ANSWER_S = 2.0  # without a byte, after which a server counts as gone
TRIED_PAGES = 4  # that the first measurement reads
UNKNOWN_RATE = 0.1e9  # bytes per second, before anything was read
NEWEST = 0.3  # what the last read counts for in the rate
_decode_listing = msgspec.msgpack.Decoder(Listing).decode


class Origin(NamedTuple):
    """Entry of a block on another server."""

    parent: Key
    seconds: float


class PeerPages:
    """Client of another server's blocks."""

    def __init__(
        self, host: str, port: int, model: str, page_bytes: int, secret: Secret | None = None
    ) -> None:
        self.address, self.page_bytes = f"{host}:{port}", page_bytes
        self.keys: dict[Key, Origin] = {}
        self.refused = ""  # why there are no pages
        self.rate, self.latency_s = UNKNOWN_RATE, 0.0
        self._known, self._secret = encode(ListRequest(model, page_bytes)), secret
        self._stopped = threading.Event()
        self._measured = self._lost = False
        self._idle: list[socket] = []  # connections that pages are read over
        self._following = threading.Thread(target=self._follow, name="cairn kv peer", daemon=True)
        self._following.start()

    def read(self, keys: Sequence[Key], into: Sequence[np.ndarray]) -> list[Key]:
        """Into these buffers; the keys whose pages were not there or came damaged. An OSError: the server is gone."""
        missing: list[Key] = []
        try:
            link = self._connection()
            with contextlib.ExitStack() as unless_read:
                unless_read.callback(link.close)
                write_frame(link, encode(PagesRequest(list(keys))))
                for key, into_B in zip(keys, into, strict=True):
                    there, checksum = PAGE.unpack(read_bytes(link, PAGE.size))
                    if there:
                        read_into(link, into_B.data)
                    if not there or zlib.crc32(into_B.data) != checksum:
                        missing.append(key)
                unless_read.pop_all()
        except (OSError, EOFError) as error:
            self._lost, self.keys = True, {}
            raise OSError(f"{self.address}: {error}") from None
        self._idle.append(link)
        return missing

    def close(self) -> None:
        self._stopped.set()
        self._following.join(ANSWER_S)  # it may wait for an address that never answers
        while self._idle:
            self._idle.pop().close()

    def _connection(self) -> socket:
        """An idle open connection, or a new one."""
        with contextlib.suppress(IndexError):  # none is left: other threads take them too
            while True:
                link = self._idle.pop()
                if _is_quiet(link):
                    return link
                link.close()
        return self._dial()

    def _dial(self) -> socket:
        link = dialled(AF_INET, self.address, self._secret)
        link.settimeout(ANSWER_S)
        return link

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                with contextlib.closing(self._dial()) as link:
                    self._listen(link)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                self._note(str(error))
            self.keys = {}
            self._stopped.wait(AGAIN_S)

    def _listen(self, link: socket) -> None:
        """Until it is gone, or a read has failed: then everything is listed from the beginning."""
        self._lost = False
        while not self._stopped.is_set() and not self._lost:
            write_frame(link, self._known)
            listing = _decode_listing(read_frame(link))
            self._note(listing.refused)
            keys = self.keys
            for key in listing.removed:
                keys.pop(key, None)
            listed = {key: Origin(parent, seconds) for key, parent, seconds in listing.stored}
            if listed and not self._measured:
                self._measure(list(listed)[:TRIED_PAGES])
            keys.update(listed)
            if not listing.more:
                self._stopped.wait(PERIOD_S)

    def _note(self, why: str) -> None:
        """Why there are no pages (empty: there may be some), which is logged when it changes."""
        if why and why != self.refused:
            log.warning("no pages come from %s: %s", self.address, why)
        self.refused = why

    def _measure(self, keys: Sequence[Key]) -> None:
        """Measure the latency of an empty read and the rate of some blocks, before the first request."""
        into = [np.empty(self.page_bytes, np.uint8) for _ in keys]
        self.read([], [])
        began = time.perf_counter()
        self.read([b""], into[:1])  # a page that does not exist
        empty = time.perf_counter()
        came = len(keys) - len(self.read(keys, into))
        took_s = max(time.perf_counter() - empty, 1e-9)
        self.latency_s = empty - began
        if came:
            self.rate, self._measured = came * self.page_bytes / took_s, True


def _is_quiet(link: socket) -> bool:
    """Nothing waits to be read there, not even the end: a server closes a connection that was idle for a minute."""
    link.setblocking(False)
    try:
        link.recv(1, MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        link.settimeout(ANSWER_S)
    return False


class PeerTier:
    def __init__(self, peers: Sequence[PeerPages]) -> None:
        self.peers, self.page_bytes = list(peers), peers[0].page_bytes
        self._readers = ThreadPoolExecutor(len(self.peers) + 1, thread_name_prefix="cairn kv fetch")
        self._reading_bytes = 0  # asked for, and not there yet

    def __len__(self) -> int:
        return sum(len(peer.keys) for peer in self.peers)

    @property
    def source(self) -> Source:
        """Pessimistic cost of the peers with blocks, because the peer is not chosen yet."""
        able = [peer for peer in self.peers if peer.keys] or self.peers
        rate, latency_s = min(one.rate for one in able), max(one.latency_s for one in able)
        return Source(rate, latency_s + self._reading_bytes / rate)

    def has(self, key: Key) -> bool:
        return any(key in peer.keys for peer in self.peers)

    def origin(self, key: Key) -> Origin | None:
        """Entry of a block; None if it was evicted meanwhile."""
        return next((one for peer in self.peers if (one := peer.keys.get(key)) is not None), None)

    def wants(self, key: Key, parent: Key) -> bool:
        """Every server keeps its own pages."""
        return False

    def write(self, key: Key, parent: Key, seconds: float, page_B: np.ndarray) -> bool:
        return False

    def written(self) -> list[Key]:
        return []

    def read(self, keys: Sequence[Key], into: Sequence[np.ndarray]) -> "Future[Read]":
        """Into these slots of the host; the result names pages that did not come."""
        self._reading_bytes += len(keys) * self.page_bytes
        return self._readers.submit(self._read, list(zip(keys, into, strict=True)))

    def have_read(self, keys: Sequence[Key], read: Read) -> None:
        """Update the tables after a read, in the engine's thread. Missing blocks are recomputed."""
        self._reading_bytes -= len(keys) * self.page_bytes
        for peer in self.peers if read.damaged else ():
            for key in read.damaged:
                peer.keys.pop(key, None)

    def clear(self) -> None:
        """Forget the known blocks; blocks stored by other servers later are used."""
        for peer in self.peers:
            peer.keys.clear()

    def close(self) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)
        for peer in self.peers:
            peer.close()

    def _read(self, pages: list[tuple[Key, np.ndarray]]) -> Read:
        """Read each block from the first server that has it."""
        began, damaged, unread = time.monotonic(), list[Key](), list[Key]()
        for peer in self.peers:
            mine, others = list[tuple[Key, np.ndarray]](), list[tuple[Key, np.ndarray]]()
            for one in pages:  # asked once for each: the listing changes meanwhile
                (mine if one[0] in peer.keys else others).append(one)
            pages = others
            if not mine:
                continue
            keys, into = zip(*mine, strict=True)
            began_read = time.monotonic()
            try:
                missing = peer.read(keys, into)
            except OSError as error:
                log.warning("pages are computed here, not fetched: %s", error)
                unread += keys
                continue
            damaged += missing
            if came := len(keys) - len(missing):
                rate = came * self.page_bytes / max(time.monotonic() - began_read, 1e-9)
                peer.rate += NEWEST * (rate - peer.rate)
        return Read(damaged, time.monotonic() - began, [*unread, *(key for key, _ in pages)])
