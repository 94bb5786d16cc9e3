"""A thread that computes whole jobs, with the interface of `EngineThread`: for models without a cache and without steps
of decoding that anybody waits for.

    any thread --submit, abort--> inbox --> queue --> `_step` of a subclass --finish--> reader

A text encoder and a transcriber of speech are such models. A job that fails ends alone; if the loop itself breaks,
every job ends with the reason.
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
from cairn.serve.engine.failure import described
from cairn.serve.engine.messages import Stats
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.page_map import PageMap
from cairn.serve.engine.request import Finish, RequestId
from cairn.serve.engine.step_times import Spent, StepTimes
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.job import Job

log = logging.getLogger("cairn")
CLOSE_TIMEOUT_S = 30.0
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
        self._lock = threading.RLock()
        self._times: deque[StepTimes] = deque(maxlen=REMEMBERED)
        self._spent = Spent()
        self._thread = threading.Thread(target=self._run, name=f"cairn {self.what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _step(self) -> None:
        """Some of the work."""
        raise NotImplementedError

    def _busy(self) -> bool:
        """Whether there is work that has left the queue."""
        return bool(self._running)

    # -- from any thread -------------------------------------------------------------------------

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        return False

    def submit(self, jobs: Sequence[Job]) -> None:
        self._send(partial(self._add, jobs))

    def abort(self, ids: Sequence[RequestId]) -> None:
        with self._lock:
            if self._over is None:
                self._inbox.put(partial(self._abort, ids))

    def close(self) -> None:
        with self._lock:
            if self._over is None:
                self._inbox.put(self._close)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

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

    def _send(self, act: Callable[[], None]) -> None:
        with self._lock:
            if self._over is not None:
                raise ConfigError(self._over, hint="make a new LLM")
            self._inbox.put(act)

    def _call(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def perform() -> None:
            act()
            done.set_result(None)

        self._send(perform)
        done.result()

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine is closed"
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            with torch.inference_mode():
                while not self._closing:
                    self._read_commands()
                    self._step()
        except BaseException as problem:
            reason = f"the engine has broken: {described(problem)}"
            log.error("the %s has broken", self.what, exc_info=problem)
        self._end(reason)

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
        """Of this batch: reported to its callers, and logged."""
        log.error("a batch of %s jobs failed", len(batch), exc_info=problem)
        for one in batch:
            self._finish_job(one.job, "error", described(problem))

    def _count(self, jobs: int, work: Spent, now: float) -> None:
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
        self._running.pop(job.request.id, None)
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

    def _end(self, reason: str) -> None:
        with self._lock:
            self._over = reason
        while not self._inbox.empty():
            self._inbox.get()()
        how: Finish = "error" if reason.startswith("the engine has broken") else "abort"
        for one in [*self._running.values(), *self._open.values()]:
            self._finish_job(one.job, how, reason if how == "error" else None)
        self._open.clear()
