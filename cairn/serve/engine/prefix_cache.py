"""Prefix cache: lookup of the blocks that already contain the beginning of a prompt.

A full page is known by a hash of its tokens and of the page before it, so that one hash stands for the whole prefix;
the salt and the identity (weights, adapter) go into the first. Requests with the same prefix, salt and identity find
each other's pages and no others.

    tokens   [ 5 8 2 9 ] [ 5 8 2 9 ] [ 7 7
    hash      h(root,..)  h(h1, ..)   -- not full: has no hash, is never shared

Each cache group has pages of its own for the same hashes. A hit is the longest length that all groups accept:

    full      every page from the beginning
    window    the pages that the next token sees; the null page stands for those before
    state     a snapshot at exactly that length

The cache holds no page and frees none: a page that no request uses stays findable until the block manager takes it for
something else and calls `drop`. Pages are published when the step that fills them is scheduled, because later readers
run later on the same stream, and readers of the same step read a layer's keys after all of them have been written.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from cairn.models.cache import ONE_GROUP, CacheGroup
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.pieces import identity_within
from cairn.serve.engine.request import Request

HASH_BYTES = 16
TOKEN_BYTES = 4
ROOT = bytes(HASH_BYTES)
NEVER = 2**62


class HitStatistics(msgspec.Struct):
    """Counted when a request is admitted for the first time, not again after a preemption."""

    requests: int = 0
    tokens: int = 0  # of their prompts
    hits: int = 0  # tokens of them that were found


class Entry(NamedTuple):
    """Cache entry of a block."""

    group: int
    digest: bytes


class PrefixHit(NamedTuple):
    """The longest prefix that all groups have."""

    pages: int  # its length
    tables: list[list[int]]  # of each group with pages, all equally long; 0: not needed any more
    states: list[
        int
    ]  # of each group with a state, the page of its snapshot; empty without a prefix


class PrefixCache:
    def __init__(
        self,
        pages: int,
        page_size: int,
        enabled: bool = True,
        groups: Sequence[CacheGroup] = ONE_GROUP,
    ) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.groups = tuple(groups)
        self.statistics = HitStatistics()
        self.events: PageEvents | None = None  # while events are followed
        self._entry_of: list[Entry | None] = [None] * pages
        # Of each group. Mostly one page; more when two requests have filled the same prefix side by side.
        self._pages_of: list[dict[bytes, list[int]]] = [{} for _ in self.groups]
        self._paged = sum(group.kind != "state" for group in self.groups)

    def __len__(self) -> int:
        """Number of cached blocks."""
        return sum(len(pages) for by_digest in self._pages_of for pages in by_digest.values())

    def __contains__(self, page: int) -> bool:
        return self._entry_of[page] is not None

    def entry(self, page: int) -> Entry | None:
        return self._entry_of[page]

    def find(self, request: Request) -> PrefixHit:
        """The pages that hold this request's prefix.

        At least one token stays to be computed: a request needs the logits of its last token, and one that wants
        log-probabilities or a vector of its prompt those of more (`Request.reusable`).
        """
        nothing = PrefixHit(0, [[] for _ in range(self._paged)], [])
        most = request.reusable // self.page_size
        if not self.enabled or not most:
            return nothing
        self._extend_hashes(request, most)
        digests = request.hashes[:most]
        length = self._accepted(digests)
        if not length:
            return nothing
        tables = [self._table(index, digests, length) for index in range(self._paged)]
        states = [by_digest[digests[length - 1]][0] for by_digest in self._pages_of[self._paged :]]
        return PrefixHit(length, tables, states)

    def publish(self, request: Request, filled: int) -> list[int]:
        """Make the pages findable that the first `filled` tokens fill; returns the new ones.

        The host has to know these tokens.
        """
        full = filled // self.page_size
        first = request.published
        if not self.enabled or full <= first:
            return []
        self._extend_hashes(request, full)
        fresh = []
        for index, table in enumerate((request.blocks, *request.more_blocks)):
            for page, digest in zip(table[first:full], request.hashes[first:full], strict=True):
                if page:
                    self._enter(page, index, digest)
                    fresh.append(page)
        self.resume(request, full)
        return fresh

    def publish_state(self, request: Request, length: int, snapshots: Sequence[int]) -> None:
        """These pages hold the state behind `length` pages of tokens, one for each group with a state."""
        if self.enabled:
            self._extend_hashes(request, length)
            for index, page in enumerate(snapshots, self._paged):
                self._enter(page, index, request.hashes[length - 1])

    def resume(self, request: Request, pages: int) -> None:
        """The first `pages` of the request are findable; notes which output fills the next one."""
        request.published = pages
        # The page is full when the token after it has been sampled: then its last entry is written.
        at = (pages + 1) * self.page_size - len(request.prompt) + 1
        request.publish_at = at if self.enabled else NEVER

    def drop(self, page: int) -> None:
        """The page is about to hold something else."""
        entry = self._entry_of[page]
        if entry is None:
            return
        self._entry_of[page] = None
        by_digest = self._pages_of[entry.group]
        pages = by_digest[entry.digest]
        pages.remove(page)
        if not pages:
            del by_digest[entry.digest]
            if self.events is not None and entry.group == 0:
                self.events.dropped(entry.digest)

    def clear(self) -> None:
        for by_digest in self._pages_of:
            by_digest.clear()
        self._entry_of = [None] * len(self._entry_of)
        if self.events is not None:
            self.events.cleared()

    def follow(self) -> PageEvents:
        """Everything that can be found, and from now on every change."""
        self.events = PageEvents(self._pages_of[0])
        return self.events

    def check_integrity(self) -> None:
        listed = {
            page: Entry(group, digest)
            for group, by_digest in enumerate(self._pages_of)
            for digest, pages in by_digest.items()
            for page in pages
        }
        entries = {page: entry for page, entry in enumerate(self._entry_of) if entry is not None}
        empty = any(not pages for by_digest in self._pages_of for pages in by_digest.values())
        if listed != entries or len(listed) != len(self) or empty:
            wrong = sorted(set(listed.items()) ^ set(entries.items()))
            raise ValueError(f"the two directions of the prefix cache differ: {wrong[:4]}")

    # -- how long a prefix each group accepts ------------------------------------------------------

    def _accepted(self, digests: Sequence[bytes]) -> int:
        """Longest prefix in blocks that all groups accept, by iterating until the groups agree."""
        length, agreed = len(digests), 0
        while length and agreed < len(self.groups):
            for index, group in enumerate(self.groups):
                accepted = self._longest(index, group, digests, length)
                agreed = agreed + 1 if accepted == length else 1
                length = accepted
                if agreed >= len(self.groups):
                    break
        return length

    def _longest(self, index: int, group: CacheGroup, digests: Sequence[bytes], most: int) -> int:
        by_digest = self._pages_of[index]
        if group.kind == "full":
            return next((at for at in range(most) if digests[at] not in by_digest), most)
        length = most
        while length:
            first = length - 1
            if group.kind == "window":
                first = group.first_page(length * self.page_size, self.page_size)
            # Every length from the missing page on needs that page, or its own snapshot.
            missing = next(
                (at for at in reversed(range(first, length)) if digests[at] not in by_digest), None
            )
            if missing is None:
                return length
            length = missing
        return 0

    def _table(self, index: int, digests: Sequence[bytes], length: int) -> list[int]:
        by_digest, group = self._pages_of[index], self.groups[index]
        first = group.first_page(length * self.page_size, self.page_size)
        return [0] * first + [by_digest[digest][0] for digest in digests[first:length]]

    def _enter(self, page: int, group: int, digest: bytes) -> None:
        self._entry_of[page] = Entry(group, digest)
        pages = self._pages_of[group].setdefault(digest, [])
        pages.append(page)
        if self.events is not None and group == 0 and len(pages) == 1:
            self.events.stored(digest)

    def _extend_hashes(self, request: Request, pages: int) -> None:
        hashes, size = request.hashes, self.page_size
        if len(hashes) < pages:
            tokens = _slice(request, len(hashes) * size, pages * size)
            hashes += _hashes(request, hashes, tokens, size, request.identity)


def page_hashes(
    request: Request, tokens: Sequence[int], page_size: int, weights: bytes = b""
) -> list[bytes]:
    """Hashes of the full blocks of these tokens, which begin with the request's prompt. No side effects.

    `weights`: the identity of those whose pages are meant; outside the engine a request does not know it.
    """
    named = request.identity.startswith(weights)
    digests = request.hashes[: len(tokens) // page_size] if named else []
    first, last = len(digests) * page_size, len(tokens) // page_size * page_size
    identity = request.identity if named else weights + request.identity
    return digests + _hashes(request, digests, tokens[first:last], page_size, identity)


def _hashes(
    request: Request,
    before: Sequence[bytes],
    tokens: Sequence[int],
    page_size: int,
    identity: bytes,
) -> list[bytes]:
    """Hashes of the full blocks that these tokens fill after the blocks of `before`."""
    written = array("i", tokens).tobytes()
    first, width = len(before) * page_size, TOKEN_BYTES * page_size
    parent = before[-1] if before else _root(request.salt, identity + _both_ways(request))
    digests = []
    for at in range(0, len(written), width):
        own = written[at : at + width]
        if request.pieces:
            begin = first + at // TOKEN_BYTES
            own += identity_within(request.pieces, begin, begin + page_size)
        parent = blake2b(parent + own, digest_size=HASH_BYTES).digest()
        digests.append(parent)
    return digests


def _both_ways(request: Request) -> bytes:
    """The prompt with all its pieces, where its first token sees its last one: no shorter prefix has the same keys."""
    if not any(piece.sees == "prompt" for piece in request.pieces):
        return b""
    tokens = blake2b(array("i", request.prompt).tobytes(), digest_size=HASH_BYTES).digest()
    return tokens + identity_within(request.pieces, 0, len(request.prompt))


def _root(salt: str, identity: bytes) -> bytes:
    """Root of the hash chain. Salt and identity are length-prefixed, so that concatenations are unambiguous."""
    if not salt and not identity:
        return ROOT
    parts = (salt.encode(), identity)
    joined = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(joined, digest_size=HASH_BYTES).digest()


def _slice(request: Request, first: int, last: int) -> list[int]:
    """Tokens `first .. last` of prompt and outputs, without joining the two."""
    prompt = len(request.prompt)
    if first >= prompt:
        return request.outputs[first - prompt : last - prompt]
    tokens = request.prompt[first:last]
    return tokens + request.outputs[: last - prompt] if last > prompt else tokens
