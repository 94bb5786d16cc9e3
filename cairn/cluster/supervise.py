"""Looks after one job on an engine that only holds processes: starts its nodes, replaces them, ends them. A program.

    python -m cairn.cluster.supervise STATE/train-tiny/3

      store ----+---- agent worker-0 ---- ranks          node lost      replaced, or the others go on without it
                +---- agent worker-1 ---- ranks          agent gives up the job has failed: the others are ended
                                                         store lost     all ranks again, with a fresh one

Restarts of single ranks are torch elastic's work. When this process is killed, its nodes end with it, and what it held
on an engine is given back. Where nodes come from is decided by `node_reservation`, what they are started with by
`node_start`; knows nothing about torch.
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from cairn.cluster import records
from cairn.cluster.elastic import store_argv
from cairn.cluster.failure_reports import FailureReports
from cairn.cluster.node_reservation import LOST, NodeReservation, NodeState, ReservedNode
from cairn.cluster.node_start import JobAttempt, argv_of, env_of
from cairn.cluster.records import JobRecord, JobStatus, State
from cairn.cluster.resolve import JobPlan, NodeGroup
from cairn.core.die_with_parent import die_with_parent
from cairn.core.rank_failure import RankFailure, failures_in, first_of, report, summary
from cairn.core.units import parse_duration

POLL_S = 0.1
LAST_S = 3.0  # after the first node is done, for those that are about to be


class JobEnded(Exception):
    """The job is over, one way or another."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason


