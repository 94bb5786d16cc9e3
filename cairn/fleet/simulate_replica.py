"""Simulated server: the engine's scheduler and prefix cache, with step times from a cost model.

    add(request)   next_s: when its step ends   advance(until_s)   events(): what its cache has stored and dropped

It has a clock of its own, which the simulation moves on. What a step computes is known at its end. Beside it stands the
`Worker` as which the router sees a server, kept up to date without a network between them.
"""

from collections.abc import Callable
from math import inf

import msgspec

from cairn.fleet.simulate_prompts import Prompt
from cairn.fleet.worker import Worker
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Chunk, Step
from cairn.serve.pulse import Events, Hello, KeyBook, Load, Outbox

StepSeconds = Callable[[Step], float]
PROBE_ROWS, PROBE_CONTEXT = 64, 4096  # of the step that a decoded token's cost is taken from


class Speed(msgspec.Struct, frozen=True):
    """Speeds that a server reports."""

    step_s: float  # of a step that only decodes
    token_s: float  # what a prompt token adds
    row_s: float  # what a request adds to a step that decodes


def speed_of(step_seconds: StepSeconds) -> Speed:
    """Speeds as a server would measure them: a decode step with many rows, and the added cost of prompt tokens."""

    def step(tokens: int, prompt: int) -> float:
        made = Step(0)
        request = Request(0, [1] * PROBE_CONTEXT, SamplingParams(max_tokens=1))
        made.chunks = [Chunk(request, PROBE_CONTEXT - 1, 1, 0, (), 1) for _ in range(tokens)]
        if prompt:
            made.chunks.append(Chunk(request, 0, prompt, 0, (), 1))
        made.sampling = [request] * len(made.chunks)
        made.tokens = tokens + prompt
        return step_seconds(made)

    decode = step(PROBE_ROWS, 0)
    half = PROBE_ROWS // 2
    row_s = (decode - step(half, 0)) / (PROBE_ROWS - half)
    return Speed(decode, (step(PROBE_ROWS, PROBE_CONTEXT) - decode) / PROBE_CONTEXT, row_s)


class Replica:
    """Simulated server with its own clock."""

    def __init__(
        self, number: int, limits: Limits, step_seconds: StepSeconds, speed: Speed
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.worker = Worker(number, f"http://sim:{number + 1}")
        step_tokens = limits.budget(decoding=True)
        hello = Hello(0, ["m"], limits.page_size, True, limits.rows, step_tokens=step_tokens)
        self.worker.up(hello)
        self.worker.told(Load(step_s=speed.step_s, token_s=speed.token_s, row_s=speed.row_s))
        self.now = self.busy = 0.0
        self._flying: tuple[Step, float] | None = None  # the step under way, and when it ends
        self._step_seconds = step_seconds
        self._book = KeyBook(limits.page_size)
        self._pages = self.scheduler.blocks.prefix.follow()
        self._prompts: dict[int, tuple[Prompt, int]] = {}  # by request: and its new tokens
        self._answers: dict[int, _Answer] = {}
        self._outbox = Outbox()

    def add(self, request: Request, prompt: Prompt, cached: int, at_s: float) -> None:
        if not self.scheduler.has_work:
            self.now = max(self.now, at_s)
        new = max(prompt.traced.input_tokens - cached, 1)
        self._prompts[int(request.id)] = prompt, new
        self.worker.takes(new, streams=True)
        self._answers[int(request.id)] = answer = _Answer(request)
        self.worker.requests.add(answer)
        request.ledger.arrived = at_s
        self.scheduler.add(request)

    @property
    def next_s(self) -> float:
        """When its next step ends."""
        if self._flying is None and self.scheduler.has_work:
            step = self.scheduler.schedule()
            self._flying = step, self.now + self._step_seconds(step)
        return self._flying[1] if self._flying is not None else inf

    def advance(self, until_s: float) -> None:
        """Steps that end by then. What one computes is known at its end, to the router as well."""
        while self._flying is not None or (self.scheduler.has_work and self.now < until_s):
            if self.next_s > until_s:
                return
            self.land()

    def land(self) -> None:
        """The step under way has ended."""
        assert self._flying is not None
        step, ends = self._flying
        self._flying = None
        self.busy += ends - self.now
        if step.tokens == len(step.chunks):  # as servers tell it of their last steps
            self.worker.step_s = ends - self.now
        self.now = ends
        for advance in self.scheduler.update(step, [0] * len(step.sampling)):
            request = advance.request
            if not request.ledger.first_token:
                self._first(request)
            if advance.finished:
                request.ledger.finished = self.now
                self._end(request)

    def events(self) -> Events | None:
        """Cache events since the last call."""
        self._outbox.remove(*self._book.note(self._pages.take()))
        return self._outbox.take()

    def _first(self, request: Request) -> None:
        request.ledger.first_token = self.now
        prompt, new = self._prompts[int(request.id)]
        self.worker.computed(new, streams=True)
        self.worker.decoding += 1
        self._outbox.remove(*self._book.note(self._pages.take()))
        self._outbox.store(self._book.bind(prompt.keys, prompt.tokens, prompt.hashes))

    def _end(self, request: Request) -> None:
        self.worker.decoding -= 1
        del self._prompts[int(request.id)]
        self.worker.requests.discard(self._answers.pop(int(request.id)))


class _Answer:
    """A request at a replica, as a policy sees its answer."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def answer_tokens(self) -> int:
        return self._request.params.max_tokens or 1

    @property
    def tokens_so_far(self) -> int:
        return len(self._request.outputs)
