"""Elastic jobs: start with what there is, shrink for those who wait, grow when nobody does.

An elastic job may run with `gpus`, half of that, a quarter, ... down to `least`. When the first in the queue does not
fit, running jobs above their least size are halved, the largest first, until it could start; only if halving all of
them would not help, nobody is disturbed. With nobody waiting, the smallest relative to its full size doubles. Each
change costs a restart, so a job that is nearly done is left alone. Pure.
"""

from cairn.cluster.simulate.free import Free
from cairn.cluster.simulate.jobs import Action, Job, Pieces, Resize, Running, Start
from cairn.cluster.simulate.view import View

TRIED = 8  # jobs that are tried alone before several are halved
WORTH = 600.0  # seconds that have to be left (by the limit) for a change of size to pay


def decide_elastic(view: View) -> Action | None:
    from cairn.cluster.simulate.policies import backfill  # policies names this function

    if not view.waiting:
        return _grow(view)
    head = view.waiting[0]
    for gpus in sizes(head):
        pieces = view.fits(head, gpus)
        if pieces is not None:
            return Start(head, pieces, gpus)
    shrunk = _shrink(view, head)
    if shrunk is not None:
        return shrunk
    if len(view.waiting) == 1 or not view.free.idle:
        return None
    promise = view.reservation(head)
    return backfill(view, view.waiting, promise.at, promise.nodes)


def sizes(job: Job) -> list[int]:
    """From the full size down to the least, by halves."""
    found, size = [job.gpus], job.gpus
    while job.elastic and size % 2 == 0 and size // 2 >= job.least:
        size //= 2
        found.append(size)
    return found


def _shrink(view: View, head: Job) -> Action | None:
    """One step towards room for the least size of the head, if room can be made at all."""
    surplus = [run for run in view.running.values() if _can_halve(view, run)]
    wanted = sizes(head)[-1]
    if not surplus or view.free.idle + sum(run.gpus // 2 for run in surplus) < wanted:
        return None
    surplus.sort(key=lambda run: (-run.gpus, run.job.id))
    if not _fits_with(view, head, wanted, surplus):
        return None
    for run in surplus[:TRIED]:  # one that makes room alone is worth more than several
        if _fits_with(view, head, wanted, [run]):
            return _halve(view.free, run)
    return _halve(view.free, surplus[0])


def _fits_with(view: View, head: Job, gpus: int, halved: list[Running]) -> bool:
    halves = [upper_half(view.free, run) for run in halved]
    for pieces in halves:
        view.free.give(pieces)
    found = view.fits(head, gpus) is not None
    for pieces in halves:
        view.free.take(pieces)
    return found


def _can_halve(view: View, run: Running) -> bool:
    job = run.job
    return (
        job.elastic
        and run.gpus % 2 == 0
        and run.gpus // 2 >= job.least
        and run.believed - view.now > WORTH
    )


def upper_half(free: Free, run: Running) -> Pieces:
    """The pieces that a job gives back when it halves: its last nodes, or the higher GPUs of its only one."""
    wanted = run.gpus // 2
    back = []
    for node, mask, milli in reversed(run.pieces):
        if wanted == 0:
            break
        given = 0
        while wanted and mask:
            top = 1 << (mask.bit_length() - 1)
            mask, given, wanted = mask ^ top, given | top, wanted - 1
        back.append((node, given, milli))
    return tuple(back)


def _halve(free: Free, run: Running) -> Resize:
    back = {node: mask for node, mask, _ in upper_half(free, run)}
    kept = tuple(
        (node, mask & ~back.get(node, 0), milli)
        for node, mask, milli in run.pieces
        if mask & ~back.get(node, 0)
    )
    return Resize(run.job.id, kept, run.gpus // 2)


def _grow(view: View) -> Action | None:
    if not view.free.idle:
        return None
    small = [
        run for run in view.running.values()
        if run.job.elastic and run.gpus * 2 <= min(run.job.gpus, run.gpus + view.free.idle)
        and run.believed - view.now > WORTH
    ]  # fmt: skip
    small.sort(key=lambda run: (run.gpus / run.job.gpus, run.job.id))
    for run in small:
        view.try_without(run)
        pieces = view.fits(run.job, run.gpus * 2)
        view.undo(run)
        if pieces is not None:
            return Resize(run.job.id, pieces, run.gpus * 2)
    return None
