"""The interval between checkpoints, to first order (Young 1974)."""

import math


def job_mtbf(gpu_mtbf_s: float, gpus: int) -> float:
    """Mean time between failures of a job that any of its GPUs can stop."""
    # begin answer
    return gpu_mtbf_s / gpus
    # end answer


def lost_share(interval_s: float, write_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that is lost to writing, to work done twice and to restarts."""
    # begin answer
    return write_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s
    # end answer


def best_interval(write_s: float, mtbf_s: float) -> float:
    # begin answer
    return math.sqrt(2 * write_s * mtbf_s)
    # end answer
