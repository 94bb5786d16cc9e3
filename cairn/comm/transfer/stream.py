"""What streaming layer by layer hides: which part of a transfer is left when the prefill is over.

    compute   [ layer 0 ][ layer 1 ][ layer 2 ]
    transfer             [ layer 0 ][ layer 1 ][ layer 2 ]     exposed: what sticks out at the end
    without                                    [ layer 0 ][ layer 1 ][ layer 2 ]

Layers travel one at a time, in order. `give.ready` and a streamed offer do it; this is the arithmetic, for the planner
and beside the measurement. Pure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cairn.core.errors import ConfigError


class Hop(NamedTuple):
    """One layer's journey, in seconds from the start of the prefill."""

    ready_s: float  # it is computed
    start_s: float  # the wire is free for it
    end_s: float


def timeline(compute_s: Sequence[float], transfer_s: Sequence[float]) -> list[Hop]:
    """`compute_s` and `transfer_s` of each layer."""
    if len(compute_s) != len(transfer_s):
        raise ConfigError(f"{len(compute_s)} layers are computed and {len(transfer_s)} travel")
    hops: list[Hop] = []
    ready = free = 0.0
    for compute, transfer in zip(compute_s, transfer_s, strict=True):
        ready += compute
        start = max(ready, free)
        free = start + transfer
        hops.append(Hop(ready, start, free))
    return hops


def exposed_s(compute_s: Sequence[float], transfer_s: Sequence[float]) -> float:
    """How long after the prefill the last byte arrives; without streaming it is sum(transfer_s)."""
    hops = timeline(compute_s, transfer_s)
    return hops[-1].end_s - hops[-1].ready_s if hops else 0.0
