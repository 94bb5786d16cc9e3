"""The tiers of one engine: what leaves the device, what comes back, and who waits for it.

    blocks     filled(..), taken(page), left(request)       scheduler   begin(request) -> request.loading
    engine     poll .. schedule .. scheduled .. hold_steps, launch .. landed          all in the engine's thread

Copies and reads are asked for here and looked after by `poll`. `wait` waits, which the engine calls when it has nothing
else to do, and so do `settle` and `clear`, before memory is given back or everything is forgotten; nothing else does.
"""

import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import msgspec

from cairn.serve.engine.prefix_cache import Entry
from cairn.serve.engine.request import Request
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Step
from cairn.serve.tiers.disk_tier import DiskTier, Read
from cairn.serve.tiers.load_plan import (
    Compute,
    Loading,
    LoadPlan,
    Source,
    Stored,
    longest_stored,
    plan_load,
    worth_storing,
)
from cairn.serve.tiers.page_copies import Copied, PageCopies
from cairn.serve.tiers.peer_tier import PeerTier
from cairn.serve.tiers.recompute import Recompute
from cairn.serve.tiers.shared_pages import SharedPages
from cairn.serve.tiers.slot_table import Key, SlotTable

HOST, DISK = 0, 1
LATENCY_S = 0.002  # from the wish for pages until a step sees that they are there
NEWEST = 0.3  # what the last load counts for in the rate
TELLING_BYTES = 1 << 20  # of a load that says something about the rate
NAP_S = 0.02  # the longest wait for the disk
OF_STEP = 0.5  # a copy to the host may take this share of the step beside it


class Fresh(msgspec.Struct, frozen=True, gc=False):
    """A page that a scheduled step fills, to be stored once that has landed."""

    key: Key
    parent: Key
    page: int
    entry: Entry  # as long as the prefix cache has it, the page holds this
    seconds: float
    lasting: bool  # its key means the same in another process


class Load(msgspec.Struct, eq=False):
    """Pages that a request waits for."""

    loading: Loading
    keys: list[Key]
    pages: list[int]
    read: list[Key] = []  # of the keys, those that come from the disk
    reading: "Future[Read] | None" = None
    copied: Copied | None = None
    wanted: bool = True  # False: its request has left


class TierCounts(msgspec.Struct):
    """Since the start."""

    host_tokens: int = 0  # loaded, of prompts
    disk_tokens: int = 0
    stored_pages: int = 0
    skipped_pages: int = 0  # not stored: no room, or too slow to be worth it
    failed_loads: int = 0
    load_s: float = 0.0  # that requests waited


