"""An engine in a process of its own, as its user sees it: submit, read the stream, abort; from threads or coroutines.

    with EngineClient(EngineConfig(model="runs/x")) as engine:
        for delta in engine.submit(prompt, SamplingParams(max_tokens=64)):   # or: async for
            ...

A thread reads what the workers say and looks after them. When one dies, hangs or cannot go on, every request that was
on its way ends with an `EngineFailed` that says why, once; then a new group is started, or the engine is over, as
`ProcessOptions` say. A request that the engine could never serve is refused in `submit` itself. Needs no torch.
"""

import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from cairn.core import errors
from cairn.core.errors import CairnError
from cairn.core.events import instant
from cairn.serve.config import EngineConfig
from cairn.serve.engine.messages import (
    Abort,
    Beat,
    EngineFailed,
    Failure,
    Ready,
    Report,
    Stats,
    Stop,
    Stopped,
    Submit,
    Tokens,
    Watch,
)  # fmt: skip
from cairn.serve.engine.process import Spawn, WorkerGroup, spawn_worker
from cairn.serve.engine.request import Request, check_request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.stream import Listener, Stream, wake
from cairn.serve.guide import Guide

POLL_S = 0.1  # how soon the end of a process is noticed
REMEMBERED = 1024  # steps
MARGIN_S = 5.0  # for leaving, after the grace is over


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine's processes are looked after. Seconds."""

    watchdog_s: float = 600.0  # with requests but without a finished step for so long, it hangs
    grace_s: float = 30.0  # for running requests, when the engine is stopped
    beat_s: float = 1.0  # between two signs of life
    start_s: float | None = None  # to load the model and be ready; None: as long as it takes
    restarts: int = 3  # in a row, without a request that has finished in between; 0: never


