"""Which pages already hold the beginning of this prompt?

A full page is known by a hash of its tokens and of the page before it, so that one hash stands for the whole prefix;
the salt goes into the first. Two requests with the same prefix and salt find each other's pages, and nobody else's.

    tokens   [ 5 8 2 9 ] [ 5 8 2 9 ] [ 7 7
    hash      h(root,..)  h(h1, ..)   -- not full: has no hash, is never shared

The cache holds no page and frees none: a page that nobody uses stays findable until the block manager takes it for
something else and calls `drop`. Pages are published when the step that fills them is scheduled, because later readers
run later on the same stream, and readers of the same step read a layer's keys after all of them have been written.
"""

from array import array
from hashlib import blake2b

import msgspec

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


class PrefixCache:
    def __init__(self, pages: int, page_size: int, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.statistics = HitStatistics()
        self._hash_of: list[bytes | None] = [None] * pages
        # Mostly one page; more when two requests have filled the same prefix side by side.
        self._pages_of: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """How many pages can be found."""
        return sum(map(len, self._pages_of.values()))

    def __contains__(self, page: int) -> bool:
        return self._hash_of[page] is not None

    def find(self, request: Request) -> list[int]:
        """The longest run of pages that hold this request's prefix.

        At least one token stays to be computed: a request needs the logits of its last token. One that wants
        log-probabilities or a vector of its prompt needs all of them, and finds nothing.
        """
        if not self.enabled or request.params.whole_prompt:
            return []
        most = (request.known - 1) // self.page_size
        self._extend_hashes(request, most)
        found: list[int] = []
        for digest in request.hashes[:most]:
            pages = self._pages_of.get(digest)
            if pages is None:
                break
            found.append(pages[0])
        return found

    def publish(self, request: Request, filled: int) -> list[int]:
        """Make the pages findable that the first `filled` tokens fill; returns the new ones.

        The host has to know these tokens.
        """
        full = filled // self.page_size
        first = request.published
        if not self.enabled or full <= first:
            return []
        self._extend_hashes(request, full)
        fresh = request.blocks[first:full]
        for page, digest in zip(fresh, request.hashes[first:full], strict=True):
            self._hash_of[page] = digest
            self._pages_of.setdefault(digest, []).append(page)
        self.resume(request, full)
        return fresh

    def resume(self, request: Request, pages: int) -> None:
        """The first `pages` of the request are findable; notes which output fills the next one."""
        request.published = pages
        # The page is full when the token after it has been sampled: then its last entry is written.
        at = (pages + 1) * self.page_size - len(request.prompt) + 1
        request.publish_at = at if self.enabled else NEVER

    def drop(self, page: int) -> None:
        """The page is about to hold something else."""
        digest = self._hash_of[page]
        if digest is None:
            return
        self._hash_of[page] = None
        pages = self._pages_of[digest]
        pages.remove(page)
        if not pages:
            del self._pages_of[digest]

    def clear(self) -> None:
        self._pages_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def check_integrity(self) -> None:
        listed = {page: digest for digest, pages in self._pages_of.items() for page in pages}
        known = {page: digest for page, digest in enumerate(self._hash_of) if digest is not None}
        if listed != known or len(listed) != len(self) or not all(self._pages_of.values()):
            wrong = sorted(set(listed.items()) ^ set(known.items()))
            raise ValueError(f"the two directions of the prefix cache differ: {wrong[:4]}")

    def _extend_hashes(self, request: Request, pages: int) -> None:
        hashes, size = request.hashes, self.page_size
        if len(hashes) >= pages:
            return
        first = len(hashes) * size
        tokens = array("i", _slice(request, first, pages * size)).tobytes()
        parent = hashes[-1] if hashes else _root(request.salt)
        width = TOKEN_BYTES * size
        for at in range(0, len(tokens), width):
            parent = blake2b(parent + tokens[at : at + width], digest_size=HASH_BYTES).digest()
            hashes.append(parent)


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=HASH_BYTES).digest() if salt else ROOT


def _slice(request: Request, first: int, last: int) -> list[int]:
    """Tokens `first .. last` of prompt and outputs, without joining the two."""
    prompt = len(request.prompt)
    if first >= prompt:
        return request.outputs[first - prompt : last - prompt]
    tokens = request.prompt[first:last]
    return tokens + request.outputs[: last - prompt] if last > prompt else tokens
