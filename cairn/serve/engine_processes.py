"""The engine in processes of its own, with the interface of `EngineThread`.

    job --submit--> EngineClient ~~ a worker for each GPU ~~> RemoteJob: token -> text --on_update--> reader

For models that several GPUs share, and for servers, whose sockets and texts must not make a device wait. Text is made
in the client's thread, where the tokens arrive, or in that of a server's event loop: two threads that both touch every
token would fight for the interpreter. When the workers fall, every request that was on its way ends with the reason;
the client starts them again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from cairn.core.errors import CairnError, ConfigError
from cairn.serve.config import EngineConfig, RoleConfig
from cairn.serve.engine.client import EngineClient, ProcessOptions
from cairn.serve.engine.failure import described
from cairn.serve.engine.messages import Begun, Ended, Scored, Stats, Submit, encode_submission
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.page_map import PageMap
from cairn.serve.engine.process import Spawn, WorkerGroup, spawn_worker
from cairn.serve.engine.request import Finish, RequestId
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.job import Job

log = logging.getLogger("cairn")


class EngineProcesses:
    def __init__(
        self,
        config: EngineConfig,
        spawn: Spawn = spawn_worker,
        role: RoleConfig | None = None,
        early: WorkerGroup | None = None,
        options: ProcessOptions = ProcessOptions(),  # noqa: B008 (immutable)
    ) -> None:
        self.client = EngineClient(config, options, spawn, role, early)
        self._open: dict[RequestId, RemoteJob] = {}
        self._closed = False

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Make texts and call `on_update` in this loop's thread."""
        self.client.deliver_in(loop)
        return True

    def encode(self, jobs: Sequence[Job]) -> None:
        """Serialise what `submit` sends, where that has not been done."""
        for job in jobs:
            if job.encoded is not None:
                continue
            request = job.request
            number = self.client.new_number()
            submission = Submit(
                number,
                list(request.prompt),
                request.params,
                request.priority,
                request.salt,
                sorted(request.eos_ids),
                job.guide,
                request.identity,
                request.adapter,
                request.outputs,
                list(request.pieces),
                list(request.pictures),
                request.reader,
            )
            job.encoded = number, encode_submission(submission)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put them in line. They have been checked: one that is refused now ends with an error."""
        if self._closed:
            raise ConfigError("the engine is closed", hint="make a new LLM")
        self.encode(jobs)
        for job in jobs:
            assert job.encoded is not None
            number, message = job.encoded
            job.encoded = None  # it has the pixels of its pictures once more
            remote = RemoteJob(number, job, self._leave)
            self._open[job.request.id] = remote  # first, because it may end at once
            try:
                self.client.submit_encoded(remote, number, message)
            except CairnError as problem:
                remote.fail(problem)
                remote.wake()

    def abort(self, ids: Sequence[RequestId]) -> None:
        for id in ids:
            if (remote := self._open.get(id)) is not None:
                self.client.abort(remote.id)

    def close(self) -> None:
        """End everything that runs, and the processes. May be called again."""
        if not self._closed:
            self._closed = True
            self.client.close(0.0)

    def pause(self, keep: bool = True) -> None:
        """Take no step until `resume`; requests are kept, or aborted."""
        self.client.pause(keep)

    def resume(self) -> None:
        self.client.resume()

    def check_sleep(self, level: int = 1) -> None:
        """Raises what keeps it from ever sleeping at this level."""
        self.client.check_sleep(level)

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`; refused while requests are under way."""
        self.client.sleep(level)

    def switch_role(self, role: RoleConfig) -> None:
        """Take requests in another role from now on; refused while it is at work."""
        self.client.switch_role(role)

    def wake(self) -> None:
        self.client.wake()

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Serve with these weights from the next step on; when it fails, the old ones go on serving."""
        self.client.load_weights(version, source)

    def load_adapter(self, number: int, folder: str) -> None:
        """Keep an adapter for requests of this number."""
        self.client.load_adapter(number, folder)

    def unload_adapter(self, number: int) -> None:
        """Its requests finish; there will be no others."""
        self.client.unload_adapter(number)

    def reset_prefix_cache(self) -> None:
        self.client.reset_prefix_cache()

    def stats(self) -> Stats:
        return self.client.stats

    def recent(self) -> list[StepTimes]:
        return list(self.client.recent.copy())

    def watch(self, seconds: float) -> None:
        self.client.watch(seconds)

    def page_map(self) -> PageMap:
        return self.client.pages

    def follow_pages(self) -> PageEvents | None:
        return self.client.follow_pages()

    def weights_version(self) -> int:
        return self.client.version

    def restarting(self) -> str | None:
        return self.client.restarting

    def dead(self) -> str | None:
        if self._closed:
            return "the engine is closed"
        over = self.client._over
        return None if self.client.alive else str(over or "the engine is being closed")

    def give_up(self, reason: str) -> None:
        return None  # the client ends workers that hang

    def _leave(self, remote: "RemoteJob") -> None:
        self._open.pop(remote.job.request.id, None)
        self.client.abort(
            remote.id
        )  # after a stop string; else it has ended, and this does nothing


class RemoteJob:
    """A job whose answer grows with what the client brings. Whatever goes wrong here ends this request and no other."""

    __slots__ = ("_leave", "_left", "id", "job")

    def __init__(self, id: int, job: Job, leave: Callable[["RemoteJob"], None]) -> None:
        self.id, self.job = id, job
        self._leave = leave  # called once, when the answer is over
        self._left = False

    def begin(self, begun: Begun | None, prompt: list[Scored] | None, pooled: bytes | None) -> None:
        if begun is not None:
            self._know(begun)
        self.job.pooled = pooled
        if prompt is not None:
            self.job.prompt_logprobs = prompt

    def put(self, tokens: list[int], scored: list[Scored] | None, ended: Ended | None) -> None:
        """The last token is marked as the last, because it may have no text."""
        job, answer = self.job, self.job.answer
        if self._left:  # by a stop string, and this came behind it
            return
        began = time.monotonic()
        try:
            if ended is None:
                answer.push_all(tokens, None, None, scored)
            else:
                answer.push_all(tokens, ended.finish, ended.stop_reason, scored)
        except Exception as problem:  # noqa: BLE001  reported to the caller, and logged
            self._unreadable(problem)
        if ended is not None:
            self.end(ended)
        job.detokenize_s += time.monotonic() - began

    def end(self, ended: Ended) -> None:
        if not self._left:
            self._know(ended)
            self.job.request.handoff = ended.handoff
            self._end(ended.finish, ended.stop_reason, ended.error)

    def fail(self, problem: CairnError) -> None:
        self._end("error", None, str(problem))

    def wake(self) -> None:
        """Nothing follows the news of the end."""
        if self._left:
            return
        if self.job.answer.whole.finish_reason is not None:
            self._left = True
            self._leave(self)
        self.job.updated()

    def _end(self, finish: Finish, stop_reason: int | str | None, error: str | None) -> None:
        try:
            self.job.answer.end(finish, stop_reason, error)
        except Exception as problem:  # noqa: BLE001  the end of a text is decoded, too
            self._unreadable(problem)

    def _unreadable(self, problem: Exception) -> None:
        log.exception("the text of request %s could not be made", self.job.request.id)
        self.job.answer.fail(described(problem))

    def _know(self, report: Begun | Ended) -> None:
        self.job.request.cached, self.job.request.ledger = report.cached, report.ledger