class PageTiers:
    def __init__(
        self,
        scheduler: Scheduler,
        copies: PageCopies,
        compute: Compute,
        disk: DiskTier | PeerTier | None = None,
    ) -> None:
        """`disk`: the tier behind the host, be it a disk, an object store or the hosts of other servers."""
        self.scheduler, self.copies, self.compute, self.disk = scheduler, copies, compute, disk
        self.shared: SharedPages | None = None  # through which other servers read the host's pages
        self.host = SlotTable(len(copies.memory_SB))
        self.rate = copies.measure()  # bytes per second
        self.counts = TierCounts()
        self._size = scheduler.limits.page_size
        self._weights = b""  # the identity of requests that only the present ones have computed
        self._fresh: list[Fresh] = []
        self._scheduled: deque[tuple[int, list[Fresh]]] = deque()  # by the step that fills them
        self._unstored: deque[Fresh] = deque()  # filled, and not copied yet
        self._storing: list[tuple[Copied, list[Fresh]]] = []
        self._decode_s = 0.0  # of a step without prompts
        self._flying: Step | None = None  # the step that was launched last
        self._loads: dict[Request, Load] = {}
        self._unwanted: list[Load] = []  # under way, for requests that have left
        self._busy: dict[int, Copied] = {}  # pages of the device that a copy reads or writes
        self._holds: list[Copied] = []  # the next step begins behind these

    # -- what leaves the device -------------------------------------------------------------------

    def filled(self, request: Request, group: int, place: int, page: int) -> None:
        """This page of its table is findable; the step that fills it may not have run."""
        if not request.identity.startswith(self._weights):
            return
        entry = self.scheduler.blocks.prefix.entry(page)
        key = self._key(request, group, place)
        if entry is None or key in self.host:
            return
        parent = self._key(request, group, place - 1) if place else b""
        seconds = self.compute(place, place + 1) / len(self.scheduler.blocks.groups)
        self._fresh.append(Fresh(key, parent, page, entry, seconds, not request.identity))

    def weights_changed(self, identity: bytes) -> None:
        """Requests that run go on under the name of the old ones: what they fill from now on is stored nowhere."""
        self._weights = identity

    def first_missing(self, request: Request, place: int) -> int:
        """The first of the places before this one from which on the host has nothing: they are stored with it."""
        while place and self._key(request, 0, place - 1) not in self.host:
            place -= 1
        return place

    def scheduled(self, step: Step) -> None:
        """Associate the newly cached blocks with the step that fills them."""
        self._flying = step
        if self._fresh:
            self._scheduled.append((step.number, self._fresh))
            self._fresh = []

    def failed(self, step: Step) -> None:
        """Handle a failed step: no copy runs with it, and its blocks are not stored."""
        if self._flying is step:
            self._flying = None
        self._scheduled = deque(one for one in self._scheduled if one[0] != step.number)

    def landed(self, step: Step, seconds: float) -> None:
        """Store what it has filled, and what its tokens have made findable; it took so long."""
        if isinstance(self.compute, Recompute):
            self.compute.note(step, seconds)
        if not step.prefill:
            self._decode_s += NEWEST * (seconds - self._decode_s)
        if self._flying is step:
            self._flying = None
        while self._scheduled and self._scheduled[0][0] <= step.number:
            self._unstored += self._scheduled.popleft()[1]
        self._unstored += self._fresh
        self._fresh = []
        # So many cannot be there any more: forget those whose page holds something else by now.
        if len(self._unstored) > 2 * self.scheduler.limits.pages:
            entry = self.scheduler.blocks.prefix.entry
            self._unstored = deque(one for one in self._unstored if entry(one.page) is one.entry)
        self._store()

    def _pages_per_copy(self) -> int:
        """Pages of the next copy to the host: as many as take a share of the step in flight.

        The tokens that a step draws come to the host by the same engine of the device, and would wait behind a longer
        copy. Without a step nothing would wait.
        """
        if self._flying is None:
            return len(self._unstored)
        prompt = self.compute(0, -(-self._flying.prefill // self._size))
        return max(1, int(OF_STEP * (self._decode_s + prompt) * self.rate / self.copies.page_bytes))

    def _store(self) -> None:
        """The next pages, once those before them are there."""
        if not self._unstored or (self._storing and self._flying is not None):
            return
        prefix, source = self.scheduler.blocks.prefix, Source(self.rate, 0.0)
        batch, slots = [], []
        most = self._pages_per_copy()
        while self._unstored and len(batch) < most:
            one = self._unstored.popleft()
            if prefix.entry(one.page) is not one.entry or one.key in self.host:
                continue
            slot = None
            is_timed = one.seconds > 0  # else no step with a prompt has been timed yet
            if not is_timed or worth_storing(self.copies.page_bytes, source, one.seconds):
                slot = self.host.put(one.key, one.parent, one.seconds)
            if slot is None:
                self.counts.skipped_pages += 1
                continue
            batch.append(one)
            slots.append(slot)
        if not batch:
            return
        copied = self.copies.out([one.page for one in batch], slots)
        self._storing.append((copied, batch))
        self._busy |= {one.page: copied for one in batch}

    def _stored(self, batch: list[Fresh], copied: Copied) -> None:
        self.counts.stored_pages += len(batch)
        for one in batch:
            self.host.ready(one.key)
            if self.shared is not None and one.lasting:
                self.shared.offer(one.key)
            if self._busy.get(one.page) is copied:
                del self._busy[one.page]
            if self.disk is not None and one.lasting and self.disk.wants(one.key, one.parent):
                page_B = self.copies.memory_SB[self.host.get(one.key).slot]
                if self.disk.write(one.key, one.parent, one.seconds, page_B):
                    self.host.pin(one.key)

    # -- what comes back ----------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Start loading blocks of a newly admitted request and set its `loading`."""
        if request.params.whole_prompt or request.computed % self._size:
            return
        hit, most = request.computed // self._size, (request.known - 1) // self._size
        most = min(most, len(request.hashes))

        def has(group: int, place: int) -> bool:
            return self._tier(request, group, place) is not None

        last = longest_stored(self.scheduler.blocks.groups, self._size, hit, most, has)
        if last > hit and (plan := self._plan(request, hit, last)).kind != "compute":
            self._load(request, plan)

    def _plan(self, request: Request, hit: int, last: int) -> LoadPlan:
        blocks, page_bytes = self.scheduler.blocks, self.copies.page_bytes
        firsts = [max(g.first_page(last * self._size, self._size), hit) for g in blocks.groups]
        places = []
        for place in range(hit, last):
            groups = [index for index, first in enumerate(firsts) if place >= first]
            tiers = [self._tier(request, index, place) for index in groups]
            places.append(Stored(DISK if DISK in tiers else HOST, len(groups) * page_bytes))
        waiting = sum(len(load.keys) for load in self._loads.values()) * page_bytes
        sources = [Source(self.rate, LATENCY_S + waiting / self.rate)]
        sources += [self.disk.source] if self.disk is not None else []
        end = -(-request.total // self._size)
        if blocks.windowed:
            return plan_load(hit, places, end, sources, self.compute, lasts=[last], both_ends=False)
        return plan_load(hit, places, end, sources, self.compute)

    def _load(self, request: Request, plan: LoadPlan) -> None:
        blocks = self.scheduler.blocks
        places = [
            (index, place)
            for index, group in enumerate(blocks.groups)
            for place in range(
                max(group.first_page(plan.last * self._size, self._size), plan.first), plan.last
            )
        ]
        keys = [self._key(request, *at) for at in places]
        here = [key for key in keys if self.host.has(key)]
        read = [key for key in keys if not self.host.has(key)]
        for key in here:
            self.host.use(key)
            self.host.pin(key)
        room = self._make_room(read)
        if len(room) < len(read) or not blocks.open_windows(request, plan.last):
            for key in here:
                self.host.unpin(key)
            for key in room:
                self.host.drop(key)
            return
        tables = (request.blocks, *request.more_blocks)
        pages = [tables[index][place] for index, place in places]
        request.loading = Loading(plan.first, plan.last, time.monotonic())
        load = self._loads[request] = Load(request.loading, keys, pages, read)
        if read and self.disk is not None:
            slots = [self.copies.memory_SB[self.host.get(key).slot] for key in read]
            load.reading = self.disk.read(read, slots)
        else:
            self._copy(load)

    def _make_room(self, keys: list[Key]) -> list[Key]:
        """Slots of the host that pages of the disk pass through; which of them have got one."""
        slots: list[Key] = []
        for key in keys:
            if self.disk is None or key in self.host:  # it is on its way here for another request
                break
            origin = self.disk.origin(key)  # None: it has left since the plan was made
            if origin is None or self.host.put(key, origin.parent, origin.seconds) is None:
                break
            slots.append(key)
        return slots

    def _copy(self, load: Load) -> None:
        self.hold_steps()  # a copy of what the pages held before may be under way
        slots = [self.host.get(key).slot for key in load.keys]
        load.copied = self.copies.into(slots, load.pages)

    def left(self, request: Request) -> None:
        """The request gives its pages back."""
        load = self._loads.pop(request, None)
        request.loading = None
        if load is not None:
            load.wanted = False
            self._unwanted.append(load)
            if load.copied is not None:
                self._busy |= dict.fromkeys(load.pages, load.copied)

    def taken(self, page: int) -> None:
        """The page is about to hold something else."""
        copied = self._busy.pop(page, None)
        if copied is not None and copied not in self._holds:
            self._holds.append(copied)

    def hold_steps(self) -> None:
        """Make later device work wait for copies of blocks that were reassigned."""
        for copied in self._holds:
            copied.hold_steps()
        self._holds.clear()

    # -- looking after it ---------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def poll(self) -> None:
        """See what has ended."""
        for copied, batch in [one for one in self._storing if one[0].done()]:
            self._storing.remove((copied, batch))
            self._stored(batch, copied)
        self._store()
        for key in self.disk.written() if self.disk is not None else ():
            self.host.unpin(key)
        for request, load in list(self._loads.items()):
            self._look(load)
            if load.loading.state != "coming":
                del self._loads[request]
                self._count(request, load)
        for load in self._unwanted:
            self._look(load)
        self._unwanted = [load for load in self._unwanted if load.loading.state == "coming"]

    def settle(self) -> None:
        """Wait for every copy: the pages of the device are about to be given back."""
        self._flying = None
        self._store()
        for copied, _ in self._storing:
            copied.wait()
        for load in self._unwanted:
            if load.reading is not None:
                wait_for([load.reading])
            if load.copied is not None:
                load.copied.wait()
        self.poll()

    def wait(self) -> None:
        """Until something of a load has ended, or for a while: the engine has nothing else to do."""
        for load in self._loads.values():
            if load.copied is not None:
                load.copied.wait()
            elif load.reading is not None:
                wait_for([load.reading], NAP_S)
            return

    def clear(self) -> None:
        """Forget every page, on the disk, too; no request is loading any."""
        self.settle()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
        if self.disk is not None:
            self.disk.close()

    def _look(self, load: Load) -> None:
        if load.reading is not None and load.reading.done():
            self._have_read(load, load.reading.result())
        if load.copied is not None and load.copied.done():
            for key in load.keys:
                self.host.unpin(key)
            for page in load.pages:
                if self._busy.get(page) is load.copied:
                    del self._busy[page]
            if load.copied.bytes >= TELLING_BYTES:
                rate = load.copied.bytes / max(load.copied.seconds, 1e-9)
                self.rate += NEWEST * (rate - self.rate)
            load.loading.state = "landed"

    def _have_read(self, load: Load, read: Read) -> None:
        load.reading = None
        if self.disk is not None:
            self.disk.have_read(load.read, read)
        missing = {*read.damaged, *read.unread}
        for key in load.read:
            if key in missing:
                self.host.drop(key)
            else:
                self.host.pin(key)  # of the load, as those that were here
                self.host.ready(key)
        if not missing and load.wanted:
            self._copy(load)
            return
        for key in load.keys:
            if key not in missing:
                self.host.unpin(key)
        load.loading.state = "failed"

    def _count(self, request: Request, load: Load) -> None:
        counts, ledger = self.counts, request.ledger
        seconds = time.monotonic() - load.loading.began
        counts.load_s += seconds
        ledger.load += seconds
        if load.loading.state == "failed":
            counts.failed_loads += 1
            return
        tokens = (load.loading.last - load.loading.first) * self._size
        from_disk = len(load.read) * tokens // len(load.keys)
        counts.disk_tokens += from_disk
        counts.host_tokens += tokens - from_disk
        ledger.disk_tokens += from_disk
        ledger.host_tokens += tokens - from_disk

    # -- names of pages -------------------------------------------------------------------------------

    def _key(self, request: Request, group: int, place: int) -> Key:
        return bytes([group]) + request.hashes[place]

    def _tier(self, request: Request, group: int, place: int) -> int | None:
        key = self._key(request, group, place)
        if self.host.has(key):
            return HOST
        lasting = self.disk is not None and not request.identity
        return DISK if lasting and self.disk is not None and self.disk.has(key) else None
