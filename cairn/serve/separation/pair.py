"""Both sides together: prompts in, tokens out, and when each of them came.

    with Separated.of(config, transport="shm") as pair:             # prefill in a process of its own
        for answer in pair.generate([Ask(id="a", prompt=[5, 8, 2], params=SamplingParams(max_tokens=64))]):
            print(answer.tokens, answer.ttft_s, answer.gaps_s, answer.arrival)

One thread drives it. `at` says when each request comes, in seconds from the start, so that a prompt can be thrown into
the middle of another request's answer: that is what separation is for. `timed_answers.generate_alone` is the same on
one engine.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from cairn.core.errors import CairnError
from cairn.serve.config import EngineConfig
from cairn.serve.engine.start import start
from cairn.serve.separation.decode import DecodeSide
from cairn.serve.separation.prefill import Ask, Ended, Handoff, PrefillSide
from cairn.serve.separation.process import PrefillProcess
from cairn.serve.separation.timed_answers import Answer, Arriving

WAIT_S = 0.02  # for word of the prefill side, when there is nothing else to do


class Prefill(Protocol):
    """Common interface of `PrefillSide` and `PrefillProcess`."""

    address: str

    @property
    def has_work(self) -> bool: ...
    def add(self, ask: Ask) -> None: ...
    def abort(self, id: str) -> None: ...
    def step(self, wait_s: float = 0.0) -> list[Handoff | Ended]: ...
    def close(self) -> None: ...


class Separated:
    def __init__(self, prefill: Prefill, decode: DecodeSide, streamed: bool = True) -> None:
        """`streamed`: pages of a prompt in several chunks travel while the next chunk is computed."""
        self.prefill, self.decode, self.streamed = prefill, decode, streamed
        decode.meet(prefill.address)  # or the first request would wait for the connection

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        transport: str = "shm",
        prefill: EngineConfig | None = None,
        processes: bool = True,
        threads: int = 1,
    ) -> Self:
        """Two engines of one model: here the one that decodes. `prefill`: if the other is to differ."""
        other = prefill or config
        side: Prefill
        if processes:
            side = PrefillProcess(other, transport=transport, threads=threads)
        else:
            side = PrefillSide(start(other).engine, transport=transport)
        try:
            return cls(side, DecodeSide(start(config).engine, transport=transport))
        except BaseException:
            side.close()
            raise

    def generate(self, asks: Sequence[Ask], at: Sequence[float] | None = None) -> list[Answer]:
        """All of them, in the order of `asks`; `at`: when each one comes, all at once without it."""
        arriving = Arriving(asks, at)
        answers, left = arriving.answers(), len(asks)
        while left:
            for ask in arriving.due():
                left -= self._ask(ask, answers)
            left -= self._turn(answers, arriving)
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
        if self.streamed:
            ask = msgspec.structs.replace(ask, reader=self.decode.expect(ask.request()))
        try:
            self.prefill.add(ask)
            return 0
        except CairnError as problem:
            self.decode.forget(ask.id)
            return answers[ask.id].close("error", str(problem))

    def _turn(self, answers: dict[str, Answer], arriving: Arriving) -> int:
        """Run one iteration of both sides; returns the number of finished answers."""
        ended = 0
        idle_s = WAIT_S / 10 if arriving.more else WAIT_S
        for reply in self.prefill.step(0.0 if self.decode.has_work else idle_s):
            ended += self._found(reply, answers, arriving.now())
        has_work = self.decode.has_work or self.decode.expects
        for output in self.decode.step() if has_work else ():
            answer = answers[str(output.request.id)]
            for token in output.tokens:
                answer.add(token, arriving.now())
            if output.finished:
                ended += answer.close(output.request.finish or "error", output.request.error)
        return ended

    def _found(self, reply: Handoff | Ended, answers: dict[str, Answer], now: float) -> int:
        answer = answers[reply.ask.id if isinstance(reply, Handoff) else reply.id]
        token = reply.first if isinstance(reply, Handoff) else reply.token
        if token is not None:
            answer.add(token, now)
        if isinstance(reply, Ended):
            self.decode.forget(reply.id)
            return answer.close(reply.finish, reply.error)
        try:
            self.decode.add(reply)
            return 0
        except CairnError as problem:
            return answer.close("error", str(problem))
