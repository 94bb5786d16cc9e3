"""How fast could these requests be served on this machine at best?

    limit = max(bytes / copy bandwidth, flops / matmul rate), both rates measured here

    bytes   the weights, once for each token of the longest answer, because its tokens come one after another;
            and for every token the keys and values that it attends to
    flops   of every token of every request

Requests wait for nobody, and while one reads another computes: prefill hides behind decode. What several requests
share is computed once, and read once in a step. Launches, norms, logits and sampling cost nothing. What is measured can
come near this limit and does not pass it, except where weights or keys stay in a cache.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from cairn.bench.workload import Prompted
from cairn.hw.datasheet import Dtype
from cairn.hw.host import read_cpu
from cairn.kernels.kernel import Cost
from cairn.kernels.tooling.measure import Ceiling
from cairn.models.spec import ModelSpec


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


class Work(NamedTuple):
    """What one sequence has to compute in one step."""

    tokens: int  # new ones
    cached: int  # before them
    logits: int = 1  # rows of them
    shared: int = 0  # so many of the cached tokens are read for somebody else anyway


def limit(
    spec: ModelSpec, chosen: Sequence[Prompted], ceiling: Ceiling, dtype: str, value_bytes: int
) -> Limit:
    prefill = prefill_cost(spec, chosen, value_bytes)
    decode = decode_cost(spec, chosen, value_bytes)
    return Limit(
        (prefill.bytes + decode.bytes) / ceiling.bytes_per_s,
        (prefill.flops + decode.flops) / ceiling.flops_per_s.get(dtype, math.inf),
    )


def step_cost(spec: ModelSpec, work: Iterable[Work], value_bytes: int) -> Cost:
    """Of one step over several sequences."""
    flops, tokens, keys = 0, 0, 0.0
    for part in work:
        flops += spec.forward_flops(part.tokens, part.cached, part.logits)
        tokens += part.tokens
        keys += spec.kv_bytes(part.tokens + part.cached - part.shared, value_bytes)
    return Cost(float(flops), weights_read(spec, tokens) * value_bytes + keys)


def prefill_cost(spec: ModelSpec, chosen: Sequence[Prompted], value_bytes: int) -> Cost:
    """All prompts in one step; a beginning that they share is computed for the first of them only."""
    shared = chosen[0].shared
    work = [Work(shared, 0, logits=0)] if shared else []
    work += [Work(len(p.prompt) - p.shared, p.shared, shared=p.shared) for p in chosen]
    return step_cost(spec, work, value_bytes)


def decode_cost(spec: ModelSpec, chosen: Sequence[Prompted], value_bytes: int) -> Cost:
    """All tokens after the first of each answer, in as many steps as the longest answer needs."""
    prompts_R = np.array([len(request.prompt) for request in chosen])
    outputs_R = np.array([request.output for request in chosen])
    shared_R = np.array([request.shared for request in chosen])
    flops, values = 0.0, 0.0
    for step in range(1, int(outputs_R.max())):
        alive_R = outputs_R > step
        seen_R = (prompts_R + step)[alive_R]
        pairs = attended(spec, seen_R)
        read = attended(spec, seen_R - shared_R[alive_R]) + attended(spec, shared_R[:1])
        flops += 2 * spec.matmul_parameters() * len(seen_R) + 4 * spec.heads * spec.head_dim * pairs
        values += weights_read(spec, len(seen_R)) + 2 * spec.kv_heads * spec.head_dim * read
    return Cost(flops, values * value_bytes)


def attended(spec: ModelSpec, seen_R: np.ndarray) -> int:
    """Over all layers and sequences, how many tokens the newest one looks at, itself included."""
    windows = [spec.window(layer) for layer in range(spec.layers)]
    wide = windows.count(0) * int(seen_R.sum())
    return wide + sum(int(np.minimum(seen_R, window).sum()) for window in windows if window)


def weights_read(spec: ModelSpec, tokens: int) -> float:
    """Weights that so many tokens visit, each counted once: of the experts, those that they are expected to choose."""
    if spec.experts is None or tokens == 0:
        return float(spec.matmul_parameters())
    experts = spec.experts
    missed = (1 - experts.per_token / experts.count) ** tokens
    visited = experts.count * (1 - missed)
    sparse = sum(spec.experts_of(layer) is not None for layer in range(spec.layers))
    one = (2 + spec.gated) * spec.hidden * experts.intermediate
    return spec.matmul_parameters() + sparse * one * (visited - experts.per_token)


def measure_ceiling(device: str, dtype: str, budget_ms: float = 300.0) -> Ceiling:
    """Copy bandwidth and the matmul rate of one dtype, now and on this device; a GPU or the CPU."""
    from cairn.hw.measure_device import Unmeasurable, copy_rate, matmul_rate

    name, size = device_name(device), (128 << 20) if device == "cpu" else (1 << 30)
    try:
        rates = {dtype: matmul_rate(device, cast(Dtype, dtype), budget_ms).value}
    except Unmeasurable:  # such as float16 on a CPU: then only memory limits
        rates = {}
    bandwidth = copy_rate(device, size, budget_ms).value
    return Ceiling(device=name, bytes_per_s=bandwidth, flops_per_s=rates)


def device_name(device: str) -> str:
    if device == "cpu":
        return read_cpu(Path("/")).model or "CPU"
    import torch

    return torch.cuda.get_device_name(device)
