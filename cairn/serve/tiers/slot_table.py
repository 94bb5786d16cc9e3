"""Slot table of a tier: the slot of each block, and the eviction order.

Every slot has the same bytes, so seconds to compute a page again stand for seconds per byte. GreedyDual: a page that is
stored or used ranks at `clock + seconds`; the lowest rank leaves, and the clock moves up to it, so that what no request
asks for sinks below what comes later, the cheap first. A page whose successor is here stays: without its head a tail
cannot be used. Pinned pages, which a copy reads or writes, stay too. Pure.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

import msgspec

MOST_STALE = 4  # entries of the heap for each slot, before it is made again
Key = bytes  # the group, then the digest of the prefix; empty: the beginning


class SlotEntry(msgspec.Struct, eq=False):
    slot: int
    parent: Key
    seconds: float
    rank: float
    turn: int  # of equal ranks the one that was used longest ago leaves first
    pins: int = 0
    ready: bool = False  # its bytes are there


class SlotTable:
    def __init__(self, slots: int) -> None:
        self.slots, self.evicted = slots, 0
        self._free = list(reversed(range(slots)))
        self._kept: dict[Key, SlotEntry] = {}
        self._children: Counter[Key] = (
            Counter()
        )  # successors here, whether the page itself is or not
        self._clock = 0.0
        self._line: list[
            tuple[float, int, Key]
        ] = []  # a heap of who may leave; some of it is stale
        self._turn = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        """Return whether the block has a slot; its bytes may still be in flight."""
        return key in self._kept

    def __iter__(self) -> Iterator[Key]:
        return iter(self._kept)

    def has(self, key: Key) -> bool:
        """Return whether the block can be read."""
        kept = self._kept.get(key)
        return kept is not None and kept.ready

    def get(self, key: Key) -> SlotEntry:
        return self._kept[key]

    def find(self, key: Key) -> SlotEntry | None:
        """The same where it may have left; one look into a dict, which any thread may take."""
        return self._kept.get(key)

    def put(self, key: Key, parent: Key, seconds: float) -> int | None:
        """A slot for a page that is not here; pinned until `ready`. None: everything here has to stay."""
        if key in self._kept:
            raise ValueError(f"page {key.hex()} has a slot already")
        self.pin(parent)  # what a page is stored behind must not leave for it
        slot = self._free.pop() if self._free else self._evict()
        self.unpin(parent)
        if slot is None:
            return None
        self._turn += 1
        self._kept[key] = SlotEntry(
            slot, parent, seconds, self._clock + seconds, self._turn, pins=1
        )
        self._children[parent] += 1
        return slot

    def restore(self, entries: Mapping[Key, tuple[int, Key, float]]) -> None:
        """Fill an empty table with stored slots, with the parent and the recompute seconds of each."""
        taken = {slot for slot, _, _ in entries.values()}
        self._free = [slot for slot in self._free if slot not in taken]
        for key, (slot, parent, seconds) in entries.items():
            self._turn += 1
            self._kept[key] = SlotEntry(slot, parent, seconds, seconds, self._turn, ready=True)
            self._children[parent] += 1
        for key in entries:
            self._enter(key)

    def ready(self, key: Key) -> None:
        """Its bytes are there."""
        self._kept[key].ready = True
        self.unpin(key)

    def use(self, key: Key) -> None:
        """Record a use of a block."""
        kept = self._kept[key]
        self._turn += 1
        kept.rank, kept.turn = self._clock + kept.seconds, self._turn
        self._enter(key)

    def pin(self, key: Key) -> None:
        if key in self._kept:
            self._kept[key].pins += 1

    def unpin(self, key: Key) -> None:
        if key in self._kept:
            self._kept[key].pins -= 1
            self._enter(key)

    def drop(self, key: Key) -> None:
        """Forget it, even if it is pinned: its bytes are wrong, or did not come."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._free.append(kept.slot)
            self._left(kept)

    def clear(self) -> None:
        for key in list(self._kept):
            self.drop(key)

    def _evict(self) -> int | None:
        while self._line:
            rank, turn, key = heappop(self._line)
            kept = self._kept.get(key)
            if kept is None or kept.turn != turn or not self._may_leave(key):
                continue
            del self._kept[key]
            self._clock = rank
            self._left(kept)
            self.evicted += 1
            return kept.slot
        return None

    def _left(self, kept: SlotEntry) -> None:
        self._children[kept.parent] -= 1
        if not self._children[kept.parent]:
            del self._children[kept.parent]
        self._enter(kept.parent)

    def _may_leave(self, key: Key) -> bool:
        return not self._kept[key].pins and key not in self._children

    def _enter(self, key: Key) -> None:
        if key not in self._kept or not self._may_leave(key):
            return
        kept = self._kept[key]
        heappush(self._line, (kept.rank, kept.turn, key))
        if len(self._line) > MOST_STALE * self.slots:
            kept_now = self._kept.items()
            self._line = [(one.rank, one.turn, k) for k, one in kept_now if self._may_leave(k)]
            heapify(self._line)
