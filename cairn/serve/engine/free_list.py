"""The pages that no request uses, in the order in which they will be taken.

A doubly linked list that lives in two arrays: a page is its own node, so that any page, also one in the middle that
was just found in the prefix cache, leaves in constant time. Page 0 is never given out; it closes the circle. A second
node that is no page, the border, separates what is of little use from what is kept as long as possible.

    0 <-> 7 <-> 3 <-> border <-> 9 <-> 4 <-> 0          next: pop() takes 7
          ^ prepend  ^ recycle         ^ append

It knows nothing about what the pages hold. A page is in the list or not; adding it twice would be a bug of the caller,
and is refused.
"""

from collections.abc import Iterator

OUTSIDE = -1  # in `_next`: this page is not in the list


class FreeList:
    __slots__ = ("_border", "_next", "_previous", "length")

    def __init__(self, pages: int, first: int = 1) -> None:
        """All pages from `first` to `pages` - 1, in ascending order."""
        self._border = pages
        outside = [OUTSIDE] * (first - 1)
        self._next = [first, *outside, *range(first + 1, pages + 1), 0]
        self._previous = [pages, *outside, 0, *range(first, pages)]
        self.length = pages - first

    def __len__(self) -> int:
        return self.length

    def __contains__(self, page: int) -> bool:
        return page != 0 and self._next[page] != OUTSIDE

    def __iter__(self) -> Iterator[int]:
        page = self._next[0]
        while page:
            if page != self._border:
                yield page
            page = self._next[page]

    def pop(self) -> int:
        page = self._next[0]
        if page == self._border:
            page = self._next[page]
        self.remove(page)
        return page

    def remove(self, page: int) -> None:
        after, before = self._next[page], self._previous[page]
        if page == 0 or after == OUTSIDE:
            raise ValueError(f"page {page} is not free")
        self._next[before] = after
        self._previous[after] = before
        self._next[page] = OUTSIDE
        self.length -= 1

    def append(self, page: int) -> None:
        """Append to the end, to be allocated last."""
        self._insert(page, self._previous[0], 0)

    def recycle(self, page: int) -> None:
        """Insert before the border: allocated after other recycled blocks and before all appended ones."""
        self._insert(page, self._previous[self._border], self._border)

    def prepend(self, page: int) -> None:
        """Insert at the front, to be allocated next."""
        self._insert(page, 0, self._next[0])

    def _insert(self, page: int, before: int, after: int) -> None:
        if page == 0 or self._next[page] != OUTSIDE:
            raise ValueError(f"page {page} is free already")
        self._next[before] = self._previous[after] = page
        self._previous[page] = before
        self._next[page] = after
        self.length += 1

    def check_integrity(self) -> None:
        """Both directions describe the same circle, and its length is the one that is counted."""
        forward = [0, *self]
        around = [0]
        page = self._previous[0]
        while page and len(around) <= len(forward) + 1:
            if page != self._border:
                around.insert(1, page)
            page = self._previous[page]
        if around != forward or len(forward) - 1 != self.length:
            raise ValueError(
                f"the free list counts {self.length} pages, has {len(forward) - 1} forwards and "
                f"{len(around) - 1} backwards"
            )
