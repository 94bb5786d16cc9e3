"""In-network aggregation with real processes: one rank acts as the switch and sums the vectors of the others.

    worker 0 --\\                    /--> worker 0       group.switch_all_reduce(x, aggregator=2)
    worker 1 ---> rank 2: a pool of    -> worker 1       on every rank; the aggregator contributes nothing
                  few slots                              and its tensor does not change

It executes the schedule `all_reduce/switch` (SwitchML) that `cairn comm verify` proves: each worker sends one vector
and receives one, for any number of workers, and the pool is the memory of the switch. A process is not a switch,
because its host carries the bytes of all workers; the code is for tests and measurements. Sums are in rank order.
"""

import functools
from typing import TYPE_CHECKING

import torch

from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.ops import CollectiveSchedule
from cairn.labs.torch_backend.errors import CommError

if TYPE_CHECKING:
    from cairn.labs.torch_backend.collectives import Collectives

CHUNK_BYTES = 256 << 10  # of a slot of the pool
POOL = 8  # slots
MOST_CHUNKS = 4096
NAME = "switch_all_reduce"


@functools.lru_cache(maxsize=64)
def schedule_of_switch(workers: int, chunks: int, pool: int) -> CollectiveSchedule:
    return make("all_reduce", "switch", workers, chunks=chunks, pool=pool)


def switch_all_reduce(
    collectives: "Collectives",
    flat: torch.Tensor,
    aggregator: int,
    chunk_bytes: int,
    pool: int,
    timeout_s: float,
) -> None:
    """Reduce in place on the workers. The last chunk is padded with zeros because all slots have one size."""
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
