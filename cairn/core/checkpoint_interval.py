"""Checkpoint interval that minimises the sum of checkpoint cost and expected lost work.

    cost w, mean time between failures M:      T = sqrt(2 w M)                                     (Young 1974)
                                               T = sqrt(2wM) (1 + sqrt(w/2M)/3 + (w/2M)/9) - w     (Daly 2006)

Pure arithmetic. The rate of failures is estimated from those that were seen, with one imagined failure a day so that a
run that has seen none yet does not conclude that there are none.
"""

import math

PRIOR_FAILURES, PRIOR_S = 1.0, 86_400.0


def young(cost_s: float, between_failures_s: float) -> float:
    """Seconds of work between two checkpoints."""
    return math.sqrt(2 * cost_s * between_failures_s)


def daly(cost_s: float, between_failures_s: float) -> float:
    """Seconds of work between two checkpoints; where a checkpoint costs more than twice M, one for each M."""
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = cost_s / (2 * between_failures_s)
    return young(cost_s, between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def between_failures(failures: int, seconds: float) -> float:
    """Mean seconds between failures, from what was seen and one imagined failure a day."""
    return (seconds + PRIOR_S) / (failures + PRIOR_FAILURES)


def every_steps(cost_s: float, step_s: float, failures: int, seconds: float) -> int:
    """Steps between two checkpoints, at least one."""
    if step_s <= 0:
        return 1
    return max(1, round(daly(max(cost_s, 1e-6), between_failures(failures, seconds)) / step_s))
