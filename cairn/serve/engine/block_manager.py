"""Block manager: the KV-cache blocks of each request.

Pages are numbers from 1 to N - 1; what they hold is on the device, and this file has never seen it. Page 0 is the null
page: padding points at it and no request owns it. A request has a page table for each cache group, all equally long. A
table only grows at its end, and shared pages are full ones, which are never written again, so that no page is ever
copied.

    free --allocate--> held by one --found as a prefix--> held by several
      ^------------------free----------------------------------'    (a full page stays findable while it is free)

    full group     3 8 5 9 2 7          one page for every place
    window group   0 0 0 4 6 1          what lies behind the window is freed while the request runs
    state group    one slot that changes with every token; snapshots of it are free slots that can be found

How often a page is held and which are free is counted in `page_pool`. Free pages are taken in this order: those without
a hash; those that a window has left behind, unless another request is likely to branch off there (`anchors`); then the
pages freed longest ago, and of one request its tail before its head, because a head is what others share.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from cairn.core.errors import RequestError
from cairn.models.cache import ONE_GROUP, CacheGroup
from cairn.serve.engine.anchors import anchors_of
from cairn.serve.engine.page_pool import IntegrityError, PagePool
from cairn.serve.engine.prefix_cache import Entry, PrefixCache, PrefixHit
from cairn.serve.engine.request import Request
from cairn.serve.engine.spans import longest_span


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Pages, without the null page: `used + free == total`, and `cached` are among the free."""

    total: int
    used: int
    free: int
    cached: int  # free, and would still be found as a prefix
    groups: tuple[int, ...]  # used, of each cache group


class Holding(msgspec.Struct, eq=False):
    """Progress of a request's windows and states."""

    filled: int = 0  # places of its tables that have pages in every group
    behind: list[int] = []  # of each window group, places that are freed
    anchors: list[int] = []  # lengths in pages where another request may branch off
    left: list[tuple[int, Entry]] = []  # pages before an anchor that a window has left behind


class Tiers(Protocol):
    """Block events for cache tiers beyond the device."""

    def filled(self, request: Request, group: int, place: int, page: int) -> None: ...
    def first_missing(self, request: Request, place: int) -> int: ...
    def taken(self, page: int) -> None: ...
    def left(self, request: Request) -> None: ...


