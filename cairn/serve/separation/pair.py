"""Both sides together: prompts in, tokens out, and when each of them came.

    with Separated.of(config, transport="shm") as pair:             # prefill in a process of its own
        for answer in pair.generate([Ask(id="a", prompt=[5, 8, 2], params=SamplingParams(max_tokens=64))]):
            print(answer.tokens, answer.ttft_s, answer.gaps_s, answer.arrival)

One thread drives it. `at` says when each request comes, in seconds from the start, so that a prompt can be thrown into
the middle of somebody else's answer: that is what separation is for.
"""

import time
from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from cairn.core.errors import CairnError, RequestError
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Finish
from cairn.serve.engine.start import start
from cairn.serve.separation.decode import Arrival, DecodeSide
from cairn.serve.separation.prefill import Ask, Ended, Handoff, PrefillSide
from cairn.serve.separation.process import PrefillProcess

WAIT_S = 0.02  # for word of the prefill side, when there is nothing else to do


class Prefill(Protocol):
    """What `PrefillSide` and `PrefillProcess` have in common."""

    address: str

    @property
    def has_work(self) -> bool: ...
    def add(self, ask: Ask) -> None: ...
    def abort(self, id: str) -> None: ...
    def step(self, wait_s: float = 0.0) -> list[Handoff | Ended]: ...
    def close(self) -> None: ...


class Answer(msgspec.Struct, kw_only=True):
    """Moments in seconds from the start of `generate`."""

    id: str
    asked_s: float
    tokens: list[int] = []
    at_s: list[float] = []  # when each token came
    finish: Finish | None = None
    error: str | None = None
    arrival: Arrival | None = None  # None: it ended with its first token

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next; the first has the hand-over in it."""
        return [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]


class Separated:
    def __init__(self, prefill: Prefill, decode: DecodeSide) -> None:
        self.prefill, self.decode = prefill, decode
        decode.meet(prefill.address)  # or the first request would wait for the connection

    @classmethod
    def of(
        cls, config: EngineConfig, *, transport: str = "shm", prefill: EngineConfig | None = None,
        processes: bool = True, threads: int = 1,
    ) -> Self:  # fmt: skip
        """Two engines of one model: here the one that decodes. `prefill`: if the other is to differ."""
        other = prefill or config
        side: Prefill
        if processes:
            side = PrefillProcess(other, transport=transport, threads=threads)
        else:
            side = PrefillSide(start(other).engine, transport=transport)
        return cls(side, DecodeSide(start(config).engine, transport=transport))

    def generate(self, asks: Sequence[Ask], at: Sequence[float] | None = None) -> list[Answer]:
        """All of them, in the order of `asks`; `at`: when each one comes, all at once without it."""
        if len({ask.id for ask in asks}) != len(asks):
            raise RequestError("two requests have one id", hint="give each its own")
        if at is not None and len(at) != len(asks):
            raise RequestError(f"{len(asks)} requests and {len(at)} moments")
        began = time.monotonic()
        when = at or [0.0] * len(asks)
        due = sorted(zip(when, range(len(asks)), strict=True), reverse=True)
        moments = zip(asks, when, strict=True)
        answers = {ask.id: Answer(id=ask.id, asked_s=moment) for ask, moment in moments}
        left = len(asks)
        while left:
            while due and time.monotonic() - began >= due[-1][0]:
                left -= self._ask(asks[due.pop()[1]], answers)
            left -= self._turn(answers, began, idle=not due)
        for arrival in self.decode.arrivals:
            if arrival.id in answers:
                answers[arrival.id].arrival = arrival
        return [answers[ask.id] for ask in asks]

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, ask: Ask, answers: dict[str, Answer]) -> int:
        try:
            self.prefill.add(ask)
            return 0
        except CairnError as problem:
            return _close(answers[ask.id], "error", str(problem))

    def _turn(self, answers: dict[str, Answer], began: float, idle: bool) -> int:
        """One turn of both sides; how many answers it ended."""
        nothing_here = not self.decode.has_work
        ended = 0
        wait_s = (WAIT_S if idle else WAIT_S / 10) if nothing_here else 0.0
        for found in self.prefill.step(wait_s):
            ended += self._found(found, answers, time.monotonic() - began)
        for output in self.decode.step() if self.decode.has_work else ():
            answer = answers[str(output.request.id)]
            if output.token is not None:
                answer.tokens.append(output.token)
                answer.at_s.append(time.monotonic() - began)
            if output.finished:
                ended += _close(answer, output.request.finish or "error", output.request.error)
        return ended

    def _found(self, found: Handoff | Ended, answers: dict[str, Answer], now: float) -> int:
        answer = answers[found.ask.id if isinstance(found, Handoff) else found.id]
        token = found.first if isinstance(found, Handoff) else found.token
        if token is not None:
            answer.tokens.append(token)
            answer.at_s.append(now)
        if isinstance(found, Ended):
            return _close(answer, found.finish, found.error)
        try:
            self.decode.add(found)
            return 0
        except CairnError as problem:
            return _close(answer, "error", str(problem))


def _close(answer: Answer, finish: Finish, error: str | None) -> int:
    answer.finish, answer.error = finish, error
    return 1
