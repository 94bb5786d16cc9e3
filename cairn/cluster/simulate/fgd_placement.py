"""FGD for the queue: which state of a node loses the least, given the sizes of the jobs of this trace.

The same fragmentation as in `fragmentation`, of one node's state and without CPU: GPUs that the next job could not
use. States are few and jobs come in few sizes, so each pair is computed once. Pure.
"""

from collections import Counter
from collections.abc import Sequence

from cairn.cluster.simulate.free_gpus import Rule, State
from cairn.cluster.simulate.jobs import MILLI, SimulatedJob

Sizes = tuple[tuple[int, int, float], ...]  # GPUs on one node, milli, share of the jobs


def fgd_rule(jobs: Sequence[SimulatedJob], gpus: int) -> Rule:
    """A cost for each (state, job): by how much fragmentation rises, then how tight the fit is."""
    sizes = typical_sizes(jobs, gpus)
    memo: dict[tuple[State, int, int], float] = {}

    def cost(state: State, count: int, milli: int) -> float:
        key = (state, count, milli)
        value = memo.get(key)
        if value is None:
            rise = state_fragmentation(after(state, count, milli), sizes) - state_fragmentation(
                state, sizes
            )
            value = memo[key] = rise + 1e-6 * sum((state[0] * MILLI, *state[1:]))
        return value

    return cost


def typical_sizes(jobs: Sequence[SimulatedJob], gpus: int) -> Sizes:
    """A gang over several nodes counts as the part it wants of one."""
    counts = Counter((min(job.gpus, gpus), job.milli) for job in jobs)
    together = sum(counts.values())
    return tuple((size, milli, times / together) for (size, milli), times in sorted(counts.items()))


def state_fragmentation(state: State, sizes: Sizes) -> float:
    """Thousandths of GPUs that the next job cannot use, on average."""
    lefts = [MILLI] * state[0] + list(state[1:])
    wasted = 0.0
    for size, milli, share in sizes:
        usable = [left for left in lefts if left >= milli]
        used = sum(usable) if len(usable) >= size else 0
        wasted += share * (sum(lefts) - used)
    return wasted


def after(state: State, gpus: int, milli: int) -> State:
    """The state once the job is there; a shared GPU goes to the tightest one that has room."""
    if milli == MILLI:
        return (state[0] - gpus, *state[1:])
    lefts = list(state[1:])
    tight = min((left for left in lefts if left >= milli), default=None)
    if tight is None:
        return (state[0] - 1, *sorted([*lefts, MILLI - milli]))
    lefts.remove(tight)
    return (state[0], *sorted([*lefts, tight - milli]))
