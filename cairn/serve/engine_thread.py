"""Thread that owns an engine in this process; other threads submit jobs and are notified of updates.

    any thread --submit, abort--> inbox --> [ read commands | step | deliver ] --on_update--> reader

Text is made here, between two steps, where the device's work hides it, and not in a second thread that would fight for
the interpreter. A request that fails ends alone. If the loop itself breaks, every request ends with the reason, and
nothing is taken any more: no caller is left waiting. The loop is not started again, because a device that is lost stays
lost for its whole process.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from cairn.core.errors import CairnError, ConfigError
from cairn.serve.config import RoleConfig
from cairn.serve.engine.facts import stats_of
from cairn.serve.engine.failure import described, is_fatal
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.messages import Stats
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.page_map import PageMap, map_of
from cairn.serve.engine.request import Finish, RequestId
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.engine_host import CALL_TIMEOUT_S, resolve, wait_for
from cairn.serve.job import Job

log = logging.getLogger("cairn")
CLOSE_TIMEOUT_S = 30.0  # to wait for a step that is under way when the engine is closed
ENDED_TIMEOUT_S = 1.0  # to end after the last job has; a thread that was given up never does


class _Add(NamedTuple):
    jobs: Sequence[Job]


class _Abort(NamedTuple):
    ids: Sequence[RequestId]


class _Call(NamedTuple):
    """Something to do between two steps."""

    act: Callable[[], None]
    done: "Future[None]"


class _Close(NamedTuple):
    pass


class EngineThread:
    def __init__(self, engine: Engine, name: str = "cairn engine") -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Call | _Close] = queue.SimpleQueue()
        self._jobs: dict[RequestId, Job] = {}
        self._lock = (
            threading.RLock()
        )  # of the inbox against the end; a collected stream may need it again
        self._over: str | None = None  # why nothing is taken in any more
        self._calls: set[Future[None]] = set()  # that somebody waits for
        self._writing = threading.Lock()  # of texts; contended only when the thread is given up
        # A daemon, so that a script that forgets to close its engine ends all the same.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def encode(self, jobs: Sequence[Job]) -> None:
        return None  # the engine is in this process

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put them in line together. They have been checked: one that is refused now ends with an error."""
        with self._lock:
            if self._over is not None:
                raise ConfigError(self._over, hint="make a new LLM")
            self._inbox.put(_Add(jobs))

    def abort(self, ids: Sequence[RequestId]) -> None:
        """End these requests wherever they are; those that are over already are left alone."""
        with self._lock:
            if self._over is None:
                self._inbox.put(_Abort(ids))

    def close(self) -> None:
        """End everything that runs, and the thread. May be called again."""
        with self._lock:
            if is_open := self._over is None:
                self._inbox.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S if is_open else ENDED_TIMEOUT_S)

    # Each of these returns when the engine has done it, between two steps, and raises what kept it from doing so.

    def pause(self, keep: bool = True) -> None:
        """Take no step until `resume`; requests are kept, or aborted."""
        self._call(partial(self._pause, keep))

    def resume(self) -> None:
        self._call(self.engine.resume)

    def check_sleep(self, level: int = 1) -> None:
        """Raises what keeps it from ever sleeping at this level."""
        self._call(lambda: self.engine.check_sleep(level))

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`; refused while requests are under way."""
        self._call(lambda: self.engine.sleep(level))

    def switch_role(self, role: RoleConfig) -> None:
        """Take requests in another role from now on; refused while it is at work."""
        self._call(lambda: self._switch_role(role))

    def wake(self) -> None:
        self._call(self.engine.wake)

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Serve with these weights from the next step on; when it fails, the old ones go on serving."""
        self._call(lambda: self.engine.load_weights(version, source))

    def load_adapter(self, number: int, folder: str) -> None:
        """Keep an adapter for requests of this number. It is read in the caller's thread, while steps go on."""
        adapter = self.engine.read_adapter(folder)
        self._call(lambda: self.engine.load_adapter(number, adapter))

    def unload_adapter(self, number: int) -> None:
        """Its requests finish; there will be no others."""
        self._call(lambda: self.engine.unload_adapter(number))

    def reset_prefix_cache(self) -> None:
        self._call(self.engine.reset_prefix_cache)

    def _call(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._calls.add(done)
        try:
            with self._lock:
                if self._over is not None:
                    raise ConfigError(self._over, hint="make a new LLM")
                self._inbox.put(_Call(act, done))
            wait_for(done, CALL_TIMEOUT_S)
        finally:
            self._calls.discard(done)

    # -- signs of life ---------------------------------------------------------------------------

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        return False  # its own thread makes the texts, while the device computes

    def stats(self) -> Stats:
        return stats_of(self.engine)

    def recent(self) -> list[StepTimes]:
        return list(self.engine.times.copy())  # copied in one go: the engine may append meanwhile

    def watch(self, seconds: float) -> None:
        return None  # it is always fresh

    def page_map(self) -> PageMap:
        return map_of(self.engine.scheduler.blocks)

    def follow_pages(self) -> PageEvents | None:
        followed: list[PageEvents] = []
        self._call(lambda: followed.append(self.engine.scheduler.blocks.prefix.follow()))
        return followed[0]

    def weights_version(self) -> int:
        return self.engine.version

    def restarting(self) -> str | None:
        return None  # a thread is never started again

    def dead(self) -> str | None:
        return self._over

    def give_up(self, reason: str) -> None:
        """The thread hangs, perhaps for ever: what it does when it comes back reaches nobody."""
        self._end(f"the engine has hung: {reason}", broken=True)

    # -- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        reason, broken = "the engine is closed", False
        try:
            self._choose_device()
            while self._over is None and self._read_commands():
                if self.engine.has_work:
                    outputs = self.engine.step()
                    if self._over is not None:  # given up meanwhile
                        break
                    with self._writing:
                        self._deliver(outputs)
        except BaseException as problem:  # noqa: BLE001  a lost device, or a bug: every job ends with it
            reason, broken = f"the engine has broken: {described(problem)}", True
        self._end(reason, broken)

    def _choose_device(self) -> None:
        """Set the current GPU, which is per thread."""
        device = self.engine.runner.device
        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)

    def _read_commands(self) -> bool:
        """Process commands of other threads, waiting if there is nothing else to do; False to close."""
        command = None if self.engine.has_work else self._inbox.get()
        while True:
            match command:
                case _Add(jobs):
                    for job in jobs:
                        self._add(job)
                case _Abort(ids):
                    for id in ids:
                        self._abort(id)
                case _Call(act, done):
                    try:
                        act()
                        resolve(done)
                    except Exception as problem:
                        resolve(done, problem)
                        if is_fatal(problem):
                            raise
                case _Close():
                    return False
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _switch_role(self, role: RoleConfig) -> None:
        from cairn.serve.separation.roles import with_role

        self.engine = with_role(self.engine, role)

    def _pause(self, keep: bool) -> None:
        self.engine.pause()
        for id in [] if keep else list(self._jobs):
            self._abort(id)

    def _add(self, job: Job) -> None:
        try:
            self.engine.add(job.request)
        except CairnError as problem:
            self._finish(job, "error", str(problem))
            job.updated()
            return
        self._jobs[job.request.id] = job

    def _abort(self, id: RequestId) -> None:
        job = self._jobs.pop(id, None)
        if job is not None:
            self.engine.abort(id)
            self._finish(job, "abort")
            job.updated()

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Make all texts, then wake the readers: woken earlier, they would only wait for the interpreter."""
        updated: list[Job] = []
        began = time.monotonic()
        for output in outputs:
            request = output.request
            job = self._jobs.get(request.id)
            if job is None:  # it was stopped by a string, and this came behind it
                continue
            if request.params.prompt_logprobs is not None:
                # Again at the end: after a preemption the prompt is computed a second time.
                entries = self.engine.prompt_logprobs.pop(request, None)
                if job.prompt_logprobs is None:
                    job.prompt_logprobs = entries
            if request.params.pooling is not None:
                vector_D = self.engine.pools.pop(request)
                job.pooled = job.pooled if vector_D is None else vector_D.tobytes()
            self._write(job, output)
            now = time.monotonic()
            job.detokenize_s += now - began
            began = now
            if job.answer.finished:
                del self._jobs[request.id]
            updated.append(job)
        for job in updated:
            job.updated()

    def _write(self, job: Job, output: Output) -> None:
        """Add the text of new tokens to an answer. An exception ends this request and no other."""
        request, answer = output.request, job.answer
        finish = request.finish if output.finished else None
        try:
            if answer.push_all(output.tokens, finish, request.stop_reason, output.logprobs):
                self.engine.abort(request.id, "stop", answer.whole.stop_reason)
            if finish is not None and not answer.finished:  # without a token, or by an error
                answer.end(finish, error=request.error)
        except Exception as problem:  # noqa: BLE001  reported to the caller, and logged
            self._fail(job, problem)
            self.engine.abort(request.id, "error")

    def _finish(self, job: Job, finish: Finish, error: str | None = None) -> None:
        try:
            job.answer.end(finish, error=error)
        except Exception as problem:  # noqa: BLE001  reported to the caller, and logged
            self._fail(job, problem)

    def _fail(self, job: Job, problem: Exception) -> None:
        log.error("the text of request %s could not be made", job.request.id, exc_info=problem)
        job.answer.fail(described(problem))

    def _end(self, reason: str, broken: bool) -> None:
        """Take no more, and end every job: as aborted where the thread was closed, with the reason where it broke."""
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
        for done in list(self._calls):  # one may be where the thread hangs
            resolve(done, ConfigError(reason))
        # Never released: no text is written any more.
        self._writing.acquire(timeout=ENDED_TIMEOUT_S)
        left = list(self._jobs.values())
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            left += command.jobs if isinstance(command, _Add) else ()
        for job in left:
            if broken:
                self._finish(job, "error", reason)
            else:
                self.engine.abort(job.request.id)
                self._finish(job, "abort")
            job.updated()
        self._jobs.clear()
