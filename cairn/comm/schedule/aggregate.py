"""All-reduce with in-network aggregation: a switch sums the vectors of the workers.

    worker 0 --\\                /--> worker 0
    worker 1 ---> aggregator ---->  worker 1        each worker sends a vector and receives one,
    worker 2 --/   (pool)       \\--> worker 2       whatever the number of workers

The switch has little memory: a pool of slots. Chunk c lives in slot c mod pool, and a worker sends
chunk c + pool only when it has the sum of chunk c, which tells it that the slot is free again: the
pool clocks the workers, as in SwitchML (Sapio et al., 2021). Here the aggregator is one more node
after the workers; a rank plays it (`labs/torch_backend/aggregator.py`), or the simulator.
"""

import numpy as np

from cairn.comm.schedule.ops import ScheduleError
from cairn.comm.schedule.plan import SchedulePlan


def switch_all_reduce(workers: int, chunks: int, pool: int) -> SchedulePlan:
    """Node `workers` is the aggregator; its slots 0 .. pool-1 are the pool."""
    if pool < 1:
        raise ScheduleError(f"a switch with {pool} slots cannot add", hint="use 1 or more")
    plan = SchedulePlan(workers)
    worker = np.arange(workers)
    for chunk in range(chunks + pool):
        finished_chunk = chunk - pool
        if finished_chunk >= 0:
            plan.send(
                workers,
                worker,
                finished_chunk % pool,
                to=finished_chunk,
                step=plan.next_step + worker,
            )
        if chunk < chunks:
            first = plan.next_step
            plan.send(0, workers, chunk, to=chunk % pool, step=first)
            plan.send(
                worker[1:], workers, chunk, to=chunk % pool, reduce=True, step=first + worker[1:]
            )
    return plan
