"""In-network aggregation for real: one rank plays the switch, and adds up what the others send through it.

    worker 0 --\\                    /--> worker 0       group.switch_all_reduce(x, aggregator=2)
    worker 1 ---> rank 2: a pool of    -> worker 1       on every rank; the aggregator brings nothing
                  few slots                              and keeps what it has

A teaching proof, not a tool: no product path uses it.

It is the schedule `all_reduce/switch` (SwitchML), the very operations that `cairn comm verify` proves, over the links
of the backend: each worker sends a vector and receives one, whatever their number, and the pool is what the switch has
of memory. A process is no switch: its host carries the bytes of all workers, so it is here to be tested and measured
beside the others. Sums are in the order of the ranks.
"""

import functools
from typing import TYPE_CHECKING

import torch

from cairn.comm.backend.errors import CommError
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.ops import Schedule

if TYPE_CHECKING:
    from cairn.comm.backend.collectives import Collectives

CHUNK_BYTES = 256 << 10  # of a slot of the pool
POOL = 8  # slots
MOST_CHUNKS = 4096
NAME = "switch_all_reduce"


@functools.lru_cache(maxsize=64)
def schedule_of_switch(workers: int, chunks: int, pool: int) -> Schedule:
    return make("all_reduce", "switch", workers, chunks=chunks, pool=pool)


def switch_all_reduce(
    collectives: "Collectives",
    flat: torch.Tensor,
    aggregator: int,
    chunk_bytes: int,
    pool: int,
    timeout_s: float,
) -> None:
    """In place on the workers; the last chunk is filled up with zeros, since a slot has one size."""
    workers = [rank for rank in range(collectives.ranks) if rank != aggregator]
    if not 0 <= aggregator < collectives.ranks or not workers:
        raise CommError(
            f"{NAME}: rank {aggregator} of {collectives.ranks} cannot be the aggregator",
            hint="one rank of the group adds up for the others",
        )
    if chunk_bytes < flat.element_size() or pool < 1:
        raise CommError(f"{NAME}: {pool} slots of {chunk_bytes} bytes", hint="use 1 or more")
    chunks = min(max(-(-flat.nbytes // chunk_bytes), 1), MOST_CHUNKS)
    schedule = schedule_of_switch(len(workers), chunks, pool)
    each = -(-flat.numel() // chunks)
    brings = collectives.rank != aggregator
    memory = flat.new_zeros((schedule.slots if brings else pool) * each)
    if brings:
        memory[: flat.numel()] = flat
    views = [memory[slot * each : (slot + 1) * each] for slot in range(schedule.slots)]
    collectives.run_placed(
        schedule, [*workers, aggregator], views, NAME, flat.nbytes, aggregator, timeout_s
    )
    if brings:
        flat.copy_(memory[: flat.numel()])
