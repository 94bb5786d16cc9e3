"""Simulation of the engine on a request trace for another machine.

The scheduler and the block manager are the engine's own; only the device is replaced, by a function that says how long
a step takes. What is simulated is therefore what runs: the same admissions, prefix hits and preemptions.

    arrivals --> Scheduler --step--> step_seconds(step) --> the clock moves on --> ledgers --> Result

`roofline_step_seconds` is such a function: the floor of each step on measured ceilings. A record of real steps is
another. Tokens are made up, so that nothing stops before its max_tokens; the host's own time is not simulated.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from cairn.core.errors import RequestError
from cairn.hw.ceilings import Ceilings
from cairn.hw.datasheet import Chip
from cairn.hw.roofline import floor
from cairn.models.cache import cache_bytes_per_token
from cairn.models.spec import ModelSpec
from cairn.serve.engine.request import Finish, Limits, Request, RequestId
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.step import Advance, Step

KERNELS_PER_LAYER = 8  # two norms, qkv, rope with the cache write, attention, output, up, down

StepSeconds = Callable[[Step], float]


class Arrival(NamedTuple):
    seconds: float  # since the beginning of the trace
    request: Request


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a request with its times in seconds."""

    id: RequestId
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    finish: Finish | None
    error: str | None
    arrived: float
    queue: float | None  # from arrival to the first chunk; None: it never came so far
    ttft: float | None  # from arrival to the first token
    tpot: float | None  # between tokens after the first; None: there were none
    seconds: float  # from arrival to the end


class Result(msgspec.Struct, frozen=True, kw_only=True):
    outcomes: list[Outcome]  # in the order of arrival
    steps: int
    seconds: float  # from the first arrival to the end of the last step
    busy: float  # seconds of them in which a step ran
    computed_tokens: int  # prompt tokens found in the cache are not computed, preempted ones twice
    peak_pages: int
    peak_running: int

    @property
    def output_tokens(self) -> int:
        return sum(outcome.output_tokens for outcome in self.outcomes)

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def input_tokens_per_s(self) -> float:
        prompts = sum(o.prompt_tokens for o in self.outcomes if o.finish != "error")
        return prompts / self.seconds if self.seconds else 0.0


def simulate(
    arrivals: Iterable[Arrival | tuple[float, Request]],
    limits: Limits,
    step_seconds: StepSeconds,
    *,
    prefix_caching: bool = True,
    speculation: Speculation | None = None,
) -> Result:
    """Run a trace to its end. Requests that cannot be served have an outcome too, with the error.

    `speculation`: drafts, which hold as its `accept` says: see `engine.speculate.synthetic`.
    """
    line = sorted((Arrival(*arrival) for arrival in arrivals), key=lambda arrival: arrival.seconds)
    for arrival in line:
        _require_time("an arrival", arrival.seconds)
    scheduler = Scheduler(limits, prefix_caching=prefix_caching, speculation=speculation)
    run = _Run(scheduler, line)
    while run.coming or run.scheduler.has_work:
        run.arrive()
        run.advance(step_seconds)
    return run.result()


class _Run:
    """State of a simulation: clock, future arrivals and counters."""

    def __init__(self, scheduler: Scheduler, line: Sequence[Arrival]) -> None:
        self.scheduler = scheduler
        self.line = line
        self.coming = list(reversed(line))  # the next one is the last
        self.began = self.now = line[0].seconds if line else 0.0
        self.steps = self.computed = self.peak_pages = self.peak_running = 0
        self.busy = 0.0

    def arrive(self) -> None:
        """Add the requests that have arrived by now; with nothing to do, wait for the next one."""
        if not self.scheduler.has_work and self.coming:
            self.now = max(self.now, self.coming[-1].seconds)
        while self.coming and self.coming[-1].seconds <= self.now:
            seconds, request = self.coming.pop()
            request.ledger.arrived = seconds
            try:
                self.scheduler.add(request)
            except RequestError as error:
                request.error, request.finish, request.state = str(error), "error", "finished"
                request.ledger.finished = seconds

    def advance(self, step_seconds: StepSeconds) -> None:
        step = self.scheduler.schedule()
        for request in step.admitted:
            if request.ledger.preemptions == 0:
                request.ledger.scheduled = self.now
        if step.chunks:
            took = step_seconds(step)
            _require_time(f"step {step.number}", took)
            self.now += took
            self.busy += took
            self.steps += 1
            self.computed += step.tokens
        blocks = self.scheduler.blocks
        self.peak_pages = max(self.peak_pages, blocks.pages - 1 - blocks.free_pages)
        self.peak_running = max(self.peak_running, self.scheduler.running)
        drafts = step.drafts or [()] * len(step.sampling)
        pairs = zip(step.sampling, drafts, strict=True)
        drawn = [_filler(request) for request, own in pairs for _ in range(1 + len(own))]
        for advance in self.scheduler.update(step, drawn):
            self._stamp(advance)

    def _stamp(self, advance: Advance) -> None:
        ledger = advance.request.ledger
        if len(advance.request.outputs) == len(advance.tokens) > 0:
            ledger.first_token = self.now
        if advance.finished:
            ledger.finished = self.now

    def result(self) -> Result:
        return Result(
            outcomes=[_outcome(arrival.request) for arrival in self.line],
            steps=self.steps,
            seconds=self.now - self.began,
            busy=self.busy,
            computed_tokens=self.computed,
            peak_pages=self.peak_pages,
            peak_running=self.peak_running,
        )


