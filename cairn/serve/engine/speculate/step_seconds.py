"""Step-time models: measured, or computed from a GPU's memory traffic and FLOPs.

measured    a + b * cost, fitted to the steps so far; the newest count most. The cost is that of its products, which
            an engine on a CPU measures when it starts (`row_costs.py`)
modelled    weights through memory or products, whichever is longer, and each layer's kernels one behind another.
            The same in every rank, so that all of them choose the same drafts
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import load
from cairn.hw.datasheet import find_chip
from cairn.models.step_cost import weights_read
from cairn.serve.engine.step_budget import OF_VENDOR, matmul_rate

if TYPE_CHECKING:
    from cairn.models.spec import ModelSpec
    from cairn.serve.engine.speculate.controller import Seconds

FORGET = 0.995  # what an earlier step counts for
# Of the time of a step of one row, what its products are believed to take until steps have been timed.
FIRST_SHARE = 0.9
# Steps of 8 rows that this belief counts as. With fewer of them the line follows others' load on a shared machine, and
# a request loses half of what drafts save.
FIRST_STEPS = 4
LAYER_S = 14.5e-6  # of the dependent kernels of a layer inside a CUDA graph
UNKNOWN_FLAT = 64  # tokens up to which products cost the same, on a GPU of which nothing is known


class MeasuredSeconds:
    """A line through (cost, seconds) of the steps without prompts, by weighted least squares."""

    def __init__(self, cost_of: Callable[[int], float]) -> None:
        """`cost_of`: what the products of so many tokens cost, in those of one."""
        self._cost_of = functools.cache(cost_of)
        self._belief = max(FIRST_STEPS * (cost_of(8) - cost_of(1)) ** 2, 1e-3)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        if tokens <= 0 or seconds <= 0:
            return
        cost = self._cost_of(tokens)
        for name, value in (
            ("_weight", 1.0),
            ("_x", cost),
            ("_y", seconds),
            ("_xx", cost * cost),
            ("_xy", cost * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def __call__(self, tokens: int) -> float:
        cost = self._cost_of(tokens)
        if not self._weight:
            return 1 + FIRST_SHARE * (cost - 1)  # only ratios count
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx - self._x * mean_x
        shared = self._xy - self._x * mean_y
        believed = FIRST_SHARE * mean_y / (1 + FIRST_SHARE * (mean_x - 1))
        slope = (shared + self._belief * believed) / (spread + self._belief)
        slope = max(slope, 0.0)
        least = 0.1 * mean_y  # a line through noise must not reach zero
        return max(mean_y + slope * (cost - mean_x), least)


def modelled_seconds(
    spec: "ModelSpec", weight_bytes: float, ranks: int, device_name: str, dtype: str
) -> "Seconds":
    """`weight_bytes`: of one weight. Keys and values are left out: verifying reads them once, as decoding does."""
    bandwidth, rate = _bandwidth(device_name), matmul_rate(device_name, dtype)

    @functools.cache  # asked for in every step
    def seconds(tokens: int) -> float:
        read = weights_read(spec, tokens) * weight_bytes / ranks
        multiplied = 2 * spec.matmul_parameters() * tokens / ranks
        if bandwidth is None or rate is None:
            return max(1.0, tokens / UNKNOWN_FLAT)  # only ratios count
        return max(read / bandwidth, multiplied / rate) + LAYER_S * spec.layers

    return seconds


def _bandwidth(device_name: str) -> float | None:
    try:
        ceilings = load()
    except HardwareError:
        ceilings = None
    if ceilings and ceilings.device_name == device_name and ceilings.copy is not None:
        return ceilings.copy.value
    chip, _ = find_chip(device_name)
    return None if chip is None else OF_VENDOR * chip.bytes_per_s
