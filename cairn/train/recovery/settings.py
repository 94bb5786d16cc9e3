"""Recovery settings: the table `[recovery]` of a recipe.

    [recovery]
    on = true
    memory_every = 5        # steps between two copies in the memory of two nodes
    checksum_every = 10     # steps between two comparisons of replicas

Numbers only; no torch.
"""

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Recovery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recovery from failed processes."""

    on: bool = False
    """start the ranks under a driver that finds what fails and goes on"""
    memory_every: Positive = 5
    """steps between two checkpoints in memory: the most that a failure costs"""
    nodes: Positive = 2
    """groups of ranks that are taken to fail together; a copy of each rank's state lies in another one"""
    spare_nodes: Count = 0
    """nodes that wait without ranks, to take the place of one that is lost"""
    heartbeat_s: Seconds = 0.2
    """between two signs of life of a rank"""
    silent_s: Seconds = 3.0
    """a rank without a sign of life for so long is stopped or swapped out"""
    stuck_s: Seconds = 60.0
    """all alive, but no collective and no step for so long: they wait for each other"""
    start_s: Seconds = 300.0
    """a rank that has not begun to train after so long never will"""
    checksum_every: Count = 10
    """steps between two comparisons of ranks that hold the same state; 0: only before each checkpoint in memory"""
    slow_factor: Annotated[float, msgspec.Meta(gt=1)] = 3.0
    """a rank that computes so many times longer than the median of the others is a straggler"""
    slow_action: Literal["tell", "replace"] = "tell"
    """what is done about a straggler: it is named; or its node is taken out, as one that failed"""
    restarts: Count = 20
    """failures that are answered before the run is given up"""
    same_place: Positive = 3
    """failures on one node after which it is taken out"""
    rejoin_s: Seconds = 30.0
    """after so long a node that was lost is asked for again, and the run grows back"""
    object_store: str = ""
    """where a copy of the checkpoints goes: s3://bucket/run, file:///mnt/run; whatever fsspec knows. Empty: nowhere"""
    object_every: Positive = 1
    """every how many checkpoints on disk one is copied there; the last of a run always is"""
    object_keep: Count = 0
    """how many stay there, older ones are removed; 0: all"""
    interval: bool = False
    """choose checkpoint.every by Young and Daly, from the measured cost and the failures seen"""
    metrics_port: Count = 0
    """a port on loopback that serves the wall-time ledger as /metrics; 0: none"""
