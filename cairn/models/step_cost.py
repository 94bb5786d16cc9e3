"""Lower bound of a step's cost: FLOPs and memory traffic.

    bytes   the weights, once for the whole step; and the keys and values that its tokens attend to
    flops   of every token, and of every row of logits

Exact for a step whose sequences are known one by one (`step_cost`), and from the sums of many steps (`total_cost`),
which is what a running engine can afford to keep. Norms, activations and sampling cost nothing. Pure arithmetic over a
`ModelSpec`; what a byte or a FLOP takes in seconds is for `hw.roofline` to say.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cairn.kernels.kernel import Cost
from cairn.models.cache import cache_bytes, cache_bytes_per_token
from cairn.models.spec import ModelSpec


class SequenceWork(NamedTuple):
    """Work of a sequence in a step."""

    tokens: int  # new ones
    cached: int  # before them
    logits: int = 1  # rows of them
    shared: int = 0  # so many of the cached tokens are read for another request anyway


class Total(NamedTuple):
    """Total work of several steps."""

    steps: int
    tokens: int
    logits: int  # rows of them
    read: int  # entries of the cache, summed over the sequences of each step
    pairs: int  # of a query and a key


def step_cost(
    spec: ModelSpec,
    work: Iterable[SequenceWork],
    value_bytes: float,
    weight_bytes: float | None = None,
) -> Cost:
    """Cost of a step over several sequences. `weight_bytes` is per weight, by default the size of a key or value."""
    weight_bytes = value_bytes if weight_bytes is None else weight_bytes
    flops, tokens, keys = 0, 0, 0.0
    for part in work:
        flops += spec.forward_flops(part.tokens, part.cached, part.logits)
        tokens += part.tokens
        keys += cache_bytes(spec, part.tokens + part.cached - part.shared, value_bytes)
    return Cost(float(flops), weights_read(spec, tokens) * weight_bytes + keys)


def total_cost(spec: ModelSpec, total: Total, weight_bytes: float, value_bytes: float) -> Cost:
    """Cost of many steps. `weight_bytes` is per weight, which may be packed; `value_bytes` per key or value.

    Of a layer with a window it is known only how many tokens look, so each is given a full window at most.
    """
    head = spec.vocab * spec.hidden
    reads, pairs, updates = 0, 0, 0
    for layer in range(spec.layers):
        shape = spec.mixer_shape(layer)
        updates += shape.token_flops(spec) * total.tokens
        if spec.keeps_state(layer):
            continue
        most = (spec.window(layer) or total.read) * max(total.tokens, 1)
        reads += min(total.read, most)
        pairs_in_window = min(
            total.pairs, (spec.window(layer) or total.pairs) * max(total.tokens, 1)
        )
        pairs += shape.pair_flops(spec) * pairs_in_window
    flops = 2 * (spec.matmul_parameters() - head) * total.tokens + 2 * head * total.logits
    flops += pairs + updates
    each = total.tokens // max(total.steps, 1)  # tokens of a step, for the experts that they choose
    weights = weights_read(spec, each) * total.steps * weight_bytes
    return Cost(
        float(flops),
        weights + cache_bytes_per_token(spec, value_bytes) / len(spec.token_layers) * reads,
    )


def attended(spec: ModelSpec, seen_R: np.ndarray) -> int:
    """Over all layers and sequences, how many tokens the newest one looks at, itself included."""
    windows = [spec.window(layer) for layer in spec.token_layers]
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
