"""Pages that outlive their request, and pages that are there before it: a block manager for a hand-over.

    prefill side   keep(id) .. the request ends, its pages stay .. let_go(id)
                   lend(request, name) .. it goes on, and its pages stay in any case .. let_go(name)
    decode side    reserve(request) .. bytes arrive .. arrived(id) .. the scheduler admits it with that table
                                    '- give_up(id): they did not

What is held for others stands in the books as any request's table, under a stand-in, so that everything adds up at
any time. Pages that have arrived may be taken back when a running request needs them: their request is then computed
here. Pages that bytes may still land in may not; `reserve` leaves enough for the longest request to come to its end.
Pure: no torch, no transport.
"""

from collections.abc import Iterable, Sequence

from cairn.models.cache import ONE_GROUP, CacheGroup, most_pages
from cairn.serve.engine.block_manager import Holding
from cairn.serve.engine.request import Request, RequestId
from cairn.serve.engine.timed_blocks import TimedBlocks


class HandoverBlocks(TimedBlocks):
    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = ONE_GROUP,
    ) -> None:
        super().__init__(pages, page_size, prefix_caching=prefix_caching, groups=groups)
        self._wanted: set[RequestId] = set()  # whose pages are to stay
        self._kept: dict[RequestId, Request] = {}  # stand-ins: read by others, by request or name
        self._landing: dict[RequestId, Request] = {}  # written by others
        self._arrived: dict[RequestId, Request] = {}  # there, and not admitted yet

    # -- the side that computes prompts ----------------------------------------------------------

    def keep(self, id: RequestId) -> None:
        """When this request ends with an output, its pages stay. Ends with that, or with `let_go`."""
        self._wanted.add(id)

    def free(self, request: Request) -> None:
        is_wanted = request.id in self._wanted
        if not (is_wanted and request.outputs and request.blocks):
            super().free(request)  # preempted, it comes back and is still wanted
            return
        self._wanted.discard(request.id)
        stand_in = self._kept[request.id] = _stand_in(request)
        self._pass_on(request, stand_in)
        request.computed = 0

    def lend(self, request: Request, name: str) -> list[int]:
        """The pages of a request that runs, held a second time: whatever becomes of it, they stay until `let_go(name)`.

        For one cache group: windows give pages back while a request runs.
        """
        stand_in = self._kept[name] = _stand_in(request)
        self._tables[stand_in] = Holding(filled=len(request.blocks))
        for page in request.blocks:
            self.pool.hold(page, 0)
        stand_in.blocks = list(request.blocks)
        return stand_in.blocks

    def table(self, id: RequestId) -> list[int]:
        """The pages that are kept for a request which has ended, group by group; empty where there are none."""
        stand_in = self._kept.get(id)
        return [] if stand_in is None else self.seen(stand_in, len(stand_in.prompt))

    def let_go(self, id: RequestId) -> None:
        self._wanted.discard(id)
        stand_in = self._kept.pop(id, None)
        if stand_in is not None:
            super().free(stand_in)

    # -- the side that goes on -------------------------------------------------------------------

    def reserve(self, request: Request, ends: Iterable[int]) -> Request | None:
        """A stand-in with pages for the prompt, and `computed` tokens that are here already.

        `ends`: tokens that each request of the engine, and those on their way, may grow to.
        """
        room = self.pages - 1 - sum(map(self._most, self._landing.values()))
        longest = max((*ends, request.known), default=0)
        if self._most(request) + most_pages(self.groups, longest, self.page_size) > room:
            return None
        stand_in, prompt = _stand_in(request), len(request.prompt)
        if self.windowed:  # what was found of a window would have to be sent to the other side
            if not super().adopt(stand_in, prompt):
                return None
        elif super().allocate(stand_in, prompt) is None:
            return None
        self._landing[request.id] = stand_in
        return stand_in

    def arrived(self, id: RequestId) -> None:
        """All bytes are there."""
        self._arrived[id] = self._landing.pop(id)

    def give_up(self, id: RequestId) -> None:
        """Release the blocks of a cancelled hand-over; no transfer may write to them afterwards."""
        stand_in = self._landing.pop(id, None) or self._arrived.pop(id, None)
        if stand_in is not None:
            super().free(stand_in)

    def allocate(self, request: Request, upto_tokens: int) -> list[int] | None:
        """Allocate blocks; a request with transferred blocks starts with them, and its whole table counts as added."""
        stand_in = self._arrived.pop(request.id, None)
        if stand_in is None:
            return self._allocate(request, upto_tokens)
        self._pass_on(stand_in, request)
        request.computed, request.cached = len(request.prompt), stand_in.cached
        request.hashes = stand_in.hashes
        self.prefix.resume(request, stand_in.published)
        if self._allocate(request, upto_tokens) is None:
            self._pass_on(request, stand_in)
            request.computed = 0
            self._arrived[request.id] = stand_in
            return None
        return self.entries(request, 0, len(request.blocks))

    def _most(self, request: Request) -> int:
        return most_pages(self.groups, len(request.prompt), self.page_size)

    def _allocate(self, request: Request, upto_tokens: int) -> list[int] | None:
        """If pages are short, what has arrived for others is given up, the last first."""
        while (added := super().allocate(request, upto_tokens)) is None and self._arrived:
            self.give_up(next(reversed(self._arrived)))
        return added

    def _pass_on(self, giver: Request, taker: Request) -> None:
        """The table changes hands; who holds which page does not change."""
        self._tables[taker] = self._tables.pop(giver)
        taker.blocks, giver.blocks = giver.blocks, []
        taker.more_blocks, giver.more_blocks = giver.more_blocks, []


def _stand_in(request: Request) -> Request:
    """Holds pages in the books, and is never scheduled."""
    return Request(
        request.id, request.prompt, request.params, salt=request.salt, identity=request.identity
    )
