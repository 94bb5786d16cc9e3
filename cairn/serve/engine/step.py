"""A step as data: which tokens of which requests it computes, and what it brings them. Pure Python.

Step: chunks, ... --runner--> drawn tokens --Scheduler.update--> Advance for each request that got some
"""

from collections.abc import Sequence

import msgspec

from cairn.serve.engine.request import DRAFTED, Limits, Request

NO_TOKENS: tuple[int, ...] = ()


# Chunks and advances are made for every request in every step. A Struct that the garbage collector need not
# look at (a request points to none of them) costs a fifth of a NamedTuple.
class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens `start .. start + count` of one request, computed in one step."""

    request: Request
    start: int
    count: int
    first_page: int  # where `pages` go in the request's table; 0 only right after admission
    pages: Sequence[int]  # added to the tables since the row's last chunk; by place, then group
    samples: int  # its last tokens that are followed by one that is drawn: 1, and 1 for each draft
    drafts: Sequence[int] = ()  # its last tokens, which are guesses: not sampled yet
    ahead: bool = False  # drafts are in flight: `start` is right if all hold, and the device knows


class Advance(msgspec.Struct, frozen=True, eq=False, gc=False):
    request: Request
    tokens: Sequence[int]  # several where drafts held; none: it failed
    finished: bool


class Step(msgspec.Struct, eq=False):
    number: int
    chunks: list[Chunk] = []
    sampling: list[Request] = []  # the requests of the chunks that sample, in the order of chunks
    drafts: list[Sequence[int]] = []  # of each of those; empty where none has any
    tokens: int = 0  # of all chunks together
    prefill: int = 0  # of those, known before
    read: int = 0  # entries of the cache that attention looks at, summed over the chunks
    pairs: int = 0  # of a query and a key
    admitted: list[Request] = []  # have got a row in this step
    preempted: list[Request] = []  # have lost row and pages, and wait again
    failed: list[Request] = []  # cannot go on, alone; `error` says why, `update` reports them
    filled: list[tuple[Request, list[int]]] = []  # pages that this step makes findable
    restores: list[tuple[int, int]] = []  # pages of states to copy before it, from and to
    saves: list[tuple[int, int]] = []  # and behind it
    head: bool = True  # the passes of a head that drafts, if there is one, run behind it
    least: Sequence[float] | None = None  # and from which chances on; see `HeadDrafts`
    guesses: bool = True  # it may verify what a head has drafted
    took: tuple[float, float] | None = None  # seconds of it, and of these passes, where that counts

    @property
    def drafts_on_device(self) -> bool:
        """Are there drafts that only the device knows?"""
        return any(DRAFTED in drafts for drafts in self.drafts)

    @property
    def draws(self) -> int:
        """Number of tokens that the step samples."""
        return len(self.sampling) + sum(map(len, self.drafts))


def joined(advances: list[Advance]) -> list[Advance]:
    """Merge consecutive results of the same request."""
    merged: list[Advance] = []
    for advance in advances:
        if merged and merged[-1].request is advance.request:
            tokens = (*merged.pop().tokens, *advance.tokens)
            advance = Advance(advance.request, tokens, advance.finished)
        merged.append(advance)
    return merged


def begun_pages(chunks: Sequence[Chunk], limits: Limits) -> list[int]:
    """New pages that nothing has written to: those of a prefix that was found, or is being loaded, have been."""
    groups, begun = limits.page_tables, []
    for chunk in chunks:
        if not chunk.pages:
            continue
        # Only right after admission some of them belong to a prefix.
        first, loading = chunk.first_page, chunk.request.loading
        places = range(first, first + len(chunk.pages) // groups)
        known = 0 if first else -(-chunk.start // limits.page_size)
        for place in places:
            if place >= known and (loading is None or not loading.first <= place < loading.last):
                begun += chunk.pages[(place - first) * groups : (place - first + 1) * groups]
    return begun
