"""Length of the prefix that all requests of a step share in the same blocks.

    request 0   p3 p7 p9 p4 | p12 p30          pages that the prefix cache gave to several requests are the same pages,
    request 1   p3 p7 p9 p4 | p15               so comparing their numbers tells what they have in common
    request 2   p3 p7 p9 p4 | p18 p19

A page that two requests hold is full and written: only such pages are shared. What is found stays true while the same
requests decode, because tables only grow; so it is counted again only when others decode, or compute a prompt. Whether
it is worth a different kernel is a matter of how much less has to be read. Knows no device.
"""

from collections.abc import Sequence

from cairn.serve.engine.request import Request
from cairn.serve.engine.step import Chunk

WORTH = 64 << 20  # keys' elements of a layer that need not be read: about 60 us of an H200's memory


class SharedPrefix:
    def __init__(self, page_size: int, width: int, worth: int = WORTH) -> None:
        """`width`: elements that one token's keys have in a layer."""
        self.page_size, self.width, self.worth = page_size, width, worth
        self._requests: list[Request] = []
        self._tokens = 0

    def tokens(self, requests: Sequence[Request]) -> int:
        """Whole pages of them; 0 where it does not pay. Compares the tables of the first cache group."""
        if self._requests != requests:
            self._requests = list(requests)
            # The token that is decoded now is never part of it, whatever the tables say.
            self._tokens = self._count(self._requests, min(r.computed - 1 for r in requests))
        return self._tokens

    def before(self, chunks: Sequence[Chunk]) -> int:
        """The same of a step with prompts: what it computes itself is no part of it."""
        return self._count([c.request for c in chunks], min(chunk.start for chunk in chunks))

    def forget(self) -> None:
        """Call it after an admission: a request that comes back has other pages than before."""
        self._requests = []

    def _count(self, requests: list[Request], cached: int) -> int:
        """`known`: tokens that every one of them has computed before this step."""
        if len(requests) < 2:
            return 0
        pages = common_pages([request.blocks for request in requests], cached // self.page_size)
        tokens = pages * self.page_size
        return tokens if (len(requests) - 1) * tokens * self.width >= self.worth else 0


def common_pages(tables: Sequence[Sequence[int]], most: int) -> int:
    """Number of leading blocks, at most `most`, that all tables share."""
    first = tables[0]
    common = most
    for table in tables[1:]:
        if table[:common] != first[:common]:
            common = next(i for i in range(common) if table[i] != first[i])
        if not common:
            break
    return common
