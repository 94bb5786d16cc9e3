"""The policies in their plain form: everything is looked at anew at every decision, nothing is remembered or skipped.

What `cairn.cluster.simulate` does fast has to come out as this does. Used by tests only.
"""

from itertools import chain, islice

from msgspec.structs import replace

from cairn.cluster.simulate.backfill import LOOK
from cairn.cluster.simulate.elastic import TRIED, WORTH, _halve, sizes, upper_half
from cairn.cluster.simulate.jobs import Reject, ReserveJob, Resize, StartJob
from cairn.cluster.simulate.policies import POLICIES


def backfill(view, ordered):
    head = ordered[0]
    pieces = view.free.find(head.gpus, head.milli, view.rule, packed=view.packed)
    if pieces is not None:
        return StartJob(head, pieces, head.gpus)
    return _beside(view, ordered)


def _beside(view, ordered):
    if len(ordered) == 1:
        return None
    promise = view.reservation(ordered[0])
    for job in islice(ordered, 1, 1 + LOOK):
        avoid = 0 if job.limit <= promise.at - view.now else promise.nodes
        pieces = view.free.find(job.gpus, job.milli, view.rule, avoid=avoid, packed=view.packed)
        if pieces is not None:
            return StartJob(job, pieces, job.gpus, beside=True)
    return None


def easy(view):
    return backfill(view, view.waiting) if view.waiting else None


def fair(view):
    return _by_user(view, lambda user: (view.shares.usage(user, view.now), user))


def drf(view):
    def order(user):
        return view.shares.dominant(user), view.shares.usage(user, view.now), user

    return _by_user(view, order)


def _by_user(view, order):
    if not view.waiting:
        return None
    queues = [view.queues[user] for user in sorted(view.queues, key=order)]
    behind = chain.from_iterable(queue[1:] for queue in queues)
    return backfill(view, [*(queue[0] for queue in queues), *behind])


def elastic(view):
    if not view.waiting:
        return _grow(view)
    head = view.waiting[0]
    for gpus in sizes(head):
        pieces = view.free.find(gpus, head.milli, view.rule)
        if pieces is not None:
            return StartJob(head, pieces, gpus)
    shrunk = _shrink(view, head)
    if shrunk is not None or not view.free.idle:
        return shrunk
    return _beside(view, view.waiting)


def _shrink(view, head):
    able = [
        run
        for run in view.running.values()
        if run.job.elastic
        and run.gpus % 2 == 0
        and run.gpus // 2 >= run.job.least
        and run.believed - view.now > WORTH
    ]
    able.sort(key=lambda run: (-run.gpus, run.job.id))
    if not able or not _fits_with(view, head, able):
        return None
    alone = [run for run in able[:TRIED] if _fits_with(view, head, [run])]
    return _halve((alone or able)[0])


def _fits_with(view, head, halved):
    halves = [upper_half(run) for run in halved]
    for pieces in halves:
        view.free.give(pieces)
    found = view.free.find(sizes(head)[-1], head.milli, view.rule) is not None
    for pieces in halves:
        view.free.take(pieces)
    return found


def _grow(view):
    able = [
        run
        for run in view.running.values()
        if run.job.elastic
        and run.gpus * 2 <= min(run.job.gpus, run.gpus + view.free.idle)
        and run.believed - view.now > WORTH
    ]
    for run in sorted(able, key=lambda run: (run.gpus / run.job.gpus, run.job.id)):
        view.free.give(run.pieces)
        pieces = view.free.find(run.gpus * 2, run.job.milli, view.rule)
        view.free.take(run.pieces)
        if pieces is not None:
            return Resize(run.job.id, pieces, run.gpus * 2)
    return None


def deadline(view):
    if view.fresh:
        return _admit(view, view.fresh[0])
    for job in sorted(view.waiting, key=lambda job: (view.reserved[job.id], job.id)):
        at = view.reserved[job.id]
        if job.gpus > view.free.idle or (at > view.now and not _early(view, job, at)):
            continue
        pieces = view.free.find(job.gpus, job.milli, view.rule)
        if pieces is not None:
            return StartJob(job, pieces, job.gpus)
    return None


def profile(view):
    """(from when, GPUs free), by adding up all that runs and all that was promised."""
    changes = {view.now: 0}
    for end, identity in view.ends:
        at = max(end, view.now)
        changes[at] = changes.get(at, 0) + view.running[identity].gpus
    for job in view.waiting:
        if job.id in view.reserved:
            begin = max(view.reserved[job.id], view.now)
            changes[begin] = changes.get(begin, 0) - job.gpus
            changes[begin + job.limit] = changes.get(begin + job.limit, 0) + job.gpus
    free, steps = view.free.idle, []
    for at in sorted(changes):
        free += changes[at]
        steps.append((at, free))
    return steps


def _early(view, job, at):
    for begin, free in profile(view):
        if begin >= view.now + job.limit:
            return True
        if free + (job.gpus if begin >= at else 0) < job.gpus:
            return False
    return True


def _admit(view, job):
    at = view.now
    if len(view.waiting) > 1 or view.free.find(job.gpus, job.milli, view.rule) is None:
        steps = profile(view)
        at = next(
            begin
            for begin, _ in steps
            if all(free >= job.gpus for when, free in _during(steps, begin, begin + job.limit))
        )
    if job.deadline is not None and at + job.limit > job.deadline:
        return Reject(job, "late")
    return ReserveJob(job, at)


def _during(steps, begin, end):
    return [(when, free) for when, free in steps if begin <= when < end]


def plain(name):
    forms = {
        "easy": easy,
        "topology": easy,
        "fgd": easy,
        "fair": fair,
        "drf": drf,
        "elastic": elastic,
        "deadline": deadline,
    }
    return replace(POLICIES[name], decide=forms[name])
