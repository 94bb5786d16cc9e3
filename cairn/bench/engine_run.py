"""Run of a workload on an engine in this process, from the first request to the last token on the host.

A further turn of a conversation is sent as soon as the turn before it has its answer, with that answer in its prompt.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from cairn.bench.workload_request import WorkloadRequest
from cairn.core.garbage_collection import quiet_collector
from cairn.serve.engine.speculate.acceptance import Counts

if TYPE_CHECKING:
    from cairn.serve.engine.loop import Engine
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.step_times import StepTimes

TEMPERATURE = 0.6


class EngineRun(NamedTuple):
    seconds: float
    steps: int
    times: list["StepTimes"]
    failure: str | None
    length: float | None = None  # tokens of a step that verifies, of a request


def serve(engine: "Engine", chosen: Sequence[WorkloadRequest]) -> EngineRun:
    """All requests at once into an idle engine with an empty prefix cache, until the last has its last token."""
    engine.scheduler.blocks.reset()
    first, speculation = engine.steps, engine.scheduler.speculation
    counts = speculation.counts if speculation is not None else Counts()
    runs, accepted = counts.runs, counts.accepted
    later = _followers(chosen)
    with quiet_collector():
        began = time.perf_counter()
        added = {request.id: request for request in submit(engine, chosen)}
        while engine.has_work:
            outputs = engine.step()
            if not later:
                continue
            for output in outputs:
                for place in later[int(output.request.id)] if output.finished else ():
                    added[place] = _follow(engine, place, chosen[place], output.request)
        seconds = time.perf_counter() - began
    steps = engine.steps - first
    times = list(islice(reversed(engine.times), steps))[::-1]
    failure = _failure([added.get(at) for at in range(len(chosen))], chosen)
    return EngineRun(seconds, steps, times, failure, counts.length_since(runs, accepted))


def submit(engine: "Engine", chosen: Sequence[WorkloadRequest]) -> "list[Request]":
    """Submit the requests that do not depend on another one."""
    return [
        _add(engine, at, one, one.prompt) for at, one in enumerate(chosen) if one.follows is None
    ]


def _followers(chosen: Sequence[WorkloadRequest]) -> dict[int, list[int]]:
    later: dict[int, list[int]] = defaultdict(list)
    for at, one in enumerate(chosen):
        if one.follows is not None:
            later[one.follows].append(at)
    return later


def _follow(engine: "Engine", at: int, one: WorkloadRequest, last: "Request") -> "Request":
    return _add(engine, at, one, [*last.prompt, *last.outputs, *one.prompt])


def _add(engine: "Engine", at: int, one: WorkloadRequest, prompt: list[int]) -> "Request":
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.sampling_params import SamplingParams

    fields = {"temperature": TEMPERATURE, **one.sampling}
    params = SamplingParams(max_tokens=one.output, ignore_eos=True, **fields)
    request = Request(at, prompt, params)
    engine.add(request)
    return request


def _failure(added: "Sequence[Request | None]", chosen: Sequence[WorkloadRequest]) -> str | None:
    """Why some requests have no whole answer; those that were never sent followed one of them."""
    pairs = zip(added, chosen, strict=True)
    wrong = [request for request, one in pairs if request and len(request.outputs) != one.output]
    if not wrong:
        return None
    why = wrong[0].error or f"it ended with {wrong[0].finish}"
    return f"{len(wrong)} of {len(added)} requests did not finish; {wrong[0]!r}: {why}"
