"""First token and layer at which two paths diverge. Pure arithmetic.

    errors[l]   how far the hidden state behind layer l is from the plain path's, relative to its length

Rounding grows slowly from layer to layer; a part that computes something else makes one large step. The layer with the
largest step is named if the step is large, and if what it leads to is more than rounding.
"""

from collections.abc import Sequence
from typing import NamedTuple

STEP = 8.0  # times the error of the layer before
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.01}
PACKED_TOLERANCE = 0.2  # of weights and activations in 8 bits or fewer


class Departure(NamedTuple):
    layer: int
    error: float  # behind this layer
    before: float  # behind the layer before it


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two answers differ, a missing token included; None: they are the same."""
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def departure(errors: Sequence[float], tolerance: float) -> Departure | None:
    """The layer that does not compute what it should; None: rounding explains everything."""
    floor = tolerance / STEP
    steps = []
    for layer, error in enumerate(errors):
        before = errors[layer - 1] if layer else 0.0
        if error > tolerance:
            steps.append((error / max(before, floor), Departure(layer, error, before)))
    if not steps:
        return None
    step, found = max(steps, key=lambda pair: pair[0])
    return found if step >= STEP else None
