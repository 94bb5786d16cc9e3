"""Upper bound of the throughput of a set of requests on this machine.

    limit = max(bytes / copy bandwidth, flops / matmul rate), both rates measured here

    bytes   the weights, once for each token of the longest answer, because its tokens come one after another;
            and for every token the keys and values that it attends to, and the states of layers that keep one
    flops   of every token of every request

Requests do not wait for each other, and while one reads another computes: prefill hides behind decode. What several
requests share is computed once, and read once in a step. Launches, norms, logits and sampling cost nothing. What is
measured can come near this limit and does not pass it, except where weights or keys stay in a cache.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from cairn.bench.workload import WorkloadRequest
from cairn.hw.datasheet import Dtype
from cairn.hw.host import read_cpu
from cairn.kernels.kernel import Cost
from cairn.kernels.tooling.measure import Ceiling
from cairn.models.cache import cache_bytes_per_token, cache_groups, state_bytes
from cairn.models.spec import ModelSpec
from cairn.models.step_cost import SequenceWork, attended, step_cost, weights_read


class Limit(NamedTuple):
    """Seconds that the two kinds of work take at least; together, if they overlap perfectly, as long as the longer."""

    memory: float
    compute: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return "memory" if self.memory >= self.compute else "compute"


class Bytes(NamedTuple):
    """Average bytes of a weight, and of a key or value element."""

    weight: float
    value: float


def limit(
    spec: ModelSpec, chosen: Sequence[WorkloadRequest], ceiling: Ceiling, dtype: str, each: Bytes
) -> Limit:
    prefill = prefill_cost(spec, chosen, each)
    decode = decode_cost(spec, chosen, each)
    return Limit(
        (prefill.bytes + decode.bytes) / ceiling.bytes_per_s,
        (prefill.flops + decode.flops) / ceiling.flops_per_s.get(dtype, math.inf),
    )


def prefill_cost(spec: ModelSpec, chosen: Sequence[WorkloadRequest], each: Bytes) -> Cost:
    """All prompts in one step; a beginning that they share is computed for the first of them only."""
    shared = chosen[0].shared
    work = [SequenceWork(shared, 0, logits=0)] if shared else []
    work += [SequenceWork(p.length - p.known, p.known, shared=p.shared) for p in chosen]
    return step_cost(spec, work, each.value, each.weight)


def decode_cost(spec: ModelSpec, chosen: Sequence[WorkloadRequest], each: Bytes) -> Cost:
    """All tokens after the first of each answer, in as many steps as the longest answer needs."""
    prompts_R = np.array([request.length for request in chosen])
    outputs_R = np.array([request.output for request in chosen])
    shared_R = np.array([request.shared for request in chosen])
    cached_layers = spec.token_layers  # the others have a state, which is as large for any length
    of_pair = spec.mixer_shape(cached_layers[0]).pair_flops(spec)  # of one query and one key
    of_entry = cache_bytes_per_token(spec, each.value) / len(cached_layers)
    of_state = state_bytes(cache_groups(spec), each.value)
    of_token = 2 * spec.matmul_parameters()
    of_token += sum(spec.mixer_shape(at).token_flops(spec) for at in range(spec.layers))
    flops, moved = 0.0, 0.0
    for step in range(1, int(outputs_R.max())):
        alive_R = outputs_R > step
        seen_R = (prompts_R + step)[alive_R]
        pairs = attended(spec, seen_R)
        read = attended(spec, seen_R - shared_R[alive_R]) + attended(spec, shared_R[:1])
        flops += of_token * len(seen_R) + of_pair * pairs
        moved += weights_read(spec, len(seen_R)) * each.weight
        moved += of_entry * read + of_state * len(seen_R)
    return Cost(flops, moved)


def measure_ceiling(device: str, dtype: str, budget_ms: float = 300.0) -> Ceiling:
    """Copy bandwidth and the matmul rate of one dtype, now and on this device; a GPU or the CPU."""
    from cairn.hw.measure_device import Unmeasurable, copy_rate, matmul_rate, why_not

    unit = cast(Dtype, dtype)
    if device == "cpu" and why_not(device, unit) is not None:
        unit = "fp32"  # which it is computed in
    name, size = device_name(device), (128 << 20) if device == "cpu" else (1 << 30)
    try:
        rates = {dtype: matmul_rate(device, unit, budget_ms).value}
    except Unmeasurable:  # such as fp8 on an old GPU: then only memory limits
        rates = {}
    bandwidth = copy_rate(device, size, budget_ms).value
    return Ceiling(device=name, bytes_per_s=bandwidth, flops_per_s=rates)


def device_name(device: str) -> str:
    if device == "cpu":
        return read_cpu(Path("/")).model or "CPU"
    import torch

    return torch.cuda.get_device_name(device)
