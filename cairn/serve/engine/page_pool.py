"""Reference counts and free lists of KV-cache blocks, independent of requests and block tables.

    free --take--> held once --hold--> held several times
      ^-------------------release--------------'    (one that the prefix cache knows stays findable while it is free)

Slots of states are numbered behind the pages and have a free list of their own, because a state is far larger than a
page. All groups with pages share one pool, because their pages are equally large: a split that is fixed in advance
would be wrong for every other length of requests. Free pages are taken in this order: those without a hash; those that
were released without `keep`; then the pages released longest ago.
"""

from collections import Counter
from collections.abc import Sequence

from cairn.serve.engine.free_list import FreeList
from cairn.serve.engine.prefix_cache import PrefixCache


class IntegrityError(Exception):
    """The books do not add up: a bug of the engine, never a mistake of the user."""


class PagePool:
    def __init__(
        self, pages: int, states: int, groups: int, paged: int, prefix: PrefixCache
    ) -> None:
        """Page 0 belongs to no request. `paged`: how many groups have pages; the others have slots of states."""
        self.pages, self.prefix = pages, prefix
        self.free = FreeList(pages)
        self.free_states = FreeList(pages + states, first=pages)
        self.holders = [0] * (pages + states)  # how many tables a page is in
        self.group_of = [0] * (pages + states)  # of a page that is held
        self.used = [0] * groups
        self.cached = 0  # free pages that can be found
        self._paged = paged

    def take(self, group: int) -> int:
        """A free page, which can be found no more."""
        page = (self.free if group < self._paged else self.free_states).pop()
        self.drop(page, is_free=True)
        self.holders[page] = 1
        self.group_of[page] = group
        self.used[group] += 1
        return page

    def hold(self, page: int, group: int) -> None:
        """Increment the reference count of a block that is in use or cached."""
        if self.holders[page] == 0:
            self.free.remove(page)
            self.cached -= 1
            self.group_of[page] = group
            self.used[group] += 1
        self.holders[page] += 1

    def release(self, page: int, keep: bool = True) -> None:
        """Decrement the reference count. `keep`: a block that becomes free and is cached is reused last."""
        self.holders[page] -= 1
        if self.holders[page]:
            return
        self.used[self.group_of[page]] -= 1
        free = self._free_list(page)
        if page not in self.prefix:
            free.prepend(page)
            return
        self.cached += page < self.pages
        if keep:
            free.append(page)
        else:
            free.recycle(page)

    def drop(self, page: int, is_free: bool) -> None:
        """Remove a block from the prefix cache."""
        if page in self.prefix:
            self.cached -= is_free and page < self.pages
            self.prefix.drop(page)

    def drop_all(self) -> None:
        self.prefix.clear()
        self.cached = 0

    def take_over(self, other: "PagePool") -> None:
        """The free pages of another pool, equally many and all of them free, and what can be found in them."""
        self.prefix, self.free, self.cached = other.prefix, other.free, other.cached

    def _free_list(self, page: int) -> FreeList:
        """Free list of a block or state slot."""
        return self.free if page < self.pages else self.free_states

    def check_integrity(self, listed: Sequence[tuple[int, int]]) -> None:
        """Raise with what is wrong: every page is free or held, and held as often as it is listed, in its group."""
        try:
            self.free.check_integrity()
            self.free_states.check_integrity()
            self.prefix.check_integrity()
        except ValueError as error:
            raise IntegrityError(str(error)) from error
        counted = Counter(page for page, _ in listed)
        for page in range(1, len(self.holders)):
            times, counted_holders, free = (
                counted[page],
                self.holders[page],
                page in self._free_list(page),
            )
            if times != counted_holders or free == (counted_holders > 0):
                raise IntegrityError(
                    f"page {page} is in {times} tables, is counted {counted_holders} times and is "
                    f"{'free' if free else 'not free'}"
                )
        for page, group in listed:
            entry = self.prefix.entry(page)
            if group != self.group_of[page] or (entry is not None and entry.group != group):
                raise IntegrityError(f"page {page} is of group {self.group_of[page]}, not {group}")
        used = Counter(self.group_of[page] for page in counted if page)
        if [used[group] for group in range(len(self.used))] != self.used:
            raise IntegrityError(f"groups use {dict(used)} pages, {self.used} are counted")
        cached = sum(page in self.prefix for page in self.free)
        if cached != self.cached:
            raise IntegrityError(f"{cached} free pages can be found, {self.cached} are counted")
        if counted[0] or self.holders[0]:
            raise IntegrityError("the null page 0 is in a table")
