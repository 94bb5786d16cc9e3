"""A thread that computes whole jobs, with the interface of `EngineThread`: for models without a cache and without steps
of decoding that anybody waits for.

    any thread --submit, abort--> inbox --> queue --> `_step` of a subclass --finish--> reader

A text encoder and a transcriber of speech are such models. A batch that fails ends alone; if the loop itself breaks,
the device is lost or batch after batch fails, every job ends with the reason, and none is taken any more.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from cairn.core.errors import ConfigError
from cairn.serve.config import RoleConfig
from cairn.serve.encoder_batch import TextQueue
from cairn.serve.engine.failure import MOST_FAILED_STEPS, described, is_fatal
from cairn.serve.engine.messages import EngineFailed, Stats
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.page_map import PageMap
from cairn.serve.engine.request import Finish, RequestId
from cairn.serve.engine.step_times import Spent, StepTimes
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.engine_host import CALL_TIMEOUT_S, resolve, wait_for
from cairn.serve.job import Job

log = logging.getLogger("cairn")
CLOSE_TIMEOUT_S = 30.0
ENDED_TIMEOUT_S = 1.0  # to end after the last job has; a thread that was given up never does
REMEMBERED = 256  # steps


class WaitingJob:
    """A job that waits for its turn."""

    __slots__ = ("job", "priority", "tokens")

    def __init__(self, job: Job) -> None:
        self.job, self.priority = job, job.request.priority
        self.tokens = len(job.request.prompt)


class JobThread:
    """Subclasses implement `_step` and `_busy`, and call `start` when they are ready."""

    what = "model"  # for messages

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queue: TextQueue[WaitingJob] = TextQueue()
        self._open: dict[RequestId, WaitingJob] = {}  # that wait
        self._running: dict[RequestId, WaitingJob] = {}
        self._paused = self._closing = False
        self._over: str | None = None
        self._calls: set[Future[None]] = set()  # that somebody waits for
        self._failed_batches = 0  # in a row
        self._lock = threading.RLock()  # of the inbox and of the ends of jobs
        self._times: deque[StepTimes] = deque(maxlen=REMEMBERED)
        self._spent = Spent()
        self._thread = threading.Thread(target=self._run, name=f"cairn {self.what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _step(self) -> None:
        """Some of the work."""
        raise NotImplementedError

    def _busy(self) -> bool:
        """Return whether jobs are being processed."""
        return bool(self._running)

    # -- from any thread -------------------------------------------------------------------------

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        return False

    def encode(self, jobs: Sequence[Job]) -> None:
        return None  # the engine is in this process

    def submit(self, jobs: Sequence[Job]) -> None:
        self._send(partial(self._add, jobs))

    def abort(self, ids: Sequence[RequestId]) -> None:
        with self._lock:
            if self._over is None:
                self._inbox.put(partial(self._abort, ids))

    def close(self) -> None:
        with self._lock:
            if is_open := self._over is None:
                self._inbox.put(self._close)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S if is_open else ENDED_TIMEOUT_S)

    def pause(self, keep: bool = True) -> None:
        self._call(partial(self._pause, keep))

    def resume(self) -> None:
        self._call(self._resume)

    def check_sleep(self, level: int = 1) -> None:
        raise ConfigError(f"a {self.what} does not sleep", hint="stop the server instead")

    def sleep(self, level: int = 1) -> None:
        self.check_sleep(level)

    def switch_role(self, role: RoleConfig) -> None:
        raise ConfigError(f"a {self.what} has no role", hint="it answers by itself")

    def wake(self) -> None:
        return None  # it never slept

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        raise ConfigError(
            f"the weights of a {self.what} are not replaced while it runs",
            hint="start the server again with the new ones",
        )

    def load_adapter(self, number: int, folder: str) -> None:
        raise ConfigError(f"a {self.what} takes no adapters", hint="merge it into the checkpoint")

    def unload_adapter(self, number: int) -> None:
        return None  # there is none

    def reset_prefix_cache(self) -> None:
        return None  # there is none

    def stats(self) -> Stats:
        spent = self._spent
        return Stats(
            steps=spent.steps,
            waiting=len(self._queue),
            running=len(self._running),
            prompt_tokens=spent.prefill,
            host_s=spent.host,
            device_s=spent.device,
            at=time.monotonic(),
        )

    def recent(self) -> list[StepTimes]:
        return list(self._times.copy())

    def watch(self, seconds: float) -> None:
        return None

    def page_map(self) -> PageMap:
        return PageMap()

    def follow_pages(self) -> PageEvents | None:
        return None  # there are no pages

    def weights_version(self) -> int:
        return 0  # they are never replaced

    def restarting(self) -> str | None:
        return None

    def dead(self) -> str | None:
        return self._over

    def give_up(self, reason: str) -> None:
        self._end(f"the {self.what} has hung: {reason}", broken=True)

    def _send(self, act: Callable[[], None]) -> None:
        with self._lock:
            if self._over is not None:
                raise ConfigError(self._over, hint="make a new LLM")
            self._inbox.put(act)

    def _call(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def perform() -> None:
            try:
                act()
            except Exception as problem:  # noqa: BLE001  the caller's
                resolve(done, problem)
            else:
                resolve(done)

        self._calls.add(done)
        try:
            self._send(perform)
            wait_for(done, CALL_TIMEOUT_S)
        finally:
            self._calls.discard(done)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason, broken = "the engine is closed", False
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            with torch.inference_mode():
                while not self._closing and self._over is None:
                    self._read_commands()
                    self._step()
        except BaseException as problem:
            reason, broken = f"the engine has broken: {described(problem)}", True
            log.error("the %s has broken", self.what, exc_info=problem)
        self._end(reason, broken)

    def _read_commands(self) -> None:
        if not self._busy() and (self._paused or not len(self._queue)):
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _take(self, budget_tokens: int, most: int) -> list[WaitingJob]:
        """The next batch; from now on its jobs run."""
        if self._paused:
            return []
        batch = self._queue.take(budget_tokens, most)
        now = time.monotonic()
        for one in batch:
            id = one.job.request.id
            self._running[id] = self._open.pop(id)
            one.job.request.ledger.scheduled = now
        return batch

    def _fail(self, batch: Sequence[WaitingJob], problem: Exception) -> None:
        """Report an error to the callers of this batch and log it. Raises if no later batch can succeed."""
        log.error("a batch of %s jobs failed", len(batch), exc_info=problem)
        for one in batch:
            self._finish_job(one.job, "error", described(problem))
        self._failed_batches += 1
        if is_fatal(problem):
            raise problem
        if self._failed_batches >= MOST_FAILED_STEPS:
            raise EngineFailed(
                f"{self._failed_batches} batches in a row failed, the last one with {described(problem)}"
            )

    def _count(self, jobs: int, work: Spent, now: float) -> None:
        self._failed_batches = 0
        self._spent = self._spent.plus(work)
        step = StepTimes(
            number=self._spent.steps,
            sequences=jobs,
            tokens=work.tokens,
            schedule=0.0,
            launch=work.host,
            wait=work.device,
            update=0.0,
            ended=now,
            prefill=work.prefill,
            sampled=work.sampled,
            read=work.read,
            pairs=work.pairs,
        )
        self._times.append(step)

    def _finish_job(self, job: Job, finish: Finish, error: str | None = None) -> None:
        """Finish a job once; a thread that was given up may return the result of a finished job."""
        with self._lock:
            self._running.pop(job.request.id, None)
            if job.answer.finished:
                return
            job.request.finish = finish
            job.answer.end(finish, error=error)
        job.updated()

    def _add(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            waiting = WaitingJob(job)
            job.request.ledger.arrived = job.request.ledger.admitting = now
            self._open[job.request.id] = waiting
            self._queue.add(waiting)

    def _abort(self, ids: Sequence[RequestId]) -> None:
        for id in ids:
            waiting = self._open.pop(id, None)
            if waiting is not None:  # else it is being computed, or has ended
                self._queue.remove(waiting)
                self._finish_job(waiting.job, "abort")

    def _pause(self, keep: bool) -> None:
        self._paused = True
        if not keep:
            self._abort([*self._open, *self._running])

    def _resume(self) -> None:
        self._paused = False

    def _close(self) -> None:
        self._closing = True

    def _end(self, reason: str, broken: bool) -> None:
        """Take no more, and end every job: as aborted where the thread was closed, with the reason where it broke."""
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
        while not self._inbox.empty():
            self._inbox.get()()
        for done in list(self._calls):  # one may be where the thread hangs
            resolve(done, ConfigError(reason))
        for one in [*self._running.values(), *self._open.values()]:
            if broken:
                self._finish_job(one.job, "error", reason)
            else:
                self._finish_job(one.job, "abort")
        self._open.clear()
