"""Scheduling policies: each is a pure function from a view to the next job.

    fifo        in the order of arrival; a job that does not fit blocks all behind it
    sjf         the shortest limit first
    easy        FIFO, and others may pass if they do not delay the first (backfill with one reservation)
    fair        EASY over users: the one who used least lately is first (half-life)
    drf         EASY over users: the one with the smallest dominant share now is first
    priority    a more important job takes whole gangs from less important ones
    topology    EASY, and gangs stay in few racks
    fgd         EASY, and jobs go where they break up the least for those that will come
    elastic     EASY, and elastic jobs shrink when a job waits and grow when none does
    deadline    a job is admitted only if it will be done in time

Order is a sort key where it never changes, and a search over users where it does. No clock and no state here.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

import msgspec

from cairn.cluster.simulate.backfill import LOOK, backfill, start_or_backfill, who_came
from cairn.cluster.simulate.deadline import decide_deadline
from cairn.cluster.simulate.elastic import decide_elastic
from cairn.cluster.simulate.fgd_placement import fgd_rule
from cairn.cluster.simulate.free_gpus import Rule, tightest
from cairn.cluster.simulate.jobs import Action, SimulatedJob, StartJob
from cairn.cluster.simulate.preemption import decide_priority
from cairn.cluster.simulate.view import ClusterView
from cairn.cluster.simulate.waiting_queue import Key

Decide = Callable[[ClusterView], Action | None]


class SchedulingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    about: str
    decide: Decide
    key: Key  # the order of `view.waiting`
    packed: bool = False
    by_user: bool = False  # what users hold and have used decides
    resizes: bool = False  # what elastic jobs could give or take decides: `view.offers` is kept
    by_slots: bool = False  # what is free later decides: `view.timeline` is kept
    rule: Callable[[Sequence[SimulatedJob], int], Rule] = lambda jobs, gpus: tightest


def decide_in_order(view: ClusterView) -> Action | None:
    """The first that waits, if it fits; no other passes it."""
    if not view.waiting:
        return None
    head = view.waiting[0]
    if view.settled and head not in view.fresh:
        return None  # it did not fit before
    pieces = view.fits(head)
    return StartJob(head, pieces, head.gpus) if pieces is not None else None


def decide_easy(view: ClusterView) -> Action | None:
    """EASY backfill. Until a job releases GPUs, jobs that did not fit still do not, so only new arrivals are tried."""
    if not view.waiting or not view.somebody_may_fit():
        return None
    head = view.waiting[0]
    if not view.settled or head in view.fresh:
        return start_or_backfill(view, head, islice(view.waiting, 1 + view.looked, 1 + LOOK))
    return backfill(view, head, who_came(view), newcomers=True) if view.fresh else None


def decide_fair(view: ClusterView) -> Action | None:
    return _by_user(view, view.shares.by_usage)


def decide_drf(view: ClusterView) -> Action | None:
    return _by_user(view, view.shares.by_dominant)


def _by_user(
    view: ClusterView, ranked: Callable[[Collection[str], float], list[str]]
) -> Action | None:
    """Each user's first job, in the order of users; then all others, user by user.

    While no job ends, one that did not fit still does not, and one that was held back still is, unless another one
    is first now: time passes, and a user whose job starts beside the first has a larger share.
    """
    if not view.waiting or not view.somebody_may_fit():
        return None
    if view.settled and not view.fresh and not view.beside:
        return None
    if len(view.waiting) == 1:
        return start_or_backfill(view, view.waiting[0], ())
    # who comes alone, while all the others were looked at
    alone = view.settled and len(view.fresh) < 2 and len(view.waiting) <= 1 + LOOK
    held_back_for = view.held_back_for()
    if alone and held_back_for is None and view.fresh and not view.may_fit(view.fresh[0]):
        return None
    users = ranked(view.queues, view.now)
    head = view.queues[users[0]][0]
    if alone and (held_back_for is None or held_back_for == head.id):
        others = [job for job in view.fresh if job is not head]
        return start_or_backfill(view, head, others, newcomers=True)
    others = [view.queues[user][0] for user in users[1:]]
    for user in users:
        if len(others) < LOOK:
            others += view.queues[user][1 : 1 + LOOK]
    return start_or_backfill(view, head, others[:LOOK])


def by_arrival(job: SimulatedJob) -> tuple[float, ...]:
    return (job.submit, job.id)


def by_limit(job: SimulatedJob) -> tuple[float, ...]:
    return (job.limit, job.submit, job.id)


def by_priority(job: SimulatedJob) -> tuple[float, ...]:
    return (-job.priority, job.submit, job.id)


def _policies() -> Iterable[SchedulingPolicy]:
    yield SchedulingPolicy(
        name="fifo", about="as they came", decide=decide_in_order, key=by_arrival
    )
    yield SchedulingPolicy(
        name="sjf", about="shortest limit first", decide=decide_in_order, key=by_limit
    )
    yield SchedulingPolicy(
        name="easy",
        about="FIFO with backfill and one reservation",
        decide=decide_easy,
        key=by_arrival,
    )
    yield SchedulingPolicy(
        name="fair",
        about="least used lately first, with a half-life",
        decide=decide_fair,
        key=by_arrival,
        by_user=True,
    )
    yield SchedulingPolicy(
        name="drf",
        about="smallest dominant share first",
        decide=decide_drf,
        key=by_arrival,
        by_user=True,
    )
    yield SchedulingPolicy(
        name="priority",
        about="important jobs take whole gangs from others",
        decide=decide_priority,
        key=by_priority,
    )
    yield SchedulingPolicy(
        name="topology",
        about="backfill, gangs in few racks",
        decide=decide_easy,
        key=by_arrival,
        packed=True,
    )
    yield SchedulingPolicy(
        name="fgd",
        about="backfill, placed with the least new fragmentation",
        decide=decide_easy,
        key=by_arrival,
        rule=fgd_rule,
    )
    yield SchedulingPolicy(
        name="elastic",
        about="jobs shrink for those who wait, and grow back",
        decide=decide_elastic,
        key=by_arrival,
        resizes=True,
    )
    yield SchedulingPolicy(
        name="deadline",
        about="admitted only if done in time",
        decide=decide_deadline,
        key=by_arrival,
        by_slots=True,
    )


POLICIES = {policy.name: policy for policy in _policies()}