def _outcome(request: Request) -> Outcome:
    ledger, outputs = request.ledger, len(request.outputs)
    admitted = ledger.prefill_chunks > 0
    more = ledger.finished - ledger.first_token
    return Outcome(
        id=request.id,
        prompt_tokens=len(request.prompt),
        output_tokens=outputs,
        cached_tokens=request.cached,
        preemptions=ledger.preemptions,
        finish=request.finish,
        error=request.error,
        arrived=ledger.arrived,
        queue=ledger.scheduled - ledger.arrived if admitted else None,
        ttft=ledger.first_token - ledger.arrived if outputs else None,
        tpot=more / (outputs - 1) if outputs > 1 else None,
        seconds=ledger.finished - ledger.arrived,
    )


def _filler(request: Request) -> int:
    """A token that does not end the request: the smallest that it does not stop at."""
    token = 0
    while token in request.stop_ids:
        token += 1
    return token


def _require_time(what: str, seconds: float) -> None:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"the time of {what} is {seconds} s; it has to be finite and not negative")


# -- how long a step takes at best ---------------------------------------------------------------------


def roofline_step_seconds(
    spec: ModelSpec,
    ceilings: Ceilings | None,
    *,
    dtype: str = "bf16",
    value_bytes: float = 2,
    overhead_s: float | None = None,
    datasheet: Chip | None = None,
) -> StepSeconds:
    """max(bytes / bandwidth, flops / rate) of each step, and what its launches cost on top.

    `overhead_s` is a fixed time per step; None: the launches of a forward pass inside a graph, as measured.
    """
    costs = StepCosts(spec, value_bytes)
    launches = KERNELS_PER_LAYER * spec.layers + 2 if overhead_s is None else 0

    def seconds(step: Step) -> float:
        flops, moved = costs.of(step)
        best = floor(flops, moved, dtype, ceilings, launches=launches, datasheet=datasheet)
        return max(best.memory_s, best.compute_s) + best.launch_s + (overhead_s or 0.0)

    seconds_of_nothing = floor(0, 0, dtype, ceilings, launches=0, datasheet=datasheet).seconds
    assert (
        seconds_of_nothing == 0
    )  # asked here so that a missing ceiling is an error now, not in a trace
    return seconds


class StepCosts:
    """FLOPs and bytes of a step, from the spec's own counts, taken once per kind of layer and not per token."""

    def __init__(self, spec: ModelSpec, value_bytes: float = 2) -> None:
        self.spec = spec
        self.value_bytes = value_bytes
        self._head = spec.vocab * spec.hidden
        self._body = spec.matmul_parameters() - self._head
        self._pair_flops = _one_layer(spec, 0).attention_flops(1)  # one query, one key, one layer
        self._kept_bytes = cache_bytes_per_token(spec, value_bytes) / spec.layers
        windows = Counter(spec.window(layer) for layer in range(spec.layers))
        self._layers = [(_one_layer(spec, window), window, n) for window, n in windows.items()]

    def of(self, step: Step) -> tuple[float, float]:
        """(flops, bytes): weights once, keys and values as often as they are read."""
        attention, read = 0, 0
        for layer, window, count in self._layers:
            for chunk in step.chunks:
                start, new = chunk.start, chunk.count
                if window:
                    attention += count * layer.attention_flops(new, start)
                    read += count * min(start + new, window + new - 1)
                else:  # the same in closed form: this is where a long simulation spends its time
                    attention += count * self._pair_flops * (new * (2 * start + new + 1) // 2)
                    read += count * (start + new)
        tokens, sampled = step.tokens, step.draws
        flops = 2 * self._body * tokens + 2 * self._head * sampled + attention
        weights = self._weights_read(tokens) + (self._head if sampled else 0)
        written = tokens * self.spec.layers
        return flops, weights * self.value_bytes + (read + written) * self._kept_bytes

    def _weights_read(self, tokens: int) -> float:
        """Weight bytes read by a step without the LM head, with the expected number of visited experts."""
        spec, experts = self.spec, self.spec.experts
        if experts is None or tokens == 0:
            return self._body
        visited = experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)
        sparse = sum(spec.experts_of(layer) is not None for layer in range(spec.layers))
        one = (2 + spec.gated) * spec.hidden * experts.intermediate
        return self._body + sparse * one * (visited - experts.per_token)


def _one_layer(spec: ModelSpec, window: int) -> ModelSpec:
    return msgspec.structs.replace(spec, layers=1, windows=(window,))
