"""The pages of a disk or an object store as the engine sees them: a book of slots, and threads that read and write.

The engine's thread asks and looks later; it waits for the disk only to forget everything (`clear`). Pages are written
as far as the thread keeps up, and never behind one that is not there. A disk that is full or gone is left alone for a
while and then tried again; what a full one has is still read.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import NamedTuple

import numpy as np

from cairn.core.errors import RequestError
from cairn.serve.tiers.disk_segments import Damaged, DiskSegments, Unreachable
from cairn.serve.tiers.load_plan import Source
from cairn.serve.tiers.object_pages import ObjectPages
from cairn.serve.tiers.slot_table import Key, SlotEntry, SlotTable

log = logging.getLogger("cairn")
MOST_WRITING = 64  # pages that wait to be written
THREADS = 2  # that write, and as many that read
UNKNOWN_RATE = 0.5e9  # bytes per second of one that cannot be measured, such as memory
PAUSE_S = 30.0  # after a write or a read that has failed
NEWEST = 0.3  # what the last read counts for in the rate


class Read(NamedTuple):
    damaged: list[Key]
    seconds: float
    unread: Sequence[Key] = ()  # they may be there later


class DiskTier:
    def __init__(self, segments: DiskSegments | ObjectPages) -> None:
        self.segments, self.book = segments, SlotTable(segments.slots)
        self.broken: str | None = None  # why nothing is written for a while
        self._writes_s = self._reads_s = 0.0  # not before these times
        self.rate = segments.measure() or UNKNOWN_RATE
        # Apart, so that a request that waits for pages does not wait for those that are written.
        self._writers = ThreadPoolExecutor(THREADS, thread_name_prefix="cairn kv write")
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="cairn kv read")
        self._writing: dict[Key, Future[None]] = {}
        self._reading_bytes = 0  # asked for, and not there yet
        self._adopt()

    def _adopt(self) -> None:
        """Adopt the slots of earlier servers."""
        left = self.segments.filled()
        self.book.restore({h.key: (slot, h.parent, h.seconds) for slot, h in left})

    def __len__(self) -> int:
        return len(self.book)

    def origin(self, key: Key) -> SlotEntry | None:
        """Entry of a block; None if it is not stored."""
        return self.book.find(key)

    @property
    def source(self) -> Source:
        return Source(self.rate, self.segments.latency_s + self._reading_bytes / self.rate)

    def wants(self, key: Key, parent: Key) -> bool:
        if len(self._writing) >= MOST_WRITING or key in self.book:
            return False
        paused = self.broken is not None and time.monotonic() < self._writes_s
        return not paused and (not parent or parent in self.book)

    def has(self, key: Key) -> bool:
        """Return whether the block can be read now."""
        return self.book.has(key) and (not self._reads_s or time.monotonic() >= self._reads_s)

    def write(self, key: Key, parent: Key, seconds: float, page_B: np.ndarray) -> bool:
        """Begin to; `page_B` stays as it is until `written` names the key."""
        slot = self.book.put(key, parent, seconds)
        if slot is None:
            return False
        write = self.segments.write
        self._writing[key] = self._writers.submit(write, slot, key, parent, seconds, page_B)
        return True

    def written(self) -> list[Key]:
        """Pages that are no longer read from host memory, since the last call."""
        done = [key for key, writing in self._writing.items() if writing.done()]
        for key in done:
            problem = self._writing.pop(key).exception()
            if problem is None:
                self.book.ready(key)
                self.broken = None
                continue
            self.book.drop(key)
            if self.broken is None:
                warning = "no page is written to %s for %g s: %s"
                log.warning(warning, self.segments.folder, PAUSE_S, problem)
            self.broken = f"{type(problem).__name__}: {problem}"
            self._writes_s = time.monotonic() + PAUSE_S
        return done

    def read(self, keys: Sequence[Key], into: Sequence[np.ndarray]) -> "Future[Read]":
        """Into these slots of the host; the result names pages that were not there."""
        slots = [self.book.get(key).slot for key in keys]
        for key in keys:
            self.book.use(key)
            self.book.pin(key)
        self._reading_bytes += len(keys) * self.segments.page_bytes
        return self._readers.submit(self._read, list(zip(keys, slots, into, strict=True)))

    def have_read(self, keys: Sequence[Key], read: Read) -> None:
        """Update the tables after a read; called in the engine's thread."""
        size = len(keys) * self.segments.page_bytes
        self._reading_bytes -= size
        if read.unread:
            self._reads_s = time.monotonic() + PAUSE_S
        elif read.seconds > 0:
            self.rate += NEWEST * (size / read.seconds - self.rate)
        for key in keys:
            self.book.unpin(key)
        for key in read.damaged:
            self.book.drop(key)

    def clear(self) -> None:
        """Forget every page, so that the next server finds none; what is being written is waited for."""
        wait_for(self._writing.values())
        self.written()
        self.book.clear()
        try:
            self.segments.clear()
        except OSError as error:
            raise RequestError(
                f"pages in {self.segments.folder} cannot be deleted: {error}",
                hint="delete them before the next server starts",
            ) from None

    def close(self) -> None:
        for threads in (self._writers, self._readers):
            threads.shutdown(wait=True, cancel_futures=True)
        self.segments.close()

    def _read(self, pages: Sequence[tuple[Key, int, np.ndarray]]) -> Read:
        began, damaged, folder = time.monotonic(), [], self.segments.folder
        for at, (key, slot, into_B) in enumerate(pages):
            try:
                self.segments.read(slot, key, into_B)
            except Damaged as problem:
                log.warning("a page in %s is computed again: %s", folder, problem)
                damaged.append(key)
            except Unreachable as problem:
                log.warning("no page in %s is read for %g s: %s", folder, PAUSE_S, problem)
                unread = [one[0] for one in pages[at:]]
                return Read(damaged, time.monotonic() - began, unread)
        return Read(damaged, time.monotonic() - began)
