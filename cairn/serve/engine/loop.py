"""The engine's loop: schedule, launch, land, update; again and again while there is work.

    plain        schedule N, launch N, wait for N, update N
    overlapped   schedule N+1, launch N+1, wait for N, update N: the host's work hides behind the device's

Both give the same tokens. In the overlapped form a stop is seen one step late, and the step too many is dropped.
Where the time of each step went stands in `step_ledger`. A step that fails ends its own requests with the reason and no
others; `step` raises where nothing later can succeed: after an error of CUDA or NCCL, and after several failed steps in
a row. What is done between two steps is in `controls`. Not thread-safe: one thread owns an engine.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cairn.core.events import span
from cairn.serve.engine.controls import Controls
from cairn.serve.engine.failure import MOST_FAILED_STEPS, described, is_fatal
from cairn.serve.engine.media import MediaFailed, WaitingForRows
from cairn.serve.engine.messages import EngineFailed
from cairn.serve.engine.pooling import Pools
from cairn.serve.engine.request import Finish, Request, RequestId
from cairn.serve.engine.request_checks import check_request
from cairn.serve.engine.runner import Flight, Landed, Runner
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds
from cairn.serve.engine.step import Advance, Step
from cairn.serve.engine.step_budget import Pace
from cairn.serve.engine.step_ledger import StepLedger, Turn
from cairn.serve.engine.step_times import Spent, StepTimes
from cairn.serve.engine.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from cairn.serve.tiers.page_tiers import PageTiers

DRAFTING_NEW = 0.1  # what the newest step counts for in the mean time of drafting


class Output(NamedTuple):
    """Output of a step for one request."""

    request: Request
    tokens: Sequence[int]  # several where drafts held; none: it ended without one
    finished: bool
    logprobs: list[TokenLogprobs] | None = None  # of each of them, if they were asked for


class Engine(Controls):
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool = True,
        together: bool = False,
        pace: Pace | None = None,
        media: WaitingForRows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, runner, media)
        self.overlap, self.clock = overlap, clock
        # With other ranks: they wait for this one, so its failure ends all of them.
        self.together = together
        self.pace = pace  # limits the time of a step
        self.ledger = StepLedger()
        self.steps = 0  # taken so far: a watchdog looks at it
        self.prompt_logprobs: dict[Request, list[TokenLogprobs]] = {}
        self.pools = Pools()  # prompts as vectors; the reader of the outputs takes them
        self._landed = 0.0  # when the last step did
        self._flying: Flight | None = None
        self._failed_steps = 0  # in a row

    @property
    def times(self) -> deque[StepTimes]:
        return self.ledger.times

    @property
    def spent(self) -> Spent:
        return self.ledger.spent

    @property
    def has_work(self) -> bool:
        waiting = self.scheduler.has_work or (self.media is not None and bool(self.media.waiting))
        return (waiting and not self.paused and not self.asleep) or self._flying is not None

    def add(self, request: Request) -> None:
        """Put a request in line, or refuse it with a RequestError. While the engine is paused, it waits."""
        self.runner.adapters.check(request)
        request.ledger.arrived = request.ledger.arrived or self.clock()
        if request.pieces and not request.piece_rows and self.media is not None:
            check_request(request, self.scheduler.limits)
            request.ledger.media = sum(picture.decode_s for picture in request.pictures)
            self.media.push(request)
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self.scheduler.add(request)
        if self.weights_identity:
            request.identity = self.weights_identity + request.identity
            request.hashes = []

    def abort(
        self, id: RequestId, reason: Finish = "abort", stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request at once; what is in flight for it is dropped. A stop string is a reason, too."""
        request = self.media.remove(id) if self.media is not None else None
        if request is not None:
            request.state, request.finish, request.stop_reason = "finished", reason, stop_reason
            self._close(request, self.clock())
            return request
        request = self.scheduler.abort(id, reason, stop_reason)
        if request is not None:
            self._close(request, self.clock())
            self.prompt_logprobs.pop(request, None)
            self.pools.pop(request)
        return request

    def step(self) -> list[Output]:
        """Run one iteration and return its outputs; with overlap they belong to the step launched before."""
        if self.paused or self.asleep:
            return self.land_last()
        outputs = self._admit_media() if self.media is not None else []
        if self.tiers is not None:
            self.tiers.poll()
        turn = Turn(self.clock())
        step, flight, failed = self._schedule_and_launch(turn)
        outputs += failed
        due = flight
        if self.overlap:
            due, self._flying = self._flying, flight
        landed = None
        if due is not None:
            with span("wait"):
                landed, failed = self._land(due)
            outputs += failed
        elif self.tiers is not None and flight is None and self.tiers.is_loading:
            self.tiers.wait()
        turn.waited = self.clock()
        on_cpu = self.runner.device.type == "cpu"
        self.ledger.spend(None if due is None else due.step, turn, on_cpu)
        if due is not None and landed is not None:
            with span("update"):
                outputs += self._update(due.step, landed)
            if self.tiers is not None:
                self._note_landed(self.tiers, due, turn.waited)
        turn.ended = self.clock()
        self.steps += 1
        self.ledger.remember(step, turn)
        return outputs

    def _schedule_and_launch(self, turn: Turn) -> tuple[Step, Flight | None, list[Output]]:
        """The next step, its flight unless it has no chunks or failed, and the requests that ended with it."""
        thread_s = time.thread_time()
        with span("schedule"):
            if self.pace is not None:
                self.scheduler.step_limit = self.pace.tokens()
            step = self.scheduler.schedule()
        turn.scheduled, scheduling_s = self.clock(), time.thread_time() - thread_s
        self.ledger.stamp(step, turn)
        with span("launch", sequences=len(step.chunks), tokens=step.tokens):
            outputs, flight = self._launch(step)
        turn.launched = self.clock()
        if flight is not None:
            flight.launched = turn.scheduled
        if self.pace is not None:  # a CPU computes in `launch`
            self.pace.note(step.tokens, turn.launch)
        computing_s = time.thread_time() - thread_s - scheduling_s
        self._note_seconds(step, scheduling_s, computing_s)
        self._note_drafts(step)
        return step, flight, outputs

    def land_last(self) -> list[Output]:
        """Complete the step in flight, for example when the engine is paused."""
        due, self._flying = self._flying, None
        if due is None:
            return []
        landed, outputs = self._land(due)
        if landed is None:
            return outputs
        outputs += self._update(due.step, landed)
        if self.tiers is not None:
            self._note_landed(self.tiers, due, self.clock())
        return outputs

    def run(self) -> list[Output]:
        """Until there is no work left."""
        outputs = []
        while self.has_work:
            outputs += self.step()
        return outputs

    def _admit_media(self) -> list[Output]:
        """Give requests with pictures to the scheduler, once their rows are computed; those that failed."""
        if self.media is None or not self.media.waiting:
            return []
        try:
            with span("media"):
                admitted = self.media.admit()
        except MediaFailed as failure:
            self._note_failure(failure.problem)
            for request in failure.requests:
                request.state, request.finish = "finished", "error"
                request.error = described(failure.problem)
                self._close(request, self.clock())
            return [Output(request, (), True) for request in failure.requests]
        for request in admitted:
            self._enqueue(request)
        return []

    def _note_seconds(self, step: Step, scheduling: float, computing: float) -> None:
        """Record the times that determine the number of drafts. Only on a CPU is a launched step already computed.

        Of the thread's own clock, which does not run while others have the CPU: their load says nothing about drafts.
        """
        speculation = self.scheduler.speculation
        if speculation is None or step.prefill or not step.chunks:
            return
        if speculation.pace is not None and self.runner.head is not None:
            step.took = computing, self.runner.head.passes_s if step.head else 0.0
            speculation.pace.seconds.note(step.tokens, computing - step.took[1])
        if isinstance(speculation.seconds, MeasuredSeconds):
            speculation.seconds.note(step.tokens, computing)
            if step.drafts:  # drafting is a part of it
                speculation.wait_s += DRAFTING_NEW * (scheduling - speculation.wait_s)

    def _note_drafts(self, step: Step) -> None:
        """Record the draft head's confidence for this step, which is already known on a CPU."""
        speculation = self.scheduler.speculation
        if speculation is None or speculation.pace is None or not step.chunks:
            return
        head = self.runner.head
        if head is None:
            return
        drafted = step.head and head.chances_BK is not None
        requests = [chunk.request for chunk in step.chunks] if drafted else []
        chances = head.chances_BK.tolist() if drafted and head.chances_BK is not None else []
        speculation.pace.drafted(requests, chances, head.passes_s)
        head.chances_BK = None

    def _note_landed(self, tiers: "PageTiers", flight: Flight, landed: float) -> None:
        """Its pages may be stored. A device takes steps one behind the other: it was busy since the last one landed."""
        tiers.landed(flight.step, landed - max(flight.launched, self._landed))
        self._landed = landed

    def _launch(self, step: Step) -> tuple[list[Output], Flight | None]:
        if not step.chunks:
            return self._outputs(self.scheduler.update(step, [])), None
        if self.tiers is not None:
            self.tiers.scheduled(step)
            self.tiers.hold_steps()
        try:
            return [], self.runner.launch(step)
        except Exception as problem:  # noqa: BLE001  raised again, or reported to the requests
            return self._failed(step, problem), None

    def _land(self, flight: Flight) -> tuple[Landed | None, list[Output]]:
        try:
            return flight.land(), []
        except Exception as problem:  # noqa: BLE001  an error of the device is seen when its results are read
            return None, self._failed(flight.step, problem)

    def _note_failure(self, problem: Exception) -> None:
        """Raises where no later step can succeed; otherwise the requests of this step fail, and no others."""
        self._failed_steps += 1
        if self.together or is_fatal(problem):
            raise problem
        if self._failed_steps >= MOST_FAILED_STEPS:
            raise EngineFailed(
                f"{self._failed_steps} steps in a row failed, the last one with {described(problem)}"
            ) from problem

    def _failed(self, step: Step, problem: Exception) -> list[Output]:
        self._note_failure(problem)
        if self.tiers is not None:
            self.tiers.failed(step)
        return self._outputs(self.scheduler.fail(step, described(problem)))

    def _update(self, step: Step, landed: Landed) -> list[Output]:
        self._failed_steps = 0
        for request, (start, entries) in landed.prompt_logprobs.items():
            if request.state != "finished":
                # In place of what a chunk before a preemption has brought already.
                self.prompt_logprobs.setdefault(request, [])[start:] = entries
        for request, part in landed.pooled.items():
            if request.state != "finished":
                self.pools.add(request, part)
        if landed.drafts is not None:
            step.drafts = landed.drafts
        advances = self.scheduler.update(step, landed.tokens)
        if step.drafts:
            self.ledger.accepted(sum(len(one.tokens) for one in advances) - len(step.sampling))
        return self._outputs(advances, landed.logprobs)

    def _outputs(
        self, advances: list[Advance], logprobs: dict[Request, list[TokenLogprobs]] | None = None
    ) -> list[Output]:
        now = self.clock()
        outputs = []
        for advance in advances:
            request = advance.request
            if request.ledger.first_token == 0.0 and advance.tokens:
                self.ledger.first_token(request, now)
            if advance.finished:
                self._close(request, now)
                if not advance.tokens:
                    self.prompt_logprobs.pop(request, None)
                    self.pools.pop(request)
            entries = logprobs.get(request) if logprobs else None
            if entries is not None:
                entries = entries[: len(advance.tokens)]
            outputs.append(Output(request, advance.tokens, advance.finished, entries))
        return outputs

    def _close(self, request: Request, now: float) -> None:
        self.ledger.close(request, now)
        if self.runner.adapters.retired:
            self.runner.adapters.sweep(self._requests())
