"""Step-time model of the engine, which replaces the device when a trace is simulated.

    seconds = host + launches + max(weights, products) + attention + between (+ collectives of tp)

    weights    bytes of the weights once, at SHARE of the copy rate      products   FLOPs at the sustained rate
    attention  pages that are read, or pairs of a prompt        between    norms, rotations, activations
               (pages that several look at come from memory once, then from the chip)

Unlike a floor (`serve.simulate.roofline_step_seconds`) it adds what does not overlap in our engine. Constants are the
same for all models; `measured` holds them against benchmarks/h200. Pure.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from cairn.models.cache import cache_bytes_per_token
from cairn.models.spec import ModelSpec
from cairn.plan.device import Device
from cairn.plan.layer_cost import WIDTH, layer_cost
from cairn.plan.train_cost import collective
from cairn.serve.engine.step import Chunk, Step

HOST_S = 0.20e-3  # of the loop that does not hide behind the device
KERNELS_PER_LAYER, LAUNCH_S = 8, 0.88e-6  # inside a graph
MEMORY_SHARE = 0.93  # of the copy rate that products of few rows reach
PAGES_SHARE = 0.90  # ... and attention over pages
PROMPT_ATTENTION = 0.80  # of the rate of products
AGAIN = 0.5  # of a read from memory, for pages that another request of the step has brought into the chip
TOWER_SHARE = 0.5  # of the rate of products that a tower reaches
SMALL, SMALL_SHARE = 2048, 0.92  # products of so few rows reach so much of the rate of large ones
ROW_S = 0.7e-6  # of the host for each row of a step: sampling, pages, answers


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A model as one engine holds it."""

    spec: ModelSpec
    device: Device
    tp: int = 1
    weight_bytes: float = 2.0  # of one weight of a layer: 2 is bf16, 1 is fp8
    head_bytes: float = 2.0  # of one weight of the lookup and of the output projection
    eight_bit: bool = False  # activations are rounded too, and products run at the rate of float8
    cache_bytes: float = 2.0  # of one key or value
    # Of a model that sees: its tower, whole on every device, and the rows of its pictures.
    tower_bytes: int = 0
    tower_flops: float = 0.0  # of the tower, for each token of a prompt


def step_seconds(served: Served) -> Callable[[Step], float]:
    spec, device, tp = served.spec, served.device, served.tp
    head = spec.vocab * spec.hidden / tp
    layer = layer_cost(spec, 1, 1, tp)  # of one token
    active = layer.products / 2  # weights of one layer that a token is multiplied with
    # Of one token in all layers, on one device.
    cache_bytes = cache_bytes_per_token(spec, served.cache_bytes, tp)
    windows = Counter(spec.window(layer) for layer in range(spec.layers))
    pair = spec.attention_flops(1) / tp  # of one query and one key in all layers
    fixed = HOST_S + (KERNELS_PER_LAYER * spec.layers + 2) * LAUNCH_S
    rate = device.fp8_flops_per_s if served.eight_bit else device.flops_per_s
    memory = device.bytes_per_s

    def seconds(step: Step) -> float:
        tokens, rows = step.tokens, step.draws
        reads = _cache_reads(step, windows)
        weights = (
            layer.weights if spec.experts is None else _visited(spec, tokens, tp, active)
        ) * spec.layers
        read = weights * served.weight_bytes + head * served.head_bytes
        products = 2 * tokens * active * spec.layers + 2 * rows * head
        moved = tokens * layer.between * spec.layers + 2 * rows * head / spec.hidden * WIDTH
        reduce = 0.0
        if tp > 1:
            reduce = (
                2 * spec.layers * collective("all_reduce", tp, tokens * spec.hidden * WIDTH, device)
            )
        return (
            fixed
            + rows * ROW_S
            + max(
                read / (MEMORY_SHARE * memory),
                products / (rate * _large(tokens)),
            )
            + reads.decode * cache_bytes / (PAGES_SHARE * memory)
            + max(
                reads.pairs * pair / (PROMPT_ATTENTION * device.flops_per_s),
                reads.prompt * cache_bytes / memory,
            )
            + moved / memory
            + reduce
            + step.prefill * served.tower_flops / (TOWER_SHARE * device.flops_per_s)
        )

    return seconds


class _CacheReads(NamedTuple):
    """KV-cache reads of a step, averaged over the layers."""

    decode: float  # cached tokens, by rows that decode
    prompt: int  # cached tokens, by chunks of prompts
    pairs: int  # of a query and a key, in chunks of prompts


def _cache_reads(step: Step, windows: Mapping[int, int]) -> _CacheReads:
    """`windows`: how many layers have each window; 0 reads every token."""
    decode, prompt, pairs = 0.0, 0, 0
    common: dict[int, int] = {}  # first page -> cached tokens that this step has read already
    total = sum(windows.values())
    for chunk in step.chunks:
        if chunk.count != 1:
            prompt += chunk.start + chunk.count
            pairs += chunk.count * (2 * chunk.start + chunk.count + 1) // 2
            continue
        context, before = chunk.start + 1, _read_before(chunk, common)
        for window, layers in windows.items():
            read = min(context, window) if window else context - (1 - AGAIN) * before
            decode += layers / total * read
    return _CacheReads(decode, prompt, pairs)


def _large(tokens: int) -> float:
    """Share of the large-matmul rate that a matmul with this number of rows reaches."""
    return 1 - (1 - SMALL_SHARE) * min(1.0, SMALL / max(tokens, 1))


def _read_before(chunk: Chunk, common: dict[int, int]) -> int:
    """Tokens of a prefix that another request of the step has brought into the cache of the chip."""
    request = chunk.request
    if not request.blocks or not request.blocks[0]:  # the null page: a window has left it behind
        return 0
    first = request.blocks[0]
    before = common.get(first)
    common[first] = max(before or 0, request.cached)
    return 0 if before is None else request.cached


def _visited(spec: ModelSpec, tokens: int, tp: int, active: float) -> float:
    """Weights of one layer with experts: those that so many tokens are expected to visit."""
    experts = spec.experts
    assert experts is not None
    visited = experts.count * (1 - (1 - experts.per_token / experts.count) ** max(tokens, 1))
    one = (2 + spec.gated) * spec.hidden * experts.intermediate / tp
    return active + (visited - experts.per_token) * one
