"""A trace, event by event: jobs come, a policy decides, jobs end; what happened to each of them.

    next event (a job arrives | a job ends | a promised time is there)  ->  policy, until it has nothing more to do

Checks what a policy may not do (start a job twice, give GPUs that are taken) by refusing it loudly. Knows the true
durations, which a policy does not. Deterministic: the same trace and policy give the same history.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec

from cairn.cluster.simulate.explain import explain
from cairn.cluster.simulate.history import JobHistory, ReplayHistory, Stint, UtilisationSample
from cairn.cluster.simulate.jobs import (
    Action,
    Pieces,
    Preempt,
    Reject,
    ReserveJob,
    Resize,
    Running,
    SimulatedCluster,
    SimulatedJob,
    StartJob,
    check_cluster,
    impossible,
)
from cairn.cluster.simulate.policies import SchedulingPolicy
from cairn.cluster.simulate.view import ClusterView
from cairn.cluster.simulate.waiting_queue import UserQueue

HOUR = 3600.0
DAY = 24 * HOUR
NEVER = float("inf")


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    half_life: float = 7 * DAY  # of past use, for fair share
    checkpoint: float = 0.5 * HOUR  # a preempted job goes on from its last multiple of this
    restart: float = 60.0  # what a restart costs, after preemption or a change of size
    spread_slowdown: float = 0.0  # a gang over more racks than it needs takes this share longer


def replay(
    cluster: SimulatedCluster,
    jobs: Sequence[SimulatedJob],
    policy: SchedulingPolicy,
    settings: ReplaySettings | None = None,
    *,
    watch: int | None = None,
    keep_stints: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> ReplayHistory:
    """The history of the whole trace. `watch` names a job whose reasons for waiting are recorded."""
    check_cluster(cluster)
    machine = _Replay(cluster, jobs, policy, settings or ReplaySettings(), watch, keep_stints)
    machine.run(progress)
    return machine.history


class _Replay:
    def __init__(
        self,
        cluster: SimulatedCluster,
        jobs: Sequence[SimulatedJob],
        policy: SchedulingPolicy,
        settings: ReplaySettings,
        watch: int | None,
        keep_stints: bool,
    ) -> None:
        self.policy, self.settings, self.watch, self.keep = policy, settings, watch, keep_stints
        self.arrivals = sorted(jobs, key=lambda job: (job.submit, job.id))
        self.line = UserQueue(policy.key, policy.by_user)
        self.view = ClusterView(cluster, self.line, settings.half_life, policy.by_user)
        self.view.rule, self.view.packed = policy.rule(self.arrivals, cluster.gpus), policy.packed
        stories = {
            job.id: JobHistory(job, left=min(job.duration, job.limit)) for job in self.arrivals
        }
        if len(stories) < len(self.arrivals):
            raise ValueError("two jobs have one id")
        self.stories = stories
        self.history = ReplayHistory(policy.name, cluster, stories, [], [], [])
        self.events: list[tuple[float, int, int]] = []  # when, id, version of the stint; -1 wakes

    def run(self, progress: Callable[[int], None]) -> None:
        view, events, arrivals = self.view, self.events, self.arrivals
        running = view.running
        position, count = 0, len(arrivals)
        arrival = arrivals[0].submit if arrivals else NEVER
        while position < count or events:
            view.now = now = events[0][0] if events and events[0][0] < arrival else arrival
            while events and events[0][0] <= now:
                _, identity, version = heappop(events)
                if version < 0:
                    self._wake(identity)
                elif (run := running.get(identity)) is not None and run.version == version:
                    self._finish(run)
            while arrival <= now:
                self._arrive(arrivals[position])
                position += 1
                arrival = arrivals[position].submit if position < count else NEVER
                if position % 1000 == 0:
                    progress(position)
            self._decide()
        progress(position)

    def _decide(self) -> None:
        view, decide, history = self.view, self.policy.decide, self.history
        while (action := decide(view)) is not None:
            history.decisions += 1
            self._apply(action)
        view.settle()
        history.samples.append(
            UtilisationSample(view.now, view.total - view.free.idle, len(view.waiting))
        )
        if self.watch is not None:
            self._watched(self.watch)

    def _watched(self, identity: int) -> None:
        story = self.stories.get(identity)
        if story is None or story.state != "waits" or story.job.submit > self.view.now:
            return
        why = explain(self.view, story.job, self.policy.name)
        reasons = self.history.reasons
        if not reasons or reasons[-1][1] != why:
            reasons.append((self.view.now, why))

    def _arrive(self, job: SimulatedJob) -> None:
        why = impossible(job, self.view.cluster)
        if why is not None:
            self._reject(job, why)
            return
        self.line.join(job)
        self.view.fresh.append(job)

    def _leave(self, job: SimulatedJob) -> int:
        """Out of the queue, whichever way; the place that it had."""
        view = self.view
        place = self.line.leave(job)
        if view.reserved:
            at = view.reserved.pop(job.id, None)
            if at is not None:
                del view.promised[bisect_left(view.promised, (at, job.id))]
                view.timeline.drop(job, at)
        if job in view.fresh:
            view.fresh.remove(job)
        return place

    def _apply(self, action: Action) -> None:
        match action:
            case StartJob():
                place = self._leave(action.job)
                self.view.started(action, place)
                self._start(action.job, action.pieces, action.gpus)
            case Preempt():
                for identity in action.ids:
                    self._preempt(self.view.running[identity], action.why)
            case Resize():
                self._resize(self.view.running[action.id], action)
            case ReserveJob():
                self._reserve(action.job, action.at)
                if action.at > self.view.now:
                    heappush(self.events, (action.at, action.job.id, -1))
            case Reject():
                self._leave(action.job)
                self._reject(action.job, action.why)

    def _reserve(self, job: SimulatedJob, at: float) -> None:
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
            self.view.awake.append((at, identity, self.stories[identity].job))

    def _reject(self, job: SimulatedJob, why: str) -> None:
        story = self.stories[job.id]
        story.state, story.why = "rejected", why

    def _start(self, job: SimulatedJob, pieces: Pieces, gpus: int) -> None:
        story, overhead = self.stories[job.id], self.settings.restart
        if story.first_start is None:
            story.first_start, overhead = self.view.now, 0.0
        story.state = "runs"
        self._run(story, pieces, gpus, overhead)

    def _run(self, story: JobHistory, pieces: Pieces, gpus: int, overhead: float) -> None:
        view, job = self.view, story.job
        now, identity = view.now, job.id
        version = story.preempted + story.resized
        spread = len(pieces) > 1 and self._spread(pieces)
        if spread or version or gpus != job.gpus:
            story.spread |= spread
            slower = (1 + self.settings.spread_slowdown * spread) * job.gpus / gpus
            full = min(job.duration, job.limit)
            left = story.left / full if full else 0.0
            believed = now + overhead + job.limit * left * slower
            end = now + overhead + story.left * slower
        else:  # most run once, as they asked to
            believed, end = now + job.limit, now + story.left
        view.free.take(pieces)
        if view.shares.counts:
            view.shares.change(job, gpus, +1, now)
        run = Running(job, pieces, gpus, now, end, believed, overhead, version)
        view.running[identity] = run
        if job.least and self.policy.resizes:
            view.offers.add(run, view.cluster.gpus)
        insort(view.ends, (believed, identity))
        if self.policy.by_slots:
            view.timeline.change(believed, gpus)
        heappush(self.events, (end, identity, version))

    def _spread(self, pieces: Pieces) -> bool:
        needed = -(-len(pieces) // self.view.cluster.rack)
        return self.view.free.racks_of(pieces) > needed

    def _stop(self, run: Running) -> None:
        view, job = self.view, run.job
        view.free.give(run.pieces)
        if view.shares.counts:
            view.shares.change(job, run.gpus, -1, view.now)
        del view.running[job.id]
        if job.least and self.policy.resizes:
            view.offers.drop(run, view.cluster.gpus)
        del view.ends[bisect_left(view.ends, (run.believed, job.id))]
        if self.policy.by_slots:
            view.timeline.change(run.believed, -run.gpus)
        view.ended_one()
        if self.keep:
            self.history.stints.append(Stint(job.id, run.start, view.now, run.gpus, run.pieces))

    def _finish(self, run: Running) -> None:
        self._stop(run)
        story, job = self.stories[run.job.id], run.job
        if run.overhead:
            self._charge(run, lost=min(run.overhead, self.view.now - run.start))
        story.end, story.left = self.view.now, 0.0
        story.state = "timeout" if job.duration > job.limit else "done"

    def _done(self, run: Running) -> float:
        """Seconds of work at full size that this stint has done so far."""
        slower = (
            (1 + self.settings.spread_slowdown * self._spread(run.pieces)) * run.job.gpus / run.gpus
        )
        return max(0.0, self.view.now - run.start - run.overhead) / slower

    def _charge(self, run: Running, lost: float) -> None:
        self.stories[run.job.id].lost += lost * run.gpus * run.job.milli / 1000

    def _preempt(self, run: Running, why: str) -> None:
        self._stop(run)
        story, done = self.stories[run.job.id], self._done(run)
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
        self.line.join(run.job)

    def _resize(self, run: Running, action: Resize) -> None:
        """A checkpoint, then on with other GPUs: nothing is lost but the restart."""
        self._stop(run)
        story = self.stories[run.job.id]
        story.left = max(0.0, story.left - self._done(run))
        self._charge(run, lost=min(run.overhead, self.view.now - run.start))
        story.resized += 1
        self._run(story, action.pieces, action.gpus, self.settings.restart)
