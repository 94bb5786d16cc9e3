"""Relative cost of matmuls with several rows on a CPU, measured when an engine starts.

    rows    1    2    3    4    5    6    7    8   12   16      a layer of SmolLM2 in Q4_1 on a Cascade Lake
    cost  1.0  1.1  1.3  1.5  1.7  1.8  2.1  2.2  3.0  3.9

There rows share the unpacking of a weight, and each further one adds its dot products: 0.1 to 0.2 of a row. On other
CPUs, and with weights in another form, it is otherwise. How many drafts save time depends on it most of all.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from cairn.models.linear.maps import Linear, linears
from cairn.models.transformer import Transformer
from cairn.serve.engine.cpu_threads import one_thread

ROWS = 16  # that are timed: of one request with the most drafts
PERIOD = 8  # rows by which costs go on beyond them
MOST_WEIGHTS = 1 << 24  # of the maps that are timed: a fifth of a second for each turn
TURNS = 8  # the shortest time of each number of rows counts
LEAST_TURNS, ENOUGH_S = 2, 0.2  # or fewer turns, where they take long


def row_costs(model: Transformer) -> Callable[[int], float]:
    """Relative cost of a step by its number of tokens, measured in a typical layer from the middle."""
    middle = model.layers[len(model.layers) // 2]
    maps = _some_maps(list(linears(middle)) or list(linears(model)))
    seconds = _shortest(maps, model.embedding.weight.dtype)
    costs = [max(each / seconds[0], 1.0) for each in seconds]
    return lambda rows: continued(costs, rows)


def continued(costs: Sequence[float], rows: int) -> float:
    """The cost of so many rows; beyond those that were timed, each `PERIOD` adds what the last one has added.

    Never less than nothing: the products of tiny models take as long as the clock's error.
    """
    periods = max(0, math.ceil((rows - len(costs)) / PERIOD))
    return costs[rows - 1 - PERIOD * periods] + periods * max(costs[-1] - costs[-1 - PERIOD], 0.0)


def _some_maps(maps: list[Linear]) -> list[Linear]:
    """The smallest, as many as have `MOST_WEIGHTS`, and one at least."""
    by_size = sorted(maps, key=lambda part: math.prod(part.shape_NK()))
    chosen, weights = by_size[:1], math.prod(by_size[0].shape_NK())
    for part in by_size[1:]:
        weights += math.prod(part.shape_NK())
        if weights > MOST_WEIGHTS:
            break
        chosen.append(part)
    return chosen


@torch.inference_mode()
def _shortest(maps: Sequence[Linear], dtype: torch.dtype) -> list[float]:
    """Seconds of all maps with 1 .. ROWS rows, by the thread's own clock: it does not run while others have the CPU."""
    shortest, spent = [math.inf] * ROWS, 0.0
    with one_thread():
        for turn in range(TURNS):
            for at in range(ROWS):
                seconds = _seconds(maps, at + 1, dtype)
                shortest[at] = min(shortest[at], seconds)
                spent += seconds
            if spent > ENOUGH_S and turn + 1 >= LEAST_TURNS:
                break
    return [max(seconds, 1e-9) for seconds in shortest]  # where a clock is coarse


def _seconds(maps: Sequence[Linear], rows: int, dtype: torch.dtype) -> float:
    inputs = [torch.ones(rows, part.shape_NK()[1], dtype=dtype) for part in maps]
    began = time.thread_time()
    for part, x_MK in zip(maps, inputs, strict=True):
        part.product(x_MK)
    return time.thread_time() - began
