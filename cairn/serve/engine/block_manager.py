"""Who holds which page of the KV cache.

Pages are numbers from 1 to N - 1; what they hold is on the device, and this file has never seen it. Page 0 is the null
page: padding points at it and nobody owns it. A request's table only grows at its end, and shared pages are full ones,
which nobody writes again, so that no page is ever copied.

    free --allocate--> held by one --found as a prefix--> held by several
      ^------------------free----------------------------------'    (a full page stays findable while it is free)

Free pages are taken in this order: those without a hash, then the pages freed longest ago, and of one request its
tail before its head, because a head is what others share.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from cairn.core.errors import RequestError
from cairn.serve.engine.free_list import FreeList
from cairn.serve.engine.prefix_cache import PrefixCache
from cairn.serve.engine.request import Request


class IntegrityError(Exception):
    """The books do not add up: a bug of the engine, never a mistake of the user."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Pages, without the null page: `used + free == total`, and `cached` are among the free."""

    total: int
    used: int
    free: int
    cached: int  # free, and would still be found as a prefix


class BlockManager:
    def __init__(self, pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        self.pages = pages
        self.page_size = page_size
        self.prefix = PrefixCache(pages, page_size, prefix_caching)
        self._free = FreeList(pages)
        self._holders = [0] * pages  # how many tables a page is in
        self._cached = 0  # free pages that can be found
        self._tables: dict[Request, None] = {}  # who holds pages, in the order they got them

    @property
    def free_pages(self) -> int:
        return self._free.length

    def can_allocate(self, request: Request, upto_tokens: int) -> bool:
        found = [] if request.blocks else self.prefix.find(request)
        return self._missing(request, upto_tokens, found) <= self._available(found)

    def allocate(self, request: Request, upto_tokens: int) -> list[int] | None:
        """Pages until the table holds `upto_tokens`; returns the added ones, None if they are not there.

        A request without a table begins with what the prefix cache has, and is told so: `computed` is set.
        A None has touched nothing.
        """
        found = [] if request.blocks else self.prefix.find(request)
        missing = self._missing(request, upto_tokens, found)
        if missing > self._available(found):
            return None
        if not request.blocks:
            self._begin(request, found)
        added = [self._take() for _ in range(missing)]
        request.blocks += added
        return found + added if found else added

    def free(self, request: Request) -> None:
        """Give back the whole table, its tail first."""
        if not request.blocks:
            return
        del self._tables[request]
        for page in reversed(request.blocks):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self.prefix:
                    self._free.append(page)
                    self._cached += 1
                else:
                    self._free.prepend(page)
        request.blocks = []  # a chunk in flight may still show the old list
        request.computed = 0

    def publish(self, request: Request, filled: int) -> list[int]:
        return self.prefix.publish(request, filled)

    def forget(self, pages: Sequence[int]) -> None:
        """These pages were published, but the step that should have filled them never ran."""
        for page in pages:
            if page in self._free and page in self.prefix:
                self._cached -= 1
            self.prefix.drop(page)

    def usage(self) -> Usage:
        total, free = self.pages - 1, self._free.length
        return Usage(total=total, used=total - free, free=free, cached=self._cached)

    def reset(self) -> None:
        """Forget every prefix, as after a change of the weights."""
        used = self.pages - 1 - self._free.length
        if used:
            raise RequestError(
                f"the prefix cache cannot be reset: {used} of {self.pages - 1} pages are in use",
                hint="wait for the running requests, or abort them",
            )
        self.prefix.clear()
        self._cached = 0

    def check_integrity(self) -> None:
        """Raise with what is wrong: every page is free or held, and held as often as it is listed."""
        try:
            self._free.check_integrity()
            self.prefix.check_integrity()
        except ValueError as error:
            raise IntegrityError(str(error)) from error
        counted = Counter(page for request in self._tables for page in request.blocks)
        for page in range(1, self.pages):
            listed, held = counted[page], self._holders[page]
            if listed != held or (page in self._free) == (held > 0):
                raise IntegrityError(
                    f"page {page} is in {listed} tables, is counted {held} times and is "
                    f"{'free' if page in self._free else 'not free'}"
                )
        cached = sum(page in self.prefix for page in self._free)
        if cached != self._cached:
            raise IntegrityError(f"{cached} free pages can be found, {self._cached} are counted")
        if counted[0] or self._holders[0]:
            raise IntegrityError("the null page 0 is in a table")

    def _missing(self, request: Request, upto_tokens: int, found: list[int]) -> int:
        have = len(request.blocks) or len(found)
        return max(-(-upto_tokens // self.page_size) - have, 0)

    def _available(self, found: list[int]) -> int:
        """Free pages that are not themselves part of what was found."""
        if not found:
            return self._free.length
        return self._free.length - sum(self._holders[page] == 0 for page in found)

    def _begin(self, request: Request, found: list[int]) -> None:
        for page in found:
            if self._holders[page] == 0:
                self._free.remove(page)
                self._cached -= 1
            self._holders[page] += 1
        request.blocks += found
        request.computed = len(found) * self.page_size
        self.prefix.resume(request, len(found))
        self._tables[request] = None
        if request.ledger.preemptions == 0:
            request.cached = request.computed
            statistics = self.prefix.statistics
            statistics.requests += 1
            statistics.tokens += len(request.prompt)
            statistics.hits += request.computed

    def _take(self) -> int:
        page = self._free.pop()
        if page in self.prefix:
            self._cached -= 1
            self.prefix.drop(page)
        self._holders[page] = 1
        return page
