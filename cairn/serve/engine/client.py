"""An engine in a process of its own, as its user sees it: submit, abort, pause, load other weights; from any thread.

    with EngineClient(EngineConfig(model="runs/x")) as engine:
        engine.submit(receiver, Submit(engine.new_number(), prompt, SamplingParams(max_tokens=64)))

A thread reads what the workers report, hands each receiver its tokens, and looks after the workers. When one dies,
hangs or cannot go on, every request that was on its way ends with an `EngineFailed` that says why, once; then a new
group is started, which has the weights of the configuration again, or the engine is over, as
`ProcessOptions` say. No caller waits while workers are ended or started. Needs no torch.
"""

import asyncio
import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from cairn.core.errors import CairnError
from cairn.core.events import instant
from cairn.serve.config import EngineConfig, RoleConfig
from cairn.serve.engine.messages import (
    Abort,
    Beat,
    Call,
    CheckSleep,
    EngineFailed,
    FollowPages,
    LoadAdapter,
    LoadWeights,
    Pages,
    Pause,
    Ready,
    Report,
    ResetPrefixCache,
    Resume,
    Returned,
    Sleep,
    Stats,
    Stop,
    Stopped,
    Submit,
    SwitchRole,
    Tokens,
    UnloadAdapter,
    Wake,
    Watch,
    encode_submission,
)
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.page_map import PageMap
from cairn.serve.engine.pending_calls import PendingCalls
from cairn.serve.engine.process import Spawn, WorkerGroup, spawn_worker
from cairn.serve.engine.receivers import Receiver, Receivers, deliver, fail
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.watchdog import Watchdog
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.engine.worker_exits import POLL_S, to_blame, wait_until_ready

