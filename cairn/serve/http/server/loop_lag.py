"""Event-loop lag: work that blocks the loop delays every stream."""

import asyncio
from collections import deque

EVERY_S = 0.1
REMEMBERED = 100  # samples: ten seconds


class LoopLag:
    """Sleeps for a moment again and again, and keeps how much later than asked it woke up."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._late: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def worst_s(self) -> float:
        """The longest delay of the last seconds."""
        return max(self._late, default=0.0)

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._every_s
            await asyncio.sleep(self._every_s)
            self._late.append(max(loop.time() - due, 0.0))
