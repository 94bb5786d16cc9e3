"""The five sets of requests that a serving engine is measured on, the same for every engine.

    nano      256 requests, prompts and answers of 100 to 1024 tokens: nano-vllm's benchmark, token for token
    latency   one request, 128 in, 256 out: the time of a token without other requests
    prefill   64 prompts of 2048 tokens, 1 out: prompt tokens per second
    decode    256 requests, 1024 in, 256 out
    shared    256 requests that begin with the same 1792 tokens, 256 of their own, 64 out

Every answer has exactly as many tokens as it says: end-of-text is ignored. All draws come from one generator with
seed 0, in the order below, so that the requests are the same everywhere; a test holds them to stored hashes. A scale
below 1 makes the same thing smaller for machines without a GPU. `everyday` has more: what people do. Knows nothing
about engines or models.
"""

import functools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

from cairn.bench.everyday import EVERYDAY
from cairn.bench.workload_request import Draw, WorkloadRequest, with_history
from cairn.core.errors import UsageError, did_you_mean

LARGEST_TOKEN = 10_000  # every model of interest has that many
CPU_SCALE = 0.1  # 26 of nano's requests, 10 to 103 tokens each way: seconds instead of an hour


class WorkloadTotals(NamedTuple):
    requests: int
    input_tokens: int
    output_tokens: int
    longest: int  # prompt and answer together


def requests(name: str, scale: float = 1.0) -> list[WorkloadRequest]:
    """The requests of a workload, all of them or in small."""
    if name not in WORKLOADS:
        hint = did_you_mean(name, WORKLOADS, otherwise=f"there are: {', '.join(WORKLOADS)}")
        raise UsageError(f"there is no workload '{name}'", hint=hint)
    if not 0 < scale <= 1:
        raise UsageError(f"the scale is {scale}", hint="it is above 0 and at most 1")
    return in_small(list(_full_size(name)), scale)


@functools.cache  # up to a million draws
def _full_size(name: str) -> tuple[WorkloadRequest, ...]:
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        return [generator.randint(0, LARGEST_TOKEN) for _ in range(count)]

    return tuple(WORKLOADS[name](generator, draw))


def in_small(full: list[WorkloadRequest], scale: float) -> list[WorkloadRequest]:
    """Fewer requests, and each of them shorter at both ends of its own part and of the shared one."""
    if scale == 1:
        return full

    def less(count: int) -> int:
        return math.ceil(count * scale)

    def smaller(one: WorkloadRequest) -> WorkloadRequest:
        head = one.shared if one.follows is None else 0
        own = one.prompt[head : head + less(len(one.prompt) - head)]
        prompt = one.prompt[: less(head)] + own
        return one._replace(prompt=prompt, output=less(one.output), shared=less(one.shared))

    return with_history([smaller(one) for one in full[: less(len(full))]])


def totals(chosen: list[WorkloadRequest]) -> WorkloadTotals:
    return WorkloadTotals(
        requests=len(chosen),
        input_tokens=sum(request.length for request in chosen),
        output_tokens=sum(request.output for request in chosen),
        longest=max(request.length + request.output for request in chosen),
    )


def choose(names: list[str]) -> list[str]:
    """The workloads that are named, in their own order. `all`: the five; `everyday`: what people do."""
    groups = {"all": COMPARED, "everyday": EVERYDAY}
    chosen: set[str] = set()
    for name in names:
        if name not in WORKLOADS and name not in groups:
            known_names = (*WORKLOADS, *groups)
            hint = did_you_mean(name, known_names, otherwise=f"there are: {', '.join(known_names)}")
            raise UsageError(f"there is no workload '{name}'", hint=hint)
        chosen |= set(groups.get(name, (name,)))
    return [name for name in WORKLOADS if name in chosen]


# The order of the draws is part of the definition: all prompts of nano come before all its lengths of answers.


def _nano(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    prompts = [draw(generator.randint(100, 1024)) for _ in range(256)]
    return [WorkloadRequest(prompt, generator.randint(100, 1024)) for prompt in prompts]


def _latency(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(128), 256)]


def _prefill(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(2048), 1) for _ in range(64)]


def _decode(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(1024), 256) for _ in range(256)]


def _shared(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    head = draw(1792)
    return [WorkloadRequest(head + draw(256), 64, len(head)) for _ in range(256)]


COMPARED: dict[str, Callable[[random.Random, Draw], list[WorkloadRequest]]] = {
    "nano": _nano,
    "latency": _latency,
    "prefill": _prefill,
    "decode": _decode,
    "shared": _shared,
}
WORKLOADS = COMPARED | EVERYDAY