class BlockManager:
    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        states: int = 0,
    ) -> None:
        """`states`: slots for states and their snapshots, where a group has some."""
        kinds = [group.kind for group in groups]
        if kinds[:1] == ["state"] or kinds != sorted(kinds, key="state".__eq__):
            raise ValueError(f"groups with a state come behind one with pages, not {kinds}")
        self.pages = pages
        self.page_size = page_size
        self.groups = tuple(groups)
        self.prefix = PrefixCache(pages + states, page_size, prefix_caching, self.groups)
        self.windowed = "window" in kinds
        self.stateful = "state" in kinds
        self.tiers: Tiers | None = None  # beyond the device
        self.restores: list[tuple[int, int]] = []  # pages to copy before the next step, from and to
        self.saves: list[tuple[int, int]] = []  # and behind it
        self._unsaved: list[tuple[Request, int, list[int]]] = []  # snapshots of this step
        self._windows = [(i, group) for i, group in enumerate(groups) if group.kind == "window"]
        self._full = kinds.count("full")
        self._paged = self._full + len(self._windows)  # groups that have page tables
        self.pool = PagePool(pages, states, len(self.groups), self._paged, self.prefix)
        self._tables: dict[Request, Holding] = {}  # who holds pages, in the order they got them

    @property
    def free_pages(self) -> int:
        return self.pool.free.length

    def allocate(self, request: Request, upto_tokens: int) -> list[int] | None:
        """Pages until the tables hold `upto_tokens`; None if they are not there, and nothing was touched.

        Returns what was added, for each place one page of every group. A request without a table begins with what
        the prefix cache has, and `computed` is set; its window groups get their pages chunk by chunk, by `prepare`.
        """
        prefix = None if request.blocks else self.prefix.find(request)
        if prefix is None and self.windowed:
            self._leave_behind(request)
        if not self._fits(request, upto_tokens, prefix):
            return None
        first = len(request.blocks)
        places = max(
            -(-upto_tokens // self.page_size) - (first or (prefix.pages if prefix else 0)), 0
        )
        if prefix is not None:
            self._begin(request, prefix)
        later = prefix is not None and self.windowed
        for index, table in enumerate(self._page_tables(request)):
            if later and self.groups[index].kind == "window":
                table += [0] * places
            else:
                table += [self._take(index) for _ in range(places)]
        if not later:
            self._tables[request].filled = len(request.blocks)
        return self.entries(request, first, len(request.blocks))

    def adopt(self, request: Request, tokens: int) -> bool:
        """Tables for a request whose first `tokens` are computed elsewhere; nothing is looked for in the prefix cache.

        Window groups get the pages that the next token sees.
        """
        places = -(-tokens // self.page_size)
        firsts = [g.first_page(tokens, self.page_size) for g in self.groups[: self._paged]]
        if sum(places - first for first in firsts) > self.pool.free.length:
            return False
        self._begin(request, PrefixHit(0, [[] for _ in firsts], []))
        for index, (table, first) in enumerate(
            zip(self._page_tables(request), firsts, strict=True)
        ):
            table += [0] * first + [self._take(index) for _ in range(places - first)]
        holding = self._tables[request]
        holding.filled, holding.behind = places, [firsts[index] for index, _ in self._windows]
        return True

    def seen(self, request: Request, tokens: int) -> list[int]:
        """The pages that hold what token `tokens` sees, group by group."""
        places = -(-tokens // self.page_size)
        pages = []
        for group, table in zip(self.groups, self._page_tables(request), strict=False):
            pages += table[group.first_page(tokens, self.page_size) : places]
        return pages

    def prepare(self, request: Request, upto_tokens: int) -> tuple[int, int, list[int]]:
        """Give window groups pages for the tokens before `upto_tokens`, as far as there are free ones.

        Returns how many tokens have pages in every group, and what was added: the first place, and the entries.
        """
        self._leave_behind(request)
        holding, tables = self._tables[request], self._page_tables(request)
        first = holding.filled
        needed = -(-upto_tokens // self.page_size) - first
        places = max(0, min(needed, self.pool.free.length // len(self._windows)))
        for index, _ in self._windows:
            tables[index][first : first + places] = [self._take(index) for _ in range(places)]
        holding.filled = first + places
        ready = min(holding.filled * self.page_size, upto_tokens)
        return ready, first, self.entries(request, first, holding.filled)

    def entries(self, request: Request, first: int, last: int) -> list[int]:
        """Places `first .. last` of its tables, for each place one page of every group."""
        if not request.more_blocks:
            return request.blocks[first:last]
        tables = [table[first:last] for table in self._page_tables(request)]
        return [page for place in zip(*tables, strict=True) for page in place]

    def free(self, request: Request) -> None:
        """Give back all tables, their tails first."""
        if not request.blocks:
            return
        if self.tiers is not None:
            self._offer_windows(request)
            self.tiers.left(request)
        holding = self._tables.pop(request)
        tables = self._page_tables(request)
        for place in reversed(range(len(request.blocks))):
            for table in tables:
                if table[place]:
                    self.pool.release(table[place])
        for page in request.states:
            self.pool.release(page)
        for page, entry in holding.left:  # as recent as the rest of the conversation
            if page in self.pool.free and self.prefix.entry(page) is entry:
                self.pool.free.remove(page)
                self.pool.free.append(page)
        # A chunk in flight may still show the old lists.
        request.blocks, request.more_blocks, request.states = [], [], []
        request.computed = 0

    def publish(self, request: Request, filled: int) -> list[int]:
        first = request.published
        fresh = self.prefix.publish(request, filled)
        if fresh and self.tiers is not None:
            self._offer(request, self.tiers, first)
        return fresh

    def open_windows(self, request: Request, last: int) -> bool:
        """Pages of window groups for what is seen from behind `last` pages, whose tokens are not computed here.

        False: they are not there, and nothing was touched.
        """
        if not self.windowed:
            return True
        holding, tables = self._tables[request], self._page_tables(request)
        firsts = [
            group.first_page(last * self.page_size, self.page_size) for _, group in self._windows
        ]
        if sum(last - max(first, holding.filled) for first in firsts) > self.pool.free.length:
            return False
        for at, (index, group) in enumerate(self._windows):
            for place in range(holding.behind[at], min(firsts[at], holding.filled)):
                page, tables[index][place] = tables[index][place], 0
                self._leave(page, self._anchored(holding, group, place), holding)
            begin = max(firsts[at], holding.filled)
            tables[index][begin:last] = [self._take(index) for _ in range(begin, last)]
            holding.behind[at] = max(holding.behind[at], firsts[at])
        holding.filled = last
        return True

    def cut(self, request: Request, start: int, end: int) -> int:
        """End of a chunk so that a snapshot can be taken at an anchor within it."""
        size = self.page_size
        inside = (n * size for n in self._tables[request].anchors if start < n * size < end)
        return next(inside, end)

    def save_state(self, request: Request, computed: int) -> list[int]:
        """Take a snapshot of the states if this is an anchor and there is room; returns its pages."""
        length = computed // self.page_size
        is_anchor = computed % self.page_size == 0 and length in self._tables[request].anchors
        room = self.pool.free_states.length
        if not is_anchor or not self.prefix.enabled or room < len(request.states):
            return []
        snapshots = [self._take(index) for index in range(self._paged, len(self.groups))]
        self._unsaved.append((request, length, snapshots))
        self.saves += zip(request.states, snapshots, strict=True)
        return snapshots

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Pages to copy before and behind the step that was just decided, from and to.

        Its snapshots are free and findable from the next step on: this one restores before it saves.
        """
        for request, length, snapshots in self._unsaved:
            self.prefix.publish_state(request, length, snapshots)
            for page in snapshots:
                self.pool.release(page)
        copies, self._unsaved = (self.restores, self.saves), []
        self.restores, self.saves = [], []
        return copies

    def forget(self, pages: Sequence[int]) -> None:
        """These pages were published, but the step that should have filled them never ran."""
        for page in pages:
            self.pool.drop(page, is_free=page < self.pages and page in self.pool.free)

    def usage(self) -> Usage:
        total, free = self.pages - 1, self.pool.free.length
        return Usage(
            total=total,
            used=total - free,
            free=free,
            cached=self.pool.cached,
            groups=tuple(self.pool.used),
        )

    def reset(self) -> None:
        """Forget every prefix, as after a change of the weights."""
        used = self.pages - 1 - self.pool.free.length
        if used:
            raise RequestError(
                f"the prefix cache cannot be reset: {used} of {self.pages - 1} pages are in use",
                hint="wait for the running requests, or abort them",
            )
        self.pool.drop_all()

    def take_over(self, other: "BlockManager") -> None:
        """Go on with the pages of another manager, equally many and all of them free, and what can be found in them."""
        self.prefix, self.tiers = other.prefix, other.tiers
        self.pool.take_over(other.pool)

    # -- what is missing, and what is there ----------------------------------------------------------

    def _fits(self, request: Request, upto_tokens: int, prefix: PrefixHit | None) -> bool:
        """Return whether enough blocks are free and, for a new request, slots for its states."""
        if prefix is not None and self.pool.free_states.length < len(self.groups) - self._paged:
            return False
        return self._needed(request, upto_tokens, prefix) <= self._available(prefix)

    def _needed(self, request: Request, upto_tokens: int, prefix: PrefixHit | None) -> int:
        """Pages for longer tables; of a request that begins, windows count with what they will need at once."""
        places = -(-upto_tokens // self.page_size)
        if prefix is None:
            return max(places - len(request.blocks), 0) * self._paged
        places = max(places - prefix.pages, 0)
        needed = places * self._full
        span = longest_span(request) if request.pieces and self.windowed else 0
        for index, group in self._windows:
            hit_pages = sum(page > 0 for page in prefix.tables[index])
            needed += min(places, group.most_pages(upto_tokens, self.page_size, span) - hit_pages)
        return needed

    def _available(self, prefix: PrefixHit | None) -> int:
        """Free pages that are not themselves part of what was found."""
        if prefix is None or not prefix.pages:
            return self.pool.free.length
        taken = (page for table in prefix.tables for page in table if page)
        return self.pool.free.length - sum(self.pool.holders[page] == 0 for page in taken)

    def _page_tables(self, request: Request) -> list[list[int]]:
        return [request.blocks, *request.more_blocks]

    # -- what goes to tiers beyond the device -----------------------------------------------------

    def _offer(self, request: Request, tiers: Tiers, first: int) -> None:
        """Pages that have just become findable; of windows only those that another request may begin with."""
        holding = self._tables[request]
        for index, (group, table) in enumerate(
            zip(self.groups, self._page_tables(request), strict=True)
        ):
            full = group.kind == "full"
            begin = tiers.first_missing(request, first) if full else first
            for place in range(begin, request.published):
                if table[place] and (full or self._anchored(holding, group, place)):
                    tiers.filled(request, index, place, table[place])

    def _offer_windows(self, request: Request) -> None:
        """Offer the blocks of a finished request's windows to the tiers, for the next turn of the conversation."""
        for index, _ in self._windows if self.tiers is not None else ():
            table = self._page_tables(request)[index]
            for place in range(min(request.published, len(table))):
                if table[place] and self.tiers is not None:
                    self.tiers.filled(request, index, place, table[place])

    # -- what changes hands -----------------------------------------------------------------------

    def _begin(self, request: Request, prefix: PrefixHit) -> None:
        for index, table in enumerate(prefix.tables):
            for page in table:
                if page:
                    self.pool.hold(page, index)
        request.blocks, *request.more_blocks = [list(table) for table in prefix.tables]
        request.computed = prefix.pages * self.page_size
        self.prefix.resume(request, prefix.pages)
        self._tables[request] = holding = Holding(filled=prefix.pages)
        if self.windowed or self.stateful:
            # A snapshot serves exactly its length, and the same prompt needs its last token computed again.
            prompt = request.prompt[:-1] if self.stateful else request.prompt
            holding.anchors = anchors_of(prompt, request.eos_ids, self.page_size)
            size = self.page_size
            holding.behind = [g.first_page(request.computed, size) for _, g in self._windows]
        if self.stateful:
            for page in prefix.states:  # found again: it is worth keeping
                self.pool.free_states.remove(page)
                self.pool.free_states.append(page)
            request.states = [self._take(i) for i in range(self._paged, len(self.groups))]
            self.restores += zip(prefix.states, request.states, strict=False)
        if request.ledger.preemptions == 0:
            request.cached = min(request.computed, len(request.prompt))  # of an answer that moved
            statistics = self.prefix.statistics
            statistics.requests += 1
            statistics.tokens += len(request.prompt)
            statistics.hits += request.cached

    def _leave_behind(self, request: Request) -> None:
        """Free what no window sees any more, whatever becomes of the tokens in flight."""
        holding, tables = self._tables[request], self._page_tables(request)
        next_token = min(request.computed, request.known - 1)  # rejected drafts are computed again
        for at, (index, group) in enumerate(self._windows):
            first = group.first_page(next_token, self.page_size)
            for place in range(holding.behind[at], first):
                page, tables[index][place] = tables[index][place], 0
                self._leave(page, self._anchored(holding, group, place), holding)
            holding.behind[at] = max(holding.behind[at], first)

    def _anchored(self, holding: Holding, group: CacheGroup, place: int) -> bool:
        """Is this page seen from behind an anchor, or from a page before it, where the same prompt would go on?"""
        size = self.page_size
        return any(group.first_page((n - 1) * size, size) <= place < n for n in holding.anchors)

    def _leave(self, page: int, anchored: bool, holding: Holding) -> None:
        entry = self.prefix.entry(page)
        if anchored and entry is not None:
            holding.left.append((page, entry))
        self.pool.release(page, keep=anchored)

    def _take(self, group: int) -> int:
        page = self.pool.take(group)
        if self.tiers is not None:
            self.tiers.taken(page)
        return page

    # -- is everything still in order ---------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise with what is wrong: tables are equally long, and hold the pages that are counted as held."""
        self.pool.check_integrity(list(self._listed()))

    def _listed(self) -> Iterator[tuple[int, int]]:
        """Every page that a request holds, with its group; the null page only where it must not stand."""
        for request, holding in self._tables.items():
            tables = self._page_tables(request)
            if len({len(table) for table in tables}) != 1 or len(tables) != self._paged:
                raise IntegrityError(f"the tables of {request!r} are not equally long")
            behind = {index: holding.behind[at] for at, (index, _) in enumerate(self._windows)}
            for index, table in enumerate(tables):
                first = behind.get(index, 0)
                last = holding.filled if index in behind else len(table)
                if any(table[:first]) or any(table[last:]):
                    raise IntegrityError(f"{request!r} holds pages outside {first} .. {last}")
                yield from ((page, index) for page in table[first:last])
            yield from ((page, index) for index, page in enumerate(request.states, self._paged))
