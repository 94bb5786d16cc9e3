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
    """While nobody starts or ends, what was not possible still is not: then only newcomers may pass the first."""
    if view.settled and not view.fresh:
        return None
    if not view.waiting:
        return _grow(view)
    head = view.waiting[0]
    if view.settled and head is not view.fresh[0]:
        place = len(view.waiting) - len(view.fresh)
        return backfill(view, head, view.fresh[: max(0, 1 + LOOK - place)])
    for gpus in sizes(head):
        pieces = view.fits(head, gpus)
        if pieces is not None:
            return Start(head, pieces, gpus)
    return _shrink(view, head) or backfill(view, head, islice(view.waiting, 1, 1 + LOOK))


def sizes(job: Job) -> list[int]:
    """From the full size down to the least, by halves."""
    found, size = [job.gpus], job.gpus
    while job.elastic and size % 2 == 0 and size // 2 >= job.least:
        size //= 2
        found.append(size)
    return found


def _shrink(view: View, head: Job) -> Action | None:
    """One step towards room for the least size of the head, if room can be made at all."""
    now = view.now
    surplus = [run for run in view.elastic.values() if _can_halve(run, now)]
    wanted = sizes(head)[-1]
    if not surplus or view.free.idle + sum(run.gpus // 2 for run in surplus) < wanted:
        return None
    surplus.sort(key=lambda run: (-run.gpus, run.job.id))
    if view.shares.lacks(head) is not None or not _room_with(view.free, head, wanted, surplus):
        return None
    for run in surplus[:TRIED]:  # one that makes room alone is worth more than several
        if _room_with(view.free, head, wanted, [run]):
            return _halve(run)
    return _halve(surplus[0])


def _room_with(free: Free, head: Job, gpus: int, halved: list[Running]) -> bool:
    """Whether a job that does not fit now would, if these were halved. Counts idle GPUs by node, moves nothing."""
    if head.milli < MILLI:
        return True  # every half is at least one whole GPU
    masks, coming = free.masks, dict[int, int]()
    for run in halved:
        for node, mask, _ in upper_half(run):
            coming[node] = mask | (coming[node] if node in coming else masks[node])
    whole, rest = divmod(gpus, free.gpus)
    if whole == 0 or (whole == 1 and not rest):
        return any(mask.bit_count() >= gpus for mask in coming.values())
    all_idle = (1 << free.gpus) - 1
    idle = free.idle_nodes() + sum(mask == all_idle for mask in coming.values())
    if idle != whole or not rest:
        return idle >= whole
    other = any(rest <= mask.bit_count() < free.gpus for mask in coming.values())
    return other or any(
        nodes for state, nodes in free.groups.items()
        if rest <= state[0] < free.gpus and any(not nodes >> n & 1 for n in coming) is not None
        and _besides(nodes, coming)
    )  # fmt: skip


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
