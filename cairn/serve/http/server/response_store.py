"""The last responses of /v1/responses, for clients that go on from one or read it again (`--store-responses`).

Kept in memory, each for the API key that it was made with; the oldest is forgotten first. A response has its own turn
of the conversation and refers to the one before it, so that a turn is in memory once, however often it is continued:

    resp_a: input, output  <-before-  resp_b: input, output  <-before-  resp_c: ...
"""

from collections import OrderedDict
from typing import Any

from cairn.serve.http.protocol.responses import ModelResponse

MOST_BYTES = 256 * 2**20  # of all that are kept, as JSON


class Stored:
    def __init__(
        self,
        response: ModelResponse,
        inputs: list[dict[str, Any]],
        output: list[dict[str, Any]],
        before: "Stored | None",
        size: int,
    ) -> None:
        """`inputs`, `output`: of this turn alone. `size`: bytes of both."""
        self.response, self.before, self.size = response, before, size
        self._inputs, self._output = inputs, output
        self.users = 0  # the store, and turns after it

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Input items of a response, including the conversation before it."""
        return [*(self.before.items if self.before is not None else ()), *self._inputs]

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation so far, as a request would send it."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [item for turn in reversed(turns) for item in (*turn._inputs, *turn._output)]


class ResponseStore:
    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes  # 0: nothing is kept
        self.bytes = 0  # of what is kept, and of turns that it goes on from
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def put(self, holder: str, stored: Stored) -> None:
        self.drop(holder, stored.response.id)
        self._kept[holder, stored.response.id] = stored
        self._use(stored)
        while len(self._kept) > self.most or (self._kept and self.bytes > self.most_bytes):
            self._leave(self._kept.popitem(last=False)[1])

    def get(self, holder: str, id: str) -> Stored | None:
        return self._kept.get((holder, id))

    def drop(self, holder: str, id: str) -> bool:
        stored = self._kept.pop((holder, id), None)
        if stored is not None:
            self._leave(stored)
        return stored is not None

    def _use(self, turn: Stored | None) -> None:
        while turn is not None:
            turn.users += 1
            if turn.users > 1:  # it was in memory, and what is before it, too
                return
            self.bytes += turn.size
            turn = turn.before

    def _leave(self, turn: Stored | None) -> None:
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self.bytes -= turn.size
            turn = turn.before
