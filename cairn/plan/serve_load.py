"""Requests to plan with, and what the real scheduler makes of them on a device that is not here.

    Workload (lengths, how many, at which rate)  ->  requests  ->  serve.simulate with serve_cost  ->  Load

Arrivals are Poisson and drawn from a seed, or those of a trace; prompts are made of numbers that no other has, except
where a workload or a trace says so. The scheduler, the block manager and the prefix cache are the engine's own. No
clock, no device.
"""

import math
import random

import msgspec

from cairn.models.cache import cache_groups, most_pages, page_bytes, paged, state_bytes
from cairn.plan.serve_cost import Served, step_seconds
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.sizing import (
    GPU_PAGE,
    GPU_ROWS,
    GPU_STEP_TOKENS,
    SNAPSHOTS,
    SPARE,
    step_bytes,
)
from cairn.serve.engine.step_budget import tokens_within
from cairn.serve.simulate import Arrival, simulate

FRACTION = 0.9  # of the device's memory that the engine uses
UNUSED = "not used"
TOKENS = 10_000
STEP_MS = 25.0  # of a server, in steps that also decode


class Traced(msgspec.Struct, frozen=True):
    """A request of a real service."""

    at_s: float
    prompt: list[int]
    output_tokens: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    input_least: int
    input_most: int
    output_least: int
    output_most: int
    rate: float = math.inf  # a second; infinite: all at once
    shared: int = 0  # tokens at the beginning that all prompts have in common
    seed: int = 0
    trace: tuple[Traced, ...] = ()  # these requests instead of drawn ones, faster or slower


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted metrics of a server under a load."""

    rate: float
    requests: int
    seconds: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    busy: float  # share of the time
    running: int  # most at once
    preemptions: int
    steps: int
    refused: int  # requests that are too long for the model or its cache
    cached_tokens: int  # of prompts, found in the prefix cache


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device, by part."""

    weights: int
    step: int
    spare: int
    cache: int
    total: int
    cache_tokens: int  # of short requests together; a window keeps less of long ones
    pages: int
    rows: int  # requests that may run at once

    @property
    def fits(self) -> bool:
        return self.cache_tokens > 0

    def table(self) -> dict[str, int]:
        used = self.weights + self.step + self.spare + self.cache
        return {
            "weights": self.weights,
            "step": self.step,
            "graphs and libraries": self.spare,
            "pages": self.cache,
            UNUSED: max(0, self.total - used),
        }


def room(served: Served, rows: int = GPU_ROWS, step_tokens: int = GPU_STEP_TOKENS) -> Room:
    """The engine's own rules (`serve.engine.sizing`), for a device that is not here."""
    spec, tp = served.spec, served.tp
    outside = (1 if spec.tied else 2) * spec.vocab * spec.hidden  # lookup and output projection
    inside = spec.parameters() - outside
    weights = int((inside * served.weight_bytes + outside * served.head_bytes) / tp)
    weights += served.tower_bytes
    step = step_bytes(spec, step_tokens, rows, 2)
    total = served.device.memory_bytes
    groups = cache_groups(spec, tp)
    states = int(rows * state_bytes(groups, 2))
    free = int(FRACTION * total) - weights - step - SPARE - states
    of_page = page_bytes(groups, GPU_PAGE, served.cache_bytes)
    pages = max(0, free // of_page)
    return Room(
        weights=weights,
        step=step,
        spare=SPARE,
        cache=pages * of_page,
        total=total,
        cache_tokens=pages // len(paged(groups)) * GPU_PAGE,
        pages=pages,
        rows=rows,
    )


def limits(served: Served, space: Room, context: int, step_ms: float = 0.0) -> Limits:
    groups = cache_groups(served.spec, served.tp)
    pages_wanted = space.rows * most_pages(groups, context, GPU_PAGE) + 1
    rate = served.device.flops_per_s * served.tp
    shared = tokens_within(step_ms / 1e3, rate, served.spec, space.rows, GPU_STEP_TOKENS)
    return Limits(
        rows=space.rows,
        step_tokens=GPU_STEP_TOKENS,
        context=context,
        mixed_step_tokens=shared if step_ms else 0,
        pages=max(2, min(space.pages, pages_wanted)),
        page_size=GPU_PAGE,
        groups=groups,
        states=(1 + SNAPSHOTS) * space.rows if state_bytes(groups, 2) else 0,
        vocabulary=served.spec.vocab,
    )


def requests(workload: Workload) -> list[Arrival]:
    return _traced(workload) if workload.trace else _drawn(workload)


def _traced(workload: Workload) -> list[Arrival]:
    """The pattern of the trace at another rate: n arrivals span (n - 1) / rate seconds."""
    trace = workload.trace
    span = trace[-1].at_s - trace[0].at_s
    planned_s = (len(trace) - 1) / workload.rate  # of an infinite rate: all at once
    slower = planned_s / span if span else 0.0
    arrivals = []
    for number, one in enumerate(trace):
        params = SamplingParams(max_tokens=one.output_tokens, ignore_eos=True)
        at = (one.at_s - trace[0].at_s) * slower
        arrivals.append(Arrival(at, Request(f"r{number}", list(one.prompt), params)))
    return arrivals


def _drawn(workload: Workload) -> list[Arrival]:
    draw = random.Random(workload.seed)
    head = [draw.randint(0, TOKENS) for _ in range(workload.shared)]
    at, arrivals = 0.0, []
    for number in range(workload.requests):
        own = draw.randint(workload.input_least, workload.input_most) - workload.shared
        answer = draw.randint(workload.output_least, workload.output_most)
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        if math.isfinite(workload.rate):
            at += draw.expovariate(workload.rate)
        arrivals.append(
            Arrival(at, Request(f"r{number}", head + _nobody_elses(number, own), params))
        )
    return arrivals


def _nobody_elses(number: int, count: int) -> list[int]:
    """So many tokens that begin like no other request's: its number, again and again."""
    digits = [number % TOKENS, number // TOKENS]
    return (digits * (count // 2 + 1))[:count]


def run(served: Served, workload: Workload, rows: int = GPU_ROWS, step_ms: float = 0.0) -> Load:
    """`step_ms`: what a server gives a step that also decodes; 0 where only throughput counts."""
    space = room(served, rows)
    context = min(workload.input_most + workload.output_most, served.spec.context)
    result = simulate(
        requests(workload), limits(served, space, context, step_ms), step_seconds(served)
    )
    first = sorted(outcome.ttft for outcome in result.outcomes if outcome.ttft is not None)
    between = sorted(outcome.tpot for outcome in result.outcomes if outcome.tpot is not None)
    return Load(
        rate=workload.rate if math.isfinite(workload.rate) else 0.0,
        requests=workload.requests,
        seconds=result.seconds,
        output_tokens_per_s=result.output_tokens_per_s,
        input_tokens_per_s=result.input_tokens_per_s,
        ttft_p50=_at(first, 0.5),
        ttft_p99=_at(first, 0.99),
        tpot_p50=_at(between, 0.5),
        tpot_p99=_at(between, 0.99),
        busy=result.busy / result.seconds if result.seconds else 0.0,
        running=result.peak_running,
        preemptions=sum(outcome.preemptions for outcome in result.outcomes),
        steps=result.steps,
        refused=sum(outcome.error is not None for outcome in result.outcomes),
        cached_tokens=sum(outcome.cached_tokens for outcome in result.outcomes),
    )


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
