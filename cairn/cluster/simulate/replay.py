"""A trace, event by event: jobs come, a policy decides, jobs end; what happened to each of them.

    next event (a job arrives | a job ends | a promised time is there)  ->  policy, until it has nothing more to do

Checks what a policy may not do (start a job twice, give GPUs that are taken) by refusing it loudly. Knows the true
durations, which a policy does not. Deterministic: the same trace and policy give the same history.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec

from cairn.cluster.simulate.elastic import can_double, can_halve
from cairn.cluster.simulate.explain import explain
from cairn.cluster.simulate.history import History, Sample, Stint, Story
from cairn.cluster.simulate.jobs import (
    MILLI,
    Action,
    Cluster,
    Job,
    Preempt,
    Reject,
    Reserve,
    Resize,
    Running,
    Start,
    check_cluster,
    impossible,
)
from cairn.cluster.simulate.policies import Policy
from cairn.cluster.simulate.view import View

HOUR = 3600.0
DAY = 24 * HOUR


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    half_life: float = 7 * DAY  # of past use, for fair share
    checkpoint: float = 0.5 * HOUR  # a preempted job goes on from its last multiple of this
    restart: float = 60.0  # what a restart costs, after preemption or a change of size
    spread_slowdown: float = 0.0  # a gang over more racks than it needs takes this share longer


def replay(
    cluster: Cluster,
    jobs: Sequence[Job],
    policy: Policy,
    settings: Settings | None = None,
    *,
    watch: int | None = None,
    keep_stints: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> History:
    """The history of the whole trace. `watch` names a job whose reasons for waiting are recorded."""
    check_cluster(cluster)
    machine = _Replay(cluster, jobs, policy, settings or Settings(), watch, keep_stints)
    machine.run(progress)
    return machine.history


class _Replay:
    def __init__(
        self,
        cluster: Cluster,
        jobs: Sequence[Job],
        policy: Policy,
        settings: Settings,
        watch: int | None,
        keep_stints: bool,
    ) -> None:
        self.policy, self.settings, self.watch, self.keep = policy, settings, watch, keep_stints
        self.arrivals = sorted(jobs, key=lambda job: (job.submit, job.id))
        self.view = View(cluster, settings.half_life, policy.by_user)
        self.view.rule, self.view.packed = policy.rule(self.arrivals, cluster.gpus), policy.packed
        stories = {job.id: Story(job, left=min(job.duration, job.limit)) for job in self.arrivals}
        if len(stories) < len(self.arrivals):
            raise ValueError("two jobs have one id")
        self.history = History(policy.name, cluster, stories, [], [], [])
        self.events: list[tuple[float, int, int]] = []  # when, id, version of the stint; -1 wakes

    def run(self, progress: Callable[[int], None]) -> None:
        view, position = self.view, 0
        while position < len(self.arrivals) or self.events:
            arrival = (
                self.arrivals[position].submit if position < len(self.arrivals) else float("inf")
            )
            view.now = now = min(arrival, self.events[0][0]) if self.events else arrival
            while self.events and self.events[0][0] <= now:
                _, identity, version = heappop(self.events)
                run = view.running.get(identity)
                if version < 0:
                    self._wake(identity)
                elif run is not None and run.version == version:
                    self._finish(run)
            while position < len(self.arrivals) and self.arrivals[position].submit <= now:
                self._arrive(self.arrivals[position])
                position += 1
                if position % 1000 == 0:
                    progress(position)
            self._decide()
        progress(position)

    def _decide(self) -> None:
        view, decide = self.view, self.policy.decide
        while (action := decide(view)) is not None:
            self.history.decisions += 1
            self._apply(action)
        view.fresh.clear()
        view.awake.clear()
        view.settled = True
        busy = view.cluster.total - view.free.idle
        self.history.samples.append(Sample(view.now, busy, len(view.waiting)))
        if self.watch is not None:
            self._watched(self.watch)

    def _watched(self, identity: int) -> None:
        story = self.history.stories.get(identity)
        if story is None or story.state != "waits" or story.job.submit > self.view.now:
            return
        why = explain(self.view, story.job, self.policy.name)
        reasons = self.history.reasons
        if not reasons or reasons[-1][1] != why:
            reasons.append((self.view.now, why))

    def _arrive(self, job: Job) -> None:
        why = impossible(job, self.view.cluster)
        if why is not None:
            self._reject(job, why)
            return
        self._wait(job)
        self.view.fresh.append(job)

    def _wait(self, job: Job) -> None:
        key, sizes, size = self.policy.key, self.view.sizes, _size(job)
        sizes[size] = sizes.get(size, 0) + 1
        queues = [self.view.waiting]
        if self.policy.by_user:
            queues.append(self.view.queues.setdefault(job.user, []))
        for queue in queues:
            if not queue or key(queue[-1]) <= key(job):  # most come last
                queue.append(job)
            else:
                insort(queue, job, key=key)

    def _leave(self, job: Job) -> None:
        """Out of the queue, whichever way."""
        key, sizes, size = self.policy.key, self.view.sizes, _size(job)
        sizes[size] -= 1
        if not sizes[size]:
            del sizes[size]
        queues = [self.view.waiting]
        if self.policy.by_user:
            queues.append(self.view.queues[job.user])
        for queue in queues:
            place = 0 if queue[0].id == job.id else bisect_left(queue, key(job), key=key)
            if place == len(queue) or queue[place].id != job.id:
                raise RuntimeError(f"job {job.id} does not wait")
            del queue[place]
        if self.policy.by_user and not queues[1]:
            del self.view.queues[job.user]
        at = self.view.reserved.pop(job.id, None)
        if at is not None:
            del self.view.promised[bisect_left(self.view.promised, (at, job.id))]
            self.view.timeline.drop(job, at)
        if self.view.fresh:
            self.view.fresh = [other for other in self.view.fresh if other.id != job.id]

    def _apply(self, action: Action) -> None:
        match action:
            case Start():
                self._leave(action.job)
                if not action.beside:
                    self.view.forget_promise()
                self._start(action.job, action.pieces, action.gpus)
            case Preempt():
                for identity in action.ids:
                    self._preempt(self.view.running[identity], action.why)
            case Resize():
                self._resize(self.view.running[action.id], action)
            case Reserve():
                self._reserve(action.job, action.at)
                heappush(self.events, (action.at, action.job.id, -1))
            case Reject():
                self._leave(action.job)
                self._reject(action.job, action.why)

    def _reserve(self, job: Job, at: float) -> None:
        view, slot = self.view, (at, job.id, job)
        view.reserved[job.id] = at
        insort(view.promised, slot)
        view.awake.append(slot)
        view.timeline.promise(job, at)
        view.fresh.remove(job)

    def _wake(self, identity: int) -> None:
        """A promised time is there."""
        at = self.view.reserved.get(identity)
        if at is not None:
            self.view.awake.append((at, identity, self.history.stories[identity].job))

    def _reject(self, job: Job, why: str) -> None:
        story = self.history.stories[job.id]
        story.state, story.why = "rejected", why

    def _start(self, job: Job, pieces: tuple[tuple[int, int, int], ...], gpus: int) -> None:
        view, story = self.view, self.history.stories[job.id]
        again = story.first_start is not None
        overhead = self.settings.restart if again else 0.0
        if not again:
            story.first_start = view.now
        story.state = "runs"
        self._run(job, pieces, gpus, overhead)

    def _run(
        self,
        job: Job,
        pieces: tuple[tuple[int, int, int], ...],
        gpus: int,
        overhead: float,
        version: int = 0,
    ) -> None:
        view, story = self.view, self.history.stories[job.id]
        spread = len(pieces) > 1 and self._spread(pieces)
        story.spread |= spread
        slower = (1 + self.settings.spread_slowdown * spread) * job.gpus / gpus
        full = min(job.duration, job.limit)
        believed = view.now + overhead + job.limit * (story.left / full if full else 0.0) * slower
        end = view.now + overhead + story.left * slower
        version += story.preempted + story.resized
        view.free.take(pieces)
        view.shares.change(job, gpus, +1, view.now)
        run = Running(job, pieces, gpus, view.now, end, believed, overhead, version)
        view.running[job.id] = run
        if can_halve(job, gpus):
            view.halvable[job.id] = run
        if can_double(job, gpus):
            view.doublable[job.id] = run
        insort(view.ends, (believed, job.id))
        if self.policy.by_slots:
            view.timeline.change(believed, gpus)
        view.settled = False
        heappush(self.events, (end, job.id, version))

    def _spread(self, pieces: tuple[tuple[int, int, int], ...]) -> bool:
        needed = -(-len(pieces) // self.view.cluster.rack)
        return self.view.free.racks_of(pieces) > needed

    def _stop(self, run: Running) -> None:
        view = self.view
        view.free.give(run.pieces)
        view.shares.change(run.job, run.gpus, -1, view.now)
        del view.running[run.job.id]
        if run.job.elastic:
            view.halvable.pop(run.job.id, None)
            view.doublable.pop(run.job.id, None)
        del view.ends[bisect_left(view.ends, (run.believed, run.job.id))]
        if self.policy.by_slots:
            view.timeline.change(run.believed, -run.gpus)
        view.ended += 1
        view.settled = False
        if self.keep:
            self.history.stints.append(Stint(run.job.id, run.start, view.now, run.gpus, run.pieces))

    def _finish(self, run: Running) -> None:
        self._stop(run)
        story = self.history.stories[run.job.id]
        self._charge(run, lost=min(run.overhead, self.view.now - run.start))
        story.end, story.left = self.view.now, 0.0
        story.state = "timeout" if run.job.duration > run.job.limit else "done"

    def _done(self, run: Running) -> float:
        """Seconds of work at full size that this stint has done so far."""
        slower = (
            (1 + self.settings.spread_slowdown * self._spread(run.pieces)) * run.job.gpus / run.gpus
        )
        return max(0.0, self.view.now - run.start - run.overhead) / slower

    def _charge(self, run: Running, lost: float) -> None:
        self.history.stories[run.job.id].lost += lost * run.gpus * run.job.milli / 1000

    def _preempt(self, run: Running, why: str) -> None:
        self._stop(run)
        story, done = self.history.stories[run.job.id], self._done(run)
        before = min(run.job.duration, run.job.limit) - story.left
        every = self.settings.checkpoint
        kept = ((before + done) // every * every if every > 0 else before + done) - before
        kept = max(0.0, min(kept, done))
        useful = (
            kept
            * run.job.gpus
            / run.gpus
            * (1 + self.settings.spread_slowdown * self._spread(run.pieces))
        )
        self._charge(run, lost=self.view.now - run.start - useful)
        story.left -= kept
        story.preempted += 1
        story.state, story.why = "waits", f"preempted: {why}"
        self._wait(run.job)

    def _resize(self, run: Running, action: Resize) -> None:
        """A checkpoint, then on with other GPUs: nothing is lost but the restart."""
        self._stop(run)
        story = self.history.stories[run.job.id]
        story.left = max(0.0, story.left - self._done(run))
        self._charge(run, lost=min(run.overhead, self.view.now - run.start))
        story.resized += 1
        self._run(run.job, action.pieces, action.gpus, self.settings.restart)


def _size(job: Job) -> int:
    """As `View.sizes` counts it."""
    return job.gpus if job.milli == MILLI else 0
