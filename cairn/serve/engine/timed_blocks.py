"""A block manager that writes into each request's ledger how long its pages took to find.

The block manager itself knows no clock, so that simulators and tests of schedules run without one; this one is for the
engine. `allocate` is called for an admission, and for one token in a page's worth while a request decodes.
"""

import time
from collections.abc import Callable, Sequence

from cairn.models.cache import ONE_GROUP, CacheGroup
from cairn.serve.engine.block_manager import BlockManager
from cairn.serve.engine.request import Request


class TimedBlocks(BlockManager):
    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        states: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            pages, page_size, prefix_caching=prefix_caching, groups=groups, states=states
        )
        self._clock = clock

    def allocate(self, request: Request, upto_tokens: int) -> list[int] | None:
        began = self._clock()
        added = super().allocate(request, upto_tokens)
        ledger = request.ledger
        ledger.allocation += self._clock() - began
        if added is not None:
            ledger.pages += len(added)
        return added