class Supervisor:
    """Supervisor of a job, from its reservation to the end of its last process."""

    def __init__(self, record: JobRecord, plan: JobPlan, reservation: NodeReservation) -> None:
        self.record, self.plan, self.job, self.reservation = record, plan, plan.job, reservation
        self.places = [
            NodeState(reserved=ReservedNode(group, 0, f"{group.role}-{i}"))
            for group in plan.groups
            for i in range(group.most)
        ]
        for number, place in enumerate(self.places):
            place.reserved = ReservedNode(place.reserved.group, number, place.reserved.name)
        self.failures = record.folder / "failures"  # where nodes that share this disk write
        self.failures.mkdir(exist_ok=True)
        self.reports = FailureReports(self.failures)
        self.store: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.attempt = 0
        self.restarts = 0
        self.stopping = False
        self.status = JobStatus(state="queued")
        self.began: float | None = None  # from then on the time limit counts; waiting is free

    def run(self) -> JobStatus:
        """Says that the job has ended only when nothing of it is left."""
        try:
            end = self._until_the_end()
        finally:
            self._end_all()
            self.reservation.release()
        failure = self._first_failure() if end.state == "failed" else None
        if failure is None:
            self._set_status(end.state, end.reason)
        else:
            others = self._others(failure)
            self._set_status(
                end.state, f"{end.reason}: {summary(failure)}", report(failure, others)
            )
        return self.status

    def _until_the_end(self) -> JobEnded:
        try:
            self._reserve()
            self._start_all()
            while True:
                self._check()
                time.sleep(POLL_S)
        except JobEnded as end:
            return end

    # -- beginning ----------------------------------------------------------------------------

    def _reserve(self) -> None:
        for name in self.job.after:
            self._wait_for(name)
        while (reason := self.reservation.reserve(self.plan)) is not None:
            self._set_status("queued", reason)
            self._check_limits()
            time.sleep(POLL_S)

    def _wait_for(self, name: str) -> None:
        from cairn.cluster.backends.catalogue import backend_of

        earlier = records.find(name)
        engine = backend_of(earlier)
        while (status := engine.status(earlier)).state != "done":
            if status.state in records.ENDED:
                raise JobEnded(
                    "failed", f"job '{name}', which has to be done before, is {status.state}"
                )
            self._set_status("queued", f"waits for job '{name}', which is {status.state}")
            self._check_limits()
            time.sleep(POLL_S)

    def _start_all(self) -> None:
        """A fresh store and all nodes: nothing of an earlier attempt can be met again."""
        self._set_status("starting", f"{len(self.places)} nodes")
        self.began = self.began or time.monotonic()
        self.port = _free_port(self.reservation.address)
        if any(group.elastic and group.most > 1 for group in self.plan.groups):
            self.store = subprocess.Popen(
                store_argv(self.reservation.address, self.port),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
        for place in self.places:
            self._start(place)
        self._set_status("running", self._count())

    def _start(self, place: NodeState) -> None:
        run = JobAttempt(
            job=self.job,
            record=self.record,
            attempt=self.attempt,
            address=self.reservation.address,
            port=self.port,
            store=self.store is not None,
            loopback=self.reservation.loopback,
            failures=self.failures,
        )
        reserved, log = place.reserved, self.record.logs / f"{place.reserved.name}.log"
        place.handle = self.reservation.start(
            reserved, argv_of(run, reserved), env_of(run, reserved, time.time()), log
        )
        place.again_at = None

    # -- while it runs ------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_limits()
        if self.store is not None and self.store.poll() is not None:
            self._all_again("the rendezvous store was lost")
        self._read_failures()
        for place in self.places:
            if place.again_at is not None and time.monotonic() >= place.again_at:
                self._start(place)
                self._set_status("running", self._count())
            status = place.handle.poll() if place.handle is not None else None
            if status is not None:
                place.handle = None
                self._ended(place, status)
        if all(self._is_done(group) for group in self.plan.groups):
            self._wait_for_the_last()
            finished = sum(place.done for place in self.places)
            of = "all" if finished == len(self.places) else f"{finished} of"
            raise JobEnded("done", f"{of} {len(self.places)} nodes finished")

    def _wait_for_the_last(self) -> None:
        """A node that took a lost one's place finishes with the others; one that came too late never joins them."""
        waits_until = time.monotonic() + LAST_S
        while time.monotonic() < waits_until:
            running = [place for place in self.places if place.handle is not None]
            for place in running:
                if place.handle is not None and place.handle.poll() == 0:
                    place.handle, place.done = None, True
            if all(place.done for place in running):
                return
            time.sleep(POLL_S)

    def _check_limits(self) -> None:
        if self.stopping:
            raise JobEnded("stopped", "stopped by `cairn jobs stop`")
        if self.job.deadline is not None and time.time() >= self.job.deadline.timestamp():
            raise JobEnded("failed", f"deadline {self.job.deadline.isoformat()} reached")
        if self.job.kind == "serve" or self.began is None:
            return  # a server runs until it is stopped
        if time.monotonic() - self.began >= self.job.seconds:
            raise JobEnded("failed", f"time limit of {self.job.time_limit} reached")

    def _read_failures(self) -> None:
        """End the job after a failure that would repeat; torch elastic restarts it after any other."""
        if self.job.restart.policy == "fail":
            return  # then nothing is tried again anyway
        for one in self.reports.new():
            if one.over is not None:
                raise JobEnded("failed", one.over)
            again = f"{summary(one.failure)}, and was started again"
            self._set_status("running", f"{self._count()}; {again}")

    def _is_done(self, group: NodeGroup) -> bool:
        """An agent leaves with 0 only when every rank of its round has, so one is enough for all."""
        places = [place for place in self.places if place.reserved.group is group]
        if group.elastic:
            return any(place.done for place in places) and all(
                place.done or place.lost for place in places
            )
        return all(place.done for place in places)

    def _ended(self, place: NodeState, status: int) -> None:
        self._read_failures()  # what it wrote before it left
        if status == 0:
            place.done = True
        elif status < 0:
            self._lost(place, status)
        elif self.restarts >= self.job.restart.max or self.job.restart.policy == "fail":
            raise JobEnded("failed", f"node {place.reserved.name} gave up{self._after()}")
        elif self.job.restart.policy == "requeue":
            self._all_again(f"node {place.reserved.name} gave up")
        elif place.reserved.group.elastic:  # its agent has tried as often as it may
            raise JobEnded("failed", f"node {place.reserved.name} gave up{self._after()}")
        else:
            self.restarts += 1
            place.again_at = time.monotonic()
            self._set_status(
                "restarting", f"the program of {place.reserved.name} failed, and starts again"
            )

    def _lost(self, place: NodeState, status: int) -> None:
        how = "" if status == LOST else f" (signal {-status})"
        reason = f"node {place.reserved.name} was lost{how}"
        policy, elastic = self.job.restart.policy, place.reserved.group.elastic
        if policy == "fail" or self.restarts >= self.job.restart.max:
            raise JobEnded("failed", f"{reason}{self._after()}")
        place.lost += 1
        if not elastic or policy == "in_place":
            self.restarts += 1
            place.again_at = time.monotonic()
            self._set_status("restarting", f"{reason}; a new one takes its place")
        elif policy == "requeue":
            self._all_again(reason)
        elif self._left(place.reserved.group) < place.reserved.group.least:
            raise JobEnded("failed", f"{reason}; fewer than {place.reserved.group.least} are left")
        else:
            self.restarts += 1
            if self.job.elastic.regrow:
                delay = parse_duration(self.job.elastic.regrow_after)
                place.again_at = time.monotonic() + delay
            self._set_status("running", f"{reason}; {self._count()}")

    def _all_again(self, reason: str) -> None:
        if self.job.restart.policy == "fail" or self.restarts >= self.job.restart.max:
            raise JobEnded("failed", f"{reason}{self._after()}")
        self.restarts += 1
        self.attempt += 1
        self._set_status("restarting", f"{reason}; everything starts again")
        self._end_all()
        for place in self.places:
            place.done, place.again_at, place.lost = False, None, 0
        self._start_all()

    def _left(self, group: NodeGroup) -> int:
        return sum(p.handle is not None for p in self.places if p.reserved.group is group)

    def _count(self) -> str:
        running = sum(place.handle is not None for place in self.places)
        return f"{running} of {len(self.places)} nodes"

    def _after(self) -> str:
        times = "1 restart" if self.restarts == 1 else f"{self.restarts} restarts"
        return f" after {times}" if self.restarts else ""

    # -- the end ------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """SIGTERM, so that ranks can save; SIGKILL for those that ignore it."""
        grace = parse_duration(self.job.restart.grace) + 5  # the agent has a grace of its own
        running = [place.handle for place in self.places if place.handle is not None]
        for handle in running:
            handle.end()
        waits_until = time.monotonic() + grace
        while running and time.monotonic() < waits_until:
            running = [handle for handle in running if handle.poll() is None]
            time.sleep(0.02)
        for handle in running:
            handle.end(kill=True)
        for place in self.places:
            place.handle = None
        if self.store is not None:
            self.store.kill()
            self.store.wait()
            if self.store.stdin is not None:
                self.store.stdin.close()
            self.store = None

    def _first_failure(self) -> RankFailure | None:
        return first_of(failures_in(self.record.logs))

    def _others(self, first: RankFailure) -> int:
        same = [f for f in failures_in(self.record.logs) if f.meeting == first.meeting]
        return len({failure.rank for failure in same}) - 1

    def _set_status(self, state: State, reason: str, failure: str = "") -> None:
        running = sum(place.handle is not None for place in self.places)
        fresh = JobStatus(
            state=state,
            reason=reason,
            nodes=running,
            restarts=self.restarts,
            since=time.time(),
            failure=failure,
        )
        if (fresh.state, fresh.reason) != (self.status.state, self.status.reason):
            self.status = fresh
            records.write_status(self.record, fresh)
            print(f"{time.strftime('%H:%M:%S')} {state}: {reason}", flush=True)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def main(folder: Path) -> int:
    from cairn.cluster.backends.catalogue import reservation_of

    plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=JobPlan)
    record = records.runs(folder.parent.name)
    mine = next(candidate for candidate in record if candidate.folder.name == folder.name)
    try:
        supervisor = Supervisor(mine, plan, reservation_of(mine))

        def stopped(number: int, frame: object) -> None:
            supervisor.stopping = True

        signal.signal(signal.SIGTERM, stopped)
        signal.signal(signal.SIGINT, stopped)
        return 0 if supervisor.run().state == "done" else 1
    except Exception as error:
        records.write_status(
            mine,
            JobStatus(state="failed", reason=f"the supervisor failed: {error}", since=time.time()),
        )
        raise


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
