"""The engine's loop: schedule, launch, take in; again and again while there is work.

    plain        schedule N, launch N, wait for N, update N
    overlapped   schedule N+1, launch N+1, wait for N, update N: the host's work hides behind the device's

Both give the same tokens. In the overlapped form a stop is seen one step late, and the step too many is dropped. The
loop stamps the requests' ledgers and keeps one of its own: where the time of each step went. A step that fails ends
its own requests with the reason and no others. Not thread-safe: one thread owns an engine.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cairn.core.errors import CairnError, ConfigError, RequestError, WeightsError
from cairn.core.events import span
from cairn.serve.engine.adapters import LoadedAdapter
from cairn.serve.engine.media import MediaFailed, WaitingForRows
from cairn.serve.engine.pooling import Pools
from cairn.serve.engine.request import Finish, Request, RequestId, check_request
from cairn.serve.engine.runner import Flight, Landed, Runner
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds
from cairn.serve.engine.step import Advance, Step
from cairn.serve.engine.step_budget import Pace
from cairn.serve.engine.step_times import NOTHING, Spent, StepTimes
from cairn.serve.engine.token_logprobs import TokenLogprobs
from cairn.serve.engine.weight_sources import WeightsFrom, identity_of

if TYPE_CHECKING:
    from cairn.serve.tiers.page_tiers import PageTiers

REMEMBERED = 4096  # steps in the ledger
DRAFTING_NEW = 0.1  # what the newest step counts for in the mean time of drafting
ROOM = "lower gpu_memory_utilization or max_num_batched_tokens: a step found no room"


class Output(NamedTuple):
    """What a step brought to one request."""

    request: Request
    tokens: Sequence[int]  # several where drafts held; none: it ended without one
    finished: bool
    logprobs: list[TokenLogprobs] | None = None  # of each of them, if they were asked for


class Engine:
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
        self.scheduler, self.runner = scheduler, runner
        self.overlap, self.clock = overlap, clock
        # With other ranks: they wait for this one, so its failure ends all of them.
        self.together = together
        self.pace = pace  # limits the time of a step
        self.media = media  # where requests with pictures wait for their rows
        self.times: deque[StepTimes] = deque(maxlen=REMEMBERED)
        self.steps = 0  # taken so far: a watchdog looks at it
        self.spent = NOTHING  # what has landed so far, and the time that it took
        self._updating = 0.0  # seconds of the last update: the next turn counts them
        self.prompt_logprobs: dict[Request, list[TokenLogprobs]] = {}
        self.pools = Pools()  # prompts as vectors; the reader of the outputs takes them
        self.tiers: PageTiers | None = None  # of the cache, beyond the device
        self._landed = 0.0  # when the last step did
        self._flying: Flight | None = None
        self.paused = False  # no further step is scheduled
        self.asleep = False  # its memory was given back, and no step is scheduled, either
        self.version = 0  # of the weights; 0: those that the engine was started with
        self._weights = b""  # their identity
        self._loads = Counter[int]()  # by version: a trainer that went back gives a number again

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
        if self._weights:
            request.identity = self._weights + request.identity
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
        """One turn of the loop; what it brought, which in the overlapped form is what was launched a turn ago."""
        if self.paused or self.asleep:
            return self._land_last()
        failed = self._admit_media() if self.media is not None else []
        if self.tiers is not None:
            self.tiers.poll()
        began, worked = self.clock(), time.thread_time()
        with span("schedule"):
            if self.pace is not None:
                self.scheduler.step_limit = self.pace.tokens()
            step = self.scheduler.schedule()
        scheduled, worked_scheduling = self.clock(), time.thread_time() - worked
        self._stamp(step, began, scheduled)
        with span("launch", sequences=len(step.chunks), tokens=step.tokens):
            outputs, flight = self._launch(step)
        outputs = failed + outputs
        launched = self.clock()
        if flight is not None:
            flight.launched = scheduled
        if self.pace is not None:  # a CPU computes in `launch`
            self.pace.note(step.tokens, launched - scheduled)
        worked_all = time.thread_time() - worked
        self._note_seconds(step, worked_scheduling, worked_all - worked_scheduling)
        self._note_drafts(step)
        due = flight
        if self.overlap:
            due, self._flying = self._flying, flight
        landed = None
        if due is not None:
            with span("wait"):
                landed, lost = self._land(due)
            outputs += lost
        elif self.tiers is not None and flight is None and self.tiers.is_loading:
            self.tiers.wait()
        waited = self.clock()
        self._spend(due, scheduled - began, launched - scheduled, waited - launched)
        if due is not None and landed is not None:
            with span("update"):
                outputs += self._update(due.step, landed)
            if self.tiers is not None:
                self._note_landed(self.tiers, due, waited)
        ended = self.clock()
        self._updating = ended - waited
        self.steps += 1
        self.times.append(
            StepTimes(
                step.number,
                len(step.chunks),
                step.tokens,
                scheduled - began,
                launched - scheduled,
                waited - launched,
                ended - waited,
                ended,
                step.prefill,
                len(step.sampling),
                step.read,
                step.pairs,
            )
        )
        return outputs

    # -- pausing and other weights ----------------------------------------------------------------

    def pause(self, keep: bool = True) -> list[Request]:
        """Schedule nothing until `resume`. Requests stay where they are, or are aborted and returned."""
        self.paused = True
        aborted = [] if keep else [self.abort(id) for id in self.request_ids()]
        return [request for request in aborted if request is not None]

    def request_ids(self) -> list[RequestId]:
        """Of all that it holds, those whose pictures wait included."""
        waiting = [request.id for request in self.media.waiting] if self.media else []
        return [*waiting, *self.scheduler.requests]

    def resume(self) -> None:
        self.wake()
        self.paused = False

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the device back until `wake`; what was cached is lost. A CairnError: it goes on.

        At level 2 the weights are dropped as well, and read again by `wake`.
        """
        if self.asleep:
            return
        if running := len(self._held()):
            raise RequestError(
                f"{running} requests are under way, and would lose their pages",
                hint="wait for their end, or abort them (mode=abort)",
            )
        self.check_sleep(level)
        self._land_last()  # of requests that have ended
        self.scheduler.blocks.reset()  # tiers beyond the device keep what they have
        if self.tiers is not None:
            self.tiers.settle()
        self.runner.sleep(level)
        self.asleep = True

    def check_sleep(self, level: int = 1) -> None:
        """A CairnError: this engine cannot sleep at this level. Changes nothing."""
        if not self.asleep:
            self.runner.check_sleep(level)

    def wake(self) -> None:
        """One that is paused stays so. A CairnError: it sleeps on."""
        if self.asleep:
            self.runner.wake()
            self.asleep = False

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Serve with other weights from the next step on. A CairnError: the old ones go on serving.

        Requests under way go on with the keys and values that they have. Pages of another version are never found.
        """
        self.wake()
        if version < 1:
            raise RequestError(f"version is {version}", hint="versions are counted from 1")
        if self.media is not None:
            raise ConfigError(
                "this model sees, and its tower cannot be replaced while it runs",
                hint="start another engine with the new weights",
            )
        self.runner.load_weights(version, source)
        self.weights_changed(version, self._loads[version])
        self._loads[version] += 1

    def _held(self) -> list[Request]:
        """Requests under way, those whose pictures wait for rows included."""
        return [*self.scheduler.requests.values(), *(self.media.waiting if self.media else ())]

    def weights_changed(self, version: int, loaded_before: int = 0) -> None:
        """The weights were overwritten in place; pages of another version are never found.

        `loaded_before`: as `identity_of` takes it; 0 where the same number always means the same weights.
        """
        before, self._weights = self._weights, identity_of(version, loaded_before)
        self.scheduler.queues.rename_waiting(before, self._weights)
        self.version = version
        if (events := self.scheduler.blocks.prefix.events) is not None:
            events.cleared()
        if self.tiers is not None:
            self.tiers.weights_changed(self._weights)

    def read_adapter(self, folder: str) -> LoadedAdapter:
        """Any thread may call it; a CairnError says what is wrong with the folder."""
        self._check_awake()
        try:
            return self.runner.adapters.read(folder)
        except CairnError:
            raise
        except Exception as problem:  # whatever is in the folder, all other requests go on
            raise WeightsError(
                f"the adapter in {folder} cannot be read: {described(problem)}",
                hint="is its adapter_config.json as PEFT has written it?",
            ) from problem

    def load_adapter(self, number: int, adapter: LoadedAdapter) -> None:
        """From now on requests may have this number."""
        self._check_awake()
        self.runner.adapters.add(number, adapter)

    def unload_adapter(self, number: int) -> None:
        """Requests that have it go on; no other may come."""
        self.runner.adapters.retire(number, self._held())

    def _check_awake(self) -> None:
        if self.asleep:
            raise ConfigError(
                "the engine sleeps, and an adapter is read beside its weights",
                hint="wake it first (POST /wake_up, LLM.wake_up)",
            )

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, in tiers beyond the device, too; refused while pages are in use."""
        self.scheduler.blocks.reset()
        if self.tiers is not None:
            self.tiers.clear()

    def _land_last(self) -> list[Output]:
        """What was in flight when the engine was paused."""
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
            if self.together:
                raise
            for request in failure.requests:
                request.state, request.finish = "finished", "error"
                request.error = described(failure.problem)
                self._close(request, self.clock())
            return [Output(request, (), True) for request in failure.requests]
        for request in admitted:
            self._enqueue(request)
        return []

    def _stamp(self, step: Step, began: float, scheduled: float) -> None:
        """The ledgers of those that got a row, or lost it."""
        for request in step.preempted:
            if request.ledger.scheduled:
                request.ledger.requeued -= scheduled
        for request in step.admitted:
            ledger = request.ledger
            if ledger.scheduled == 0.0:
                ledger.admitting, ledger.scheduled = began, scheduled
                request.mark = self.spent
            elif ledger.requeued < 0:
                ledger.requeued += scheduled

    def _spend(self, due: Flight | None, schedule: float, launch: float, wait: float) -> None:
        """Add a turn to the totals, with the step that has landed in it. A CPU computes in `launch`."""
        spent, on_cpu = self.spent, self.runner.device.type == "cpu"
        host = spent.host + schedule + self._updating + (0.0 if on_cpu else launch)
        device = spent.device + wait + (launch if on_cpu else 0.0)
        if due is None:
            self.spent = spent._replace(host=host, device=device)
            return
        step = due.step
        self.spent = Spent(
            spent.steps + 1,
            spent.tokens + step.tokens,
            spent.prefill + step.prefill,
            spent.sampled + len(step.sampling),
            spent.read + step.read,
            spent.pairs + step.pairs,
            host,
            device,
        )

    def _note_seconds(self, step: Step, scheduling: float, computing: float) -> None:
        """By these the number of drafts is chosen. Only a CPU has computed when a step is launched.

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
        """How sure the head is of what it has drafted behind this step. On a CPU that is known by now."""
        speculation, head = self.scheduler.speculation, self.runner.head
        if speculation is None or speculation.pace is None or head is None or not step.chunks:
            return
        made = step.head and head.chances_BK is not None
        requests = [chunk.request for chunk in step.chunks] if made else []
        chances = head.chances_BK.tolist() if made and head.chances_BK is not None else []
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
        except Exception as problem:  # whatever it was, it ends these requests and no others
            if self.together:
                raise
            return self._failed(step, problem), None

    def _land(self, flight: Flight) -> tuple[Landed | None, list[Output]]:
        try:
            return flight.land(), []
        except Exception as problem:  # an error of the device is seen when its results are read
            if self.together:
                raise
            return None, self._failed(flight.step, problem)

    def _failed(self, step: Step, problem: Exception) -> list[Output]:
        if self.tiers is not None:
            self.tiers.failed(step)
        return self._outputs(self.scheduler.fail(step, described(problem)))

    def _update(self, step: Step, landed: Landed) -> list[Output]:
        for request, (start, found) in landed.prompt_logprobs.items():
            if request.state != "finished":
                # In place of what a chunk before a preemption has found already.
                self.prompt_logprobs.setdefault(request, [])[start:] = found
        for request, part in landed.pooled.items():
            if request.state != "finished":
                self.pools.add(request, part)
        if landed.drafts is not None:
            step.drafts = landed.drafts
        advances = self.scheduler.update(step, landed.tokens)
        if step.drafts:  # those that held, which `_spend` could not know
            more = sum(len(advance.tokens) for advance in advances) - len(step.sampling)
            self.spent = self.spent._replace(sampled=self.spent.sampled + more)
        return self._outputs(advances, landed.logprobs)

    def _outputs(
        self, advances: list[Advance], logprobs: dict[Request, list[TokenLogprobs]] | None = None
    ) -> list[Output]:
        now = self.clock()
        outputs = []
        for advance in advances:
            request = advance.request
            if request.ledger.first_token == 0.0 and advance.tokens:
                request.ledger.first_token = now
                request.ledger.prefill = self.spent.since(request.mark)
                request.mark = self.spent
            if advance.finished:
                self._close(request, now)
                if not advance.tokens:
                    self.prompt_logprobs.pop(request, None)
                    self.pools.pop(request)
            found = logprobs.get(request) if logprobs else None
            if found is not None:
                found = found[: len(advance.tokens)]
            outputs.append(Output(request, advance.tokens, advance.finished, found))
        return outputs

    def _close(self, request: Request, now: float) -> None:
        """The last lines of its ledger."""
        ledger = request.ledger
        ledger.finished = now
        if self.runner.adapters.retired:
            self.runner.adapters.sweep(self._held())
        if ledger.requeued < 0:  # it ended without a row
            ledger.requeued += now
        if ledger.first_token:
            ledger.decode = self.spent.since(request.mark)
        elif ledger.scheduled:
            ledger.prefill = self.spent.since(request.mark)


def described(problem: BaseException) -> str:
    """An exception in one line, for the request that fails with it."""
    if isinstance(problem, CairnError):
        return str(problem)
    text = str(problem).strip().splitlines()
    said = f"{type(problem).__name__}: {text[0] if text else 'no message'}"
    return f"{said} (hint: {ROOM})" if type(problem).__name__ == "OutOfMemoryError" else said
