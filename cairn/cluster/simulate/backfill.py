"""Who may pass the first in the queue: EASY backfill with one reservation.

    now |--- short job: done before ---|
        |                              at: the first one starts here, on the promised nodes
        |--- long job: on other nodes ------------------->

The first job that does not fit is promised nodes at a time (`reservation`); another one may start now if it cannot
delay that. Pure: looks at the view, changes nothing.
"""

from collections.abc import Iterable

from cairn.cluster.simulate.jobs import MILLI, Action, Job, Start
from cairn.cluster.simulate.view import View

LOOK = 100  # jobs behind the first that backfill looks at, as real schedulers limit it


def start_or_backfill(view: View, head: Job, others: Iterable[Job]) -> Action | None:
    """The first if it fits; else the next one that ends before the first could start, or keeps off its nodes."""
    pieces = view.fits(head)
    if pieces is not None:
        return Start(head, pieces, head.gpus)
    return backfill(view, head, others)


def backfill(view: View, head: Job, others: Iterable[Job]) -> Action | None:
    """The first of the others that fits beside what the head is promised (nodes, from some time on).

    What is too large for the free GPUs, or for those off the promised nodes, is so for every larger job too. Most
    often nobody fits anyway: the promise is only worked out when somebody does.
    """
    if not view.somebody_may_fit():
        return None
    # GPUs that do not fit, anywhere or off the promised nodes
    too_large = too_large_off = view.free.too_many()
    promise = view.known_promise(head)
    for job in others:
        gpus = job.gpus
        if gpus >= too_large and job.milli == MILLI:
            continue
        whole = job.milli == MILLI
        if promise is None:
            if view.fits(job) is None:
                if whole and view.shares.lacks(job) is None:
                    too_large = too_large_off = gpus
                continue
            promise = view.reservation(head)
        short = job.limit <= promise.at - view.now
        if not short and whole and gpus >= too_large_off:
            continue
        pieces = view.fits(job, avoid=0 if short else promise.nodes)
        if pieces is not None:
            return Start(job, pieces, gpus, beside=True)
        if whole and view.shares.lacks(job) is None:
            too_large_off = min(too_large_off, gpus)
            too_large = min(too_large, gpus) if short else too_large
    return None
