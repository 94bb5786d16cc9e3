"""Recomputation modes, from the fastest to the one with the least memory. Imports nothing.

    none        nothing
    norms       outputs of norms                          the cheapest bytes: one pass over the stream each
    selective   outputs of norms and of activations       (and rotations, in the plain form)
    full        the whole layer: it keeps its input only

`auto` in a recipe is the first of these that fits into the memory: see `memory.fitting`. What backward computes again
it need not keep; what it keeps may wait on the host (`offload`).
"""

from typing import Literal, get_args

Recompute = Literal["none", "norms", "selective", "full"]
KINDS: tuple[Recompute, ...] = get_args(Recompute)
MOVING = 2  # offloaded layers that have memory on the device at a time, on their way out or back