OTHERS_S = 1.0  # for other ranks: who fell over a dead one may be seen before it
REMEMBERED = 1024  # steps
MARGIN_S = 5.0  # for leaving, after the grace is over
LOADING_S = 3600.0  # to load a model or other weights, where no `start_s` is given


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervision of the engine processes; times in seconds."""

    watchdog_s: float = 600.0  # with requests but without a finished step for so long, it hangs
    grace_s: float = 30.0  # for running requests, when the engine is stopped
    beat_s: float = 1.0  # between two signs of life
    start_s: float | None = None  # to load the model and be ready; None: as long as it takes
    restarts: int = 3  # in a row, without a request that was answered in between; 0: never


Run = Callable[[Callable[[], None]], None]  # where receivers are called


class EngineClient:
    def __init__(
        self,
        config: EngineConfig,
        options: ProcessOptions = ProcessOptions(),  # noqa: B008 (immutable)
        spawn: Spawn = spawn_worker,
        role: RoleConfig | None = None,
        early: WorkerGroup | None = None,
    ) -> None:
        """Starts the engine and waits until it is ready; raises what kept it from starting.

        `early`: the first group of workers, where it has been started already.
        """
        self.config, self.options, self._spawn, self._role = config, options, spawn, role
        # What the workers last reported.
        self.stats = Stats()
        self.recent: deque[StepTimes] = deque(maxlen=REMEMBERED)  # steps, as beats bring them
        self.pages = PageMap()  # while the engine is watched
        self._followed: PageEvents | None = None
        # What they were told.
        self.paused = self.asleep = False  # neither of them hangs
        self._adapters: dict[int, str] = {}  # folders by number
        self.version = 0  # of the weights; workers that were started again have the first ones
        # Requests and calls on their way.
        self._receivers: Receivers = {}
        self._calls = PendingCalls()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # for the receivers and the group; held for moments
        self._run: Run = _at_once
        # Whether the workers live.
        self.restarted = 0  # since the start
        self.restarting: str | None = None  # why a group was lost whose successor is not ready yet
        self._failures = 0  # in a row
        self._over: CairnError | None = None  # why nothing can be submitted any more
        self._closing = False
        self._loading = True  # a group was started, and is not ready yet
        self._group = early or self._new_group().start()
        try:
            ready = wait_until_ready(self._group, options.start_s)
        except BaseException:
            self._group.end()
            raise
        self.limits, self.eos_ids, self.notes = ready.limits, ready.eos_ids, ready.notes
        self.facts = ready.facts
        self._loading = False
        self._watchdog = Watchdog()
        self._thread = threading.Thread(target=self._look_after, daemon=True, name="engine client")
        self._thread.start()
        # A program that ends by an exception leaves nothing behind, either.
        atexit.register(self.close, 0.0)

    # -- for users ---------------------------------------------------------------------------------

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call receivers in this event loop, once per step. Must precede the first request."""
        self._run = partial(_in_loop, loop)

    @property
    def alive(self) -> bool:
        """Does it take requests?"""
        return self._over is None and not self._closing

    def new_number(self) -> int:
        """A new request number; numbers are never reused."""
        return next(self._numbers)

    def submit(self, receiver: Receiver, request: Submit) -> None:
        """Put a request in line. The engine checks it: one that it can never serve ends with an error."""
        self.submit_encoded(receiver, request.id, encode_submission(request))

    def submit_encoded(self, receiver: Receiver, id: int, message: bytes) -> None:
        """`submit` of a list with one request, encoded by its caller: with pictures that takes too long for a lock."""
        with self._lock:
            if self._over is not None:
                raise self._over
            if self._closing:
                raise EngineFailed("the engine is being closed")
            if not self._receivers:
                self._watchdog.note_first_request()
            self._receivers[id] = receiver
            self._group.send_encoded(message)

    def abort(self, id: int) -> None:
        """End a request, unless it has ended already; its receiver is called."""
        with self._lock:
            if id in self._receivers and self._over is None:
                self._group.send(Abort(id))

    # Each of these returns when the engine has done it, between two steps, and raises what kept it from doing so.

    def pause(self, keep: bool = True) -> None:
        """Take no step until `resume`; requests are kept, or aborted."""
        self._call(lambda call: Pause(call, keep))
        self.paused = True

    def resume(self) -> None:
        self._call(Resume)
        self.paused = self.asleep = False

    def check_sleep(self, level: int = 1) -> None:
        """Raises what keeps it from ever sleeping at this level."""
        self._call(lambda call: CheckSleep(call, level))

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`; refused while requests are under way."""
        self._call(lambda call: Sleep(call, level))
        self.asleep = True

    def switch_role(self, role: RoleConfig) -> None:
        """Take requests in another role from now on, after a restart as well; refused while it is at work."""
        self._call(lambda call: SwitchRole(call, role))
        self._role = role

    def wake(self) -> None:
        self._call(Wake)
        self.asleep = False

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Serve with these weights from the next step on; when it fails, the old ones go on serving."""
        try:
            self._call(lambda call: LoadWeights(call, version, source))
        finally:
            self.asleep = False  # the engine wakes before it reads them
        self.version = version

    def load_adapter(self, number: int, folder: str) -> None:
        """Keep an adapter for requests of this number; workers that are started again load it, too."""
        try:
            self._call(lambda call: LoadAdapter(call, number, folder))
        except CairnError:
            with self._lock:
                if self.alive:  # if it takes too long, it may be read later all the same
                    self._group.send(UnloadAdapter(self.new_number(), number))
            raise
        self._adapters[number] = folder

    def unload_adapter(self, number: int) -> None:
        """Its requests finish; there will be no others."""
        self._adapters.pop(number, None)
        self._call(lambda call: UnloadAdapter(call, number))

    def reset_prefix_cache(self) -> None:
        self._call(ResetPrefixCache)

    def follow_pages(self) -> PageEvents:
        """Start reporting changes of the prefix cache."""
        self._followed = PageEvents(())
        self._call(FollowPages)
        return self._followed

    def _call(self, make: Callable[[int], Call]) -> None:
        number = self.new_number()
        call = make(number)
        reads_weights = isinstance(call, LoadWeights | Wake)
        limit_s = self._loading_s if reads_weights else self.options.watchdog_s
        # One rank reads adapters in a thread of its own.
        beside = isinstance(call, LoadAdapter) and self.config.tensor_parallel_size == 1
        with self._lock:
            if self._over is not None:
                raise self._over
            done = self._calls.add(number, type(call).__name__, limit_s, beside)
            self._group.send(call)
        done.result()  # the thread that looks after the workers sees to its limit

    @property
    def _loading_s(self) -> float:
        return self.options.start_s or LOADING_S

    def watch(self, seconds: float) -> None:
        """Refresh `stats`, `recent` and `pages` several times a second for this period."""
        with self._lock:
            if self.alive:
                self._group.send(Watch(seconds))

    def close(self, grace_s: float | None = None) -> None:
        """Let running requests finish within the grace, end the others, and the processes. Twice is fine."""
        grace_s = self.options.grace_s if grace_s is None else grace_s
        with self._lock:
            first, self._closing = not self._closing, True
            if first and self._over is None:
                if self._loading and not self._receivers:
                    self._group.kill()  # nothing there is worth waiting for
                else:
                    self._group.send(Stop(grace_s))
        self._thread.join(grace_s + MARGIN_S)
        if self._thread.is_alive():  # it did not listen; the thread finds it dead, and cleans up
            self._group.kill()
            self._thread.join(MARGIN_S)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(0.0 if kind else None)

    # -- the thread that looks after the workers ---------------------------------------------------

    def _look_after(self) -> None:
        looked = 0.0
        while self._over is None:
            group = self._group
            try:
                report = group.receive(POLL_S)
                if report is not None:
                    self._take_in(report)
                now = time.monotonic()
                if report is None or now - looked > POLL_S:  # not for every token
                    looked = now
                    self._look_at(group)
            except Exception as problem:  # noqa: BLE001  no caller may wait for a dead thread
                if self._over is None:
                    self._give_up(self._group, EngineFailed(f"the client failed: {problem!r}"))

    def _look_at(self, group: WorkerGroup) -> None:
        with self._lock:
            group.flush()
        fallen = group.fallen()
        if fallen:
            failed = any(status != 0 for _, status in fallen)
            if failed and not self._closing:  # it is known at once, before the others have ended
                self.restarting = self.restarting or "a process of the engine has ended"
            group.wait(OTHERS_S if failed else 0.0)
            for report in group.receive_all():  # the last words
                self._take_in(report)
            self._lost(group, *to_blame(group.fallen()))
        elif (problem := self._hangs()) is not None:
            self.restarting = problem.message  # the stacks take a moment
            problem.details = group.stacks()
            self._replace(group, problem)

    def _take_in(self, report: Report) -> None:
        if isinstance(report, Tokens):
            self._run(partial(deliver, report, self._receivers))
            self._watchdog.note_steps(report.steps)
            if any(ended.finish in ("stop", "length") for ended in report.ended):
                self._failures = 0  # it does its work
        elif isinstance(report, Pages):
            if self._followed is not None:
                self._followed.extend(report.events)
        elif isinstance(report, Beat):
            self.stats = report.stats
            self.recent.extend(report.steps)
            self.pages = report.pages
            self._watchdog.note_steps(report.stats.steps)
        elif isinstance(report, Returned):
            self._calls.answer(report)
            self._watchdog.note_work()
        elif isinstance(report, Ready):
            instant("engine ready", notes=report.notes)
            self._loading, self.restarting = False, None
            self.recent.clear()
            self.limits = report.limits
            self._watchdog.new_group()
        elif isinstance(report, Stopped):
            self._closing = True

    def _hangs(self) -> EngineFailed | None:
        """The failure if the engine hangs or a call is overdue; a call beside the steps only fails itself."""
        still_s, stacks = self._watchdog.still_s, "the stacks of the engine follow"
        if self._loading:
            if still_s <= 0:
                return None
            took = f"the engine was not ready again after {self._loading_s:g} s"
            return EngineFailed(took, hint=f"{stacks}; raise start_s if loading may take that long")
        for number, call in self._calls.overdue():
            late = EngineFailed(f"{call.what} was not carried out within {call.limit_s:g} s")
            if not call.beside:
                return EngineFailed(late.message, hint=stacks)
            self._calls.fail(number, late)
        if self.paused or self.asleep or self._calls.hold_steps or not self._receivers:
            return None
        if still_s <= self.options.watchdog_s:
            return None
        return EngineFailed(
            f"no step has ended for {still_s:.1f} s with {len(self._receivers)} requests "
            f"on their way; {self._watchdog.steps} steps were taken before",
            hint=f"{stacks}; raise watchdog_s if a step may take that long",
        )

    def _lost(self, group: WorkerGroup, rank: int, status: int) -> None:
        if status == 0 and self._closing:
            if group.wait(MARGIN_S):
                self._give_up(group, EngineFailed("the engine has stopped"))
            return
        self._replace(group, group.explain(rank, status))

    def _replace(self, group: WorkerGroup, problem: EngineFailed) -> None:
        """End a group that failed with everything that was on its way, and start another if that may help.

        Commands go to the next group as soon as this is known, and wait there: to end processes and to start others
        takes seconds, in which `submit` must not wait for the lock.
        """
        instant("engine failed", why=problem.message)
        self._failures += 1
        with self._lock:
            # Looked at here, or a group that `close` knows nothing of would be started behind its back.
            is_last = self._closing or self._failures > self.options.restarts
            if is_last:
                self._over = problem
            else:
                self._loading, self.restarting = True, problem.message
                self._watchdog.new_group(grace_s=self._loading_s)
                self._group = self._new_group()
                for number, folder in list(self._adapters.items()):  # others may add one meanwhile
                    self._group.send(LoadAdapter(self.new_number(), number, folder, beside=False))
                if self._followed is not None:  # the new one begins with nothing
                    self._followed.cleared()
                    self._group.send(FollowPages(self.new_number()))
            receivers = self._take_receivers(problem)
        self._run(partial(fail, receivers, problem))  # behind what was said before
        group.end()
        if is_last:
            return
        self.restarted += 1
        self._group.start()
        if self._closing and not self._receivers:  # `close` found no process to kill
            self._group.kill()

    def _give_up(self, group: WorkerGroup, problem: CairnError) -> None:
        with self._lock:
            self._over = problem
            receivers = self._take_receivers(problem)
        self._run(partial(fail, receivers, problem))
        group.end()

    def _take_receivers(self, problem: CairnError) -> Receivers:
        """Take the receivers of requests that fail now; later requests belong to the next worker group."""
        receivers, self._receivers = self._receivers, {}
        self._calls.fail_all(problem)
        self.paused = self.asleep = False
        self.version = 0
        idle = dict(running=0, waiting=0, pages_used=0, pages_cached=0, groups_used=())
        self.stats = msgspec.structs.replace(self.stats, **idle)  # no request can run
        return receivers

    # -- starting --------------------------------------------------------------------------------

    def _new_group(self) -> WorkerGroup:
        return WorkerGroup(
            self.config,
            beat_s=self.options.beat_s,
            grace_s=self.options.grace_s,
            spawn=self._spawn,
            role=self._role,
        )


def _at_once(act: Callable[[], None]) -> None:
    act()


def _in_loop(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nothing waits there any more
        loop.call_soon_threadsafe(act)
