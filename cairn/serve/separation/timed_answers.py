"""An answer with the moments of its tokens, and the same workload on one engine: what separation is compared with.

answers = generate_alone(engine, asks, at)          as `Separated.generate`, without a second engine
"""

import time
from collections.abc import Iterator, Sequence

import msgspec

from cairn.core.errors import CairnError, RequestError
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Finish
from cairn.serve.separation.decode import Arrival
from cairn.serve.separation.prefill import Ask

NAP_S = 0.002  # until the next request comes


class Answer(msgspec.Struct, kw_only=True):
    """Moments in seconds from the start of `generate`."""

    id: str
    asked_s: float
    tokens: list[int] = []
    at_s: list[float] = []  # when each token came
    finish: Finish | None = None
    error: str | None = None
    arrival: Arrival | None = None  # None: it needed no hand-over

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next; the first has the hand-over in it."""
        return [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]

    def add(self, token: int, moment: float) -> None:
        self.tokens.append(token)
        self.at_s.append(moment)

    def close(self, finish: Finish, error: str | None) -> int:
        """Finish the answer; returns 1 for counting."""
        self.finish, self.error = finish, error
        return 1


class Arriving:
    """Requests in the order in which they come, on a clock that starts with it."""

    def __init__(self, asks: Sequence[Ask], at: Sequence[float] | None) -> None:
        if len({ask.id for ask in asks}) != len(asks):
            raise RequestError("two requests have one id", hint="give each its own")
        if at is not None and len(at) != len(asks):
            raise RequestError(f"{len(asks)} requests and {len(at)} moments")
        self._when = list(at) if at is not None else [0.0] * len(asks)
        self._asks = asks
        self._left = sorted(range(len(asks)), key=lambda place: -self._when[place])
        self._began = time.monotonic()

    @property
    def more(self) -> bool:
        return bool(self._left)

    def answers(self) -> dict[str, Answer]:
        moments = zip(self._asks, self._when, strict=True)
        return {ask.id: Answer(id=ask.id, asked_s=moment) for ask, moment in moments}

    def now(self) -> float:
        return time.monotonic() - self._began

    def due(self) -> Iterator[Ask]:
        while self._left and self._when[self._left[-1]] <= self.now():
            yield self._asks[self._left.pop()]


def generate_alone(
    engine: Engine, asks: Sequence[Ask], at: Sequence[float] | None = None
) -> list[Answer]:
    """All of them on one engine, in the order of `asks`."""
    arriving = Arriving(asks, at)
    answers, left = arriving.answers(), len(asks)
    while left:
        for ask in arriving.due():
            try:
                engine.add(ask.request())
            except CairnError as problem:
                left -= answers[ask.id].close("error", str(problem))
        if not engine.has_work:
            time.sleep(NAP_S)
            continue
        for output in engine.step():
            answer = answers[str(output.request.id)]
            for token in output.tokens:
                answer.add(token, arriving.now())
            if output.finished:
                left -= answer.close(output.request.finish or "error", output.request.error)
    return [answers[ask.id] for ask in asks]
