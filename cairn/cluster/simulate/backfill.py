"""EASY backfill: jobs may overtake the head of the queue if they do not delay its reservation.

    now |--- short job: done before ---|
        |                              at: the first one starts here, on the promised nodes
        |--- long job: on other nodes ------------------->

The first job that does not fit is promised nodes at a time (`reservation`); another one may start now if it cannot
delay that. Pure: looks at the view, changes nothing.
"""

from collections.abc import Iterable

from cairn.cluster.simulate.jobs import MILLI, Action, Pieces, SimulatedJob, StartJob
from cairn.cluster.simulate.view import ClusterView

LOOK = 100  # jobs behind the first that backfill looks at, as real schedulers limit it


def start_or_backfill(
    view: ClusterView, head: SimulatedJob, others: Iterable[SimulatedJob], newcomers: bool = False
) -> Action | None:
    """The first if it fits; else the next one that ends before the first could start, or keeps off its nodes."""
    pieces = view.fits(head)
    if pieces is not None:
        return StartJob(head, pieces, head.gpus)
    return backfill(view, head, others, newcomers)


def backfill(
    view: ClusterView, head: SimulatedJob, others: Iterable[SimulatedJob], newcomers: bool = False
) -> Action | None:
    """The first of the others that fits beside what the head is promised (nodes, from some time on).

    What is too large for the free GPUs, or for those off the promised nodes, is so for every larger job too. Most
    often none fits anyway: the promise is only worked out when one does. `newcomers` says that the others are
    those, and that the other waiting jobs may not start.
    """
    free, now = view.free, view.now
    # GPUs that do not fit, anywhere or off the promised nodes
    too_large = too_large_off = free.too_many()
    promise = view.known_promise(head)
    if promise is not None:
        too_large_off = free.too_many_off(promise.nodes)
    for job in [job for job in others if job.gpus < too_large or job.milli < MILLI]:
        gpus, whole, pieces = job.gpus, job.milli == MILLI, None
        if whole and gpus >= too_large:
            continue
        if promise is None:
            pieces = view.fits(job)
            if pieces is None:
                if whole and view.shares.lacks(job) is None:
                    too_large = too_large_off = gpus
                continue
            promise = view.reservation(head)
            too_large_off = free.too_many_off(promise.nodes)
        short = job.limit <= promise.at - now
        if not short and whole and gpus >= too_large_off:
            continue
        if pieces is None or not (short or _keeps_off(pieces, promise.nodes)):
            pieces = view.fits(job, avoid=0 if short else promise.nodes)
        if pieces is not None:
            return StartJob(job, pieces, gpus, beside=True, newcomer=newcomers)
        if whole and view.shares.lacks(job) is None:
            too_large_off = min(too_large_off, gpus)
            too_large = min(too_large, gpus) if short else too_large
    return None


def who_came(view: ClusterView) -> list[SimulatedJob]:
    """Jobs that arrived since the last full scan, within the backfill depth; they are last in arrival order."""
    return view.fresh[: max(0, 1 + LOOK - len(view.waiting) + len(view.fresh))]


def _keeps_off(pieces: Pieces, nodes: int) -> bool:
    """Return whether a single-node placement avoids these nodes; for a gang over several nodes it returns False."""
    return len(pieces) == 1 and not nodes >> pieces[0][0] & 1
