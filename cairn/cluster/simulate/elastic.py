"""Elastic jobs: start with what there is, shrink for those that wait, grow when none does.

An elastic job may run with `gpus`, half of that, a quarter, ... down to `least`. When the first in the queue does not
fit, running jobs above their least size are halved, the largest first, until it could start; only if halving all of
them would not help, none is disturbed. With none waiting, the smallest relative to its full size doubles. Each
change costs a restart, so a job that is nearly done is left alone. Pure.
"""

from itertools import islice

from cairn.cluster.simulate.backfill import LOOK, backfill, who_came
from cairn.cluster.simulate.free_gpus import Free
from cairn.cluster.simulate.jobs import MILLI, Action, Resize, Running, SimulatedJob, StartJob
from cairn.cluster.simulate.offers import upper_half
from cairn.cluster.simulate.view import ClusterView

TRIED = 8  # jobs that are tried alone before several are halved
WORTH = 600.0  # seconds that have to be left (by the limit) for a change of size to pay


def decide_elastic(view: ClusterView) -> Action | None:
    """While no job starts or ends, what was not possible still is not: then only newcomers may pass the first."""
    if view.settled and not view.fresh:
        return None
    if not view.waiting:
        return _grow(view)
    head = view.waiting[0]
    if view.settled and head is not view.fresh[0]:
        if not view.free.idle or not view.somebody_may_fit():
            return None
        return backfill(view, head, who_came(view), newcomers=True)
    possible = sizes(head)
    for gpus in possible:
        pieces = view.fits(head, gpus)
        if pieces is not None:
            return StartJob(head, pieces, gpus)
    shrunk = _shrink(view, head, possible[-1])
    if shrunk is not None or not view.free.idle or not view.somebody_may_fit():
        return shrunk
    return backfill(view, head, islice(view.waiting, 1 + view.looked, 1 + LOOK))


def sizes(job: SimulatedJob) -> list[int]:
    """Possible sizes of an elastic job: the full size and its halves down to the minimum."""
    halved, size = [job.gpus], job.gpus
    while job.least and size % 2 == 0 and size // 2 >= job.least:
        size //= 2
        halved.append(size)
    return halved


def _shrink(view: ClusterView, head: SimulatedJob, needed: int) -> Action | None:
    """Action that frees GPUs for the head of the queue, if enough can be freed."""
    now, free = view.now, view.free
    nodes = (
        needed // free.gpus
    )  # that have to be empty; most often they cannot be, and that is quickly said
    if nodes and free.idle_nodes() + view.offers.emptied(free) < nodes:
        return None
    surplus = [run for run in view.offers.halvable.values() if run.believed - now > WORTH]
    if not surplus or view.free.idle + sum(run.gpus // 2 for run in surplus) < needed:
        return None
    if view.shares.lacks(head) is not None or not _room_with(view.free, head, needed, surplus):
        return None
    surplus.sort(key=lambda run: (-run.gpus, run.job.id))
    for run in surplus[:TRIED]:  # one that makes room alone is worth more than several
        if _room_with(view.free, head, needed, [run]):
            return _halve(run)
    return _halve(surplus[0])


def _room_with(free: Free, head: SimulatedJob, gpus: int, halved: list[Running]) -> bool:
    """Return whether a job would fit if these jobs were halved. Counts idle GPUs by node without changing state."""
    if head.milli < MILLI:
        return True  # every half is at least one whole GPU
    masks, coming = free.masks, dict[int, int]()
    for run in halved:
        for node, mask, _ in run.half or upper_half(run):
            coming[node] = mask | (coming[node] if node in coming else masks[node])
    whole, rest = divmod(gpus, free.gpus)
    if whole == 0 or (whole == 1 and not rest):
        return any(mask.bit_count() >= gpus for mask in coming.values())
    all_idle = (1 << free.gpus) - 1
    idle = free.idle_nodes() + sum(mask == all_idle for mask in coming.values())
    if idle != whole or not rest:
        return idle >= whole
    if any(rest <= mask.bit_count() < free.gpus for mask in coming.values()):
        return True
    touched = sum(1 << node for node in coming)
    return any(
        nodes & ~touched for state, nodes in free.groups.items() if rest <= state[0] < free.gpus
    )


def _halve(run: Running) -> Resize:
    back = {node: mask for node, mask, _ in upper_half(run)}
    kept = tuple(
        (node, mask & ~back.get(node, 0), milli)
        for node, mask, milli in run.pieces
        if mask & ~back.get(node, 0)
    )
    return Resize(run.job.id, kept, run.gpus // 2)


def _grow(view: ClusterView) -> Action | None:
    free, now, able = view.free, view.now, view.offers.doublable
    if not able or not free.idle:
        return None
    idle, nodes, largest = free.idle, free.idle_nodes(), free.largest()
    small = [
        run
        for run in able.values()
        if run.gpus <= idle
        and run.believed - now > WORTH
        and _may_double(free, run, nodes, largest)
    ]
    small.sort(key=lambda run: (run.gpus / run.job.gpus, run.job.id))
    for run in small:
        view.try_without(run)
        pieces = view.fits(run.job, run.gpus * 2)
        view.undo(run)
        if pieces is not None:
            return Resize(run.job.id, pieces, run.gpus * 2)
    return None


def _may_double(free: Free, run: Running, idle_nodes: int, largest: int) -> bool:
    """Quick, and never wrong with a no: whether there is twice the room where it could be."""
    needed = run.gpus * 2
    if needed > free.gpus:
        return idle_nodes + len(run.pieces) >= needed // free.gpus
    own = max(free.masks[node].bit_count() + mask.bit_count() for node, mask, _ in run.pieces)
    return own >= needed or largest >= needed