class EngineClient:
    def __init__(
        self,
        config: EngineConfig,
        options: ProcessOptions = ProcessOptions(),  # noqa: B008 (immutable)
        spawn: Spawn = spawn_worker,
    ) -> None:
        """Starts the engine and waits until it is ready; raises what kept it from starting."""
        self.config, self.options, self._spawn = config, options, spawn
        self.stats = Stats()
        self.recent: deque[StepTimes] = deque(maxlen=REMEMBERED)  # steps, as beats bring them
        self.pages = ""  # a map of them, while somebody watches
        self.restarted = 0  # since the start
        self._over: CairnError | None = None  # why nothing can be submitted any more
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # for the streams and the group; held for moments
        self._failures = 0  # in a row
        self._closing = False
        self._group = self._start()
        try:
            ready = self._wait_until_ready(self._group)
        except BaseException:
            self._group.end()
            raise
        self.limits, self.eos_ids, self.notes = ready.limits, ready.eos_ids, ready.notes
        self.facts = ready.facts
        self._progress = (0, time.monotonic())  # steps, and when they last became more
        self._thread = threading.Thread(target=self._look_after, daemon=True, name="engine client")
        self._thread.start()
        atexit.register(
            self.close, 0.0
        )  # a program that ends by an exception leaves nothing behind, either

    # -- for users ---------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Does it take requests?"""
        return self._over is None and not self._closing

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        eos_ids: Sequence[int] | None = None,
        guide: Guide | None = None,
        listener: Listener | None = None,
    ) -> Stream:
        """Put a request in line, or refuse it at once with a RequestError."""
        eos_ids = list(self.eos_ids if eos_ids is None else eos_ids)
        prompt = list(prompt)
        check_request(Request(0, prompt, params, eos_ids=eos_ids), self.limits)
        with self._lock:
            if self._over is not None:
                raise self._over
            if self._closing:
                raise EngineFailed("the engine is being closed")
            stream = Stream(next(self._numbers), self._abort, listener)
            if not self._streams:  # the watchdog counts from here, not from the last request
                steps, since = self._progress
                self._progress = (steps, max(since, time.monotonic()))
            self._streams[stream.id] = stream
            self._group.send(Submit(stream.id, prompt, params, priority, salt, eos_ids, guide))
        return stream

    def watch(self, seconds: float) -> None:
        """For so long, `stats`, `recent` and `pages` are fresh several times a second."""
        with self._lock:
            if self.alive:
                self._group.send(Watch(seconds))

    def close(self, grace_s: float | None = None) -> None:
        """Let running requests finish within the grace, end the others, and the processes. Twice is fine."""
        grace_s = self.options.grace_s if grace_s is None else grace_s
        with self._lock:
            first, self._closing = not self._closing, True
            if first and self._over is None:
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

    def _abort(self, id: int) -> None:
        with self._lock:
            if id in self._streams and self._over is None:
                self._group.send(Abort(id))

    # -- the thread that looks after the workers ---------------------------------------------------

    def _look_after(self) -> None:
        while self._over is None:
            group = self._group
            try:
                for report in group.receive(POLL_S):
                    self._take_in(report)
                fallen = group.fallen()
                if fallen:
                    for report in group.receive(0):  # the last words
                        self._take_in(report)
                    self._lost(group, *_first(fallen))
                elif self._hangs():
                    self._stuck(group)
            except Exception as problem:  # noqa: BLE001  nobody may wait for a thread that is gone
                if self._over is None:
                    self._give_up(group, EngineFailed(f"the client failed: {problem!r}"))

    def _take_in(self, report: Report) -> None:
        if isinstance(report, Tokens):
            self._deliver(report)
            self._moved(report.steps)
        elif isinstance(report, Beat):
            self.stats = report.stats
            self.recent.extend(report.steps)
            self.pages = report.pages
            self._moved(report.stats.steps)
        elif isinstance(report, Ready):
            instant("engine ready", notes=report.notes)
            self.recent.clear()
            self.limits = report.limits
            self._progress = (0, time.monotonic())
        elif isinstance(report, Stopped):
            self._closing = True

    def _moved(self, steps: int) -> None:
        if steps != self._progress[0]:
            self._progress = (steps, time.monotonic())

    def _deliver(self, report: Tokens) -> None:
        woken: list[Stream] = []
        with self._lock:
            for id, token in zip(report.ids, report.tokens, strict=True):
                stream = self._streams.get(id)
                if stream is not None:
                    stream.put(token, report.logprobs.get(id), report.prompts.get(id))
                    if (begun := report.begun.get(id)) is not None:
                        stream.begin(begun)
                    if (vector := report.pooled.get(id)) is not None:
                        stream.pool(vector)
                    woken.append(stream)
            for ended in report.ended:
                stream = self._streams.pop(ended.id, None)
                if stream is not None:
                    stream.end(ended)
                    woken.append(stream)
                    self._failures = 0
        wake(woken)

    def _hangs(self) -> bool:
        still = time.monotonic() - self._progress[1]
        return bool(self._streams) and still > self.options.watchdog_s

    def _stuck(self, group: WorkerGroup) -> None:
        steps, since = self._progress
        stacks = group.stacks()
        self._replace(
            group,
            EngineFailed(
                f"no step has ended for {time.monotonic() - since:.1f} s with {len(self._streams)} requests "
                f"on their way; {steps} steps were taken before",
                hint="the stacks of the engine follow; raise watchdog_s if a step may take that long",
                details=stacks,
            ),
        )

    def _lost(self, group: WorkerGroup, rank: int, status: int) -> None:
        if status == 0 and self._closing:
            if group.wait(MARGIN_S):
                self._give_up(group, EngineFailed("the engine has stopped"))
            return
        self._replace(group, group.explain(rank, status))

    def _replace(self, group: WorkerGroup, problem: EngineFailed) -> None:
        """End a group that failed with everything that was on its way, and start another if that may help."""
        instant("engine failed", why=problem.message)
        self._failures += 1
        if self._closing or self._failures > self.options.restarts:
            self._give_up(group, problem)
            return
        with self._lock:
            group.end()
            self._fail_all(problem)
            self._group = self._start()
            self.restarted += 1
        deadline = self.options.start_s
        self._progress = (0, time.monotonic() + (deadline or 3600.0))  # loading is not hanging

    def _give_up(self, group: WorkerGroup, problem: CairnError) -> None:
        with self._lock:
            self._over = problem
            group.end()
            self._fail_all(problem)

    def _fail_all(self, problem: CairnError) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end(None, problem)
        wake(streams)

    # -- starting --------------------------------------------------------------------------------

    def _start(self) -> WorkerGroup:
        return WorkerGroup(self.config, beat_s=self.options.beat_s, grace_s=self.options.grace_s,
                           spawn=self._spawn)  # fmt: skip

    def _wait_until_ready(self, group: WorkerGroup) -> Ready:
        began, limit = time.monotonic(), self.options.start_s
        while True:
            for report in group.receive(POLL_S):
                if isinstance(report, Ready):
                    return report
                if isinstance(report, Failure):
                    raise _as_raised(report)
            for rank, status in group.fallen():
                for report in group.receive(0.2):
                    if isinstance(report, Failure):
                        raise _as_raised(report)
                raise group.explain(rank, status)
            if limit is not None and time.monotonic() - began > limit:
                raise EngineFailed(
                    f"the engine was not ready after {limit:g} s", hint="raise start_s",
                    details=group.stacks(),
                )  # fmt: skip


def _first(fallen: list[tuple[int, int]]) -> tuple[int, int]:
    """The one to blame: one that failed before one that left in good order."""
    return next((each for each in fallen if each[1] != 0), fallen[0])


def _as_raised(failure: Failure) -> CairnError:
    """What the worker could not start with, as if it had been raised here."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, CairnError):
        return kind(failure.message, failure.hint)
    said = f"{failure.kind}: {failure.message}"
    return EngineFailed(f"the engine could not start: {said}", details=failure.traceback)
