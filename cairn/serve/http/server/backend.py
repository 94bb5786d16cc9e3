"""The engine as the server sees it: requests in, news out, signs of life; in a thread or in processes of its own.

    Backend.jobs(...) -> submit -> on_news, in the engine's or the loop's thread  |  stats, dead: for health and metrics

A thread costs nothing to reach and suits a CPU, where torch leaves the interpreter alone for most of a step. For GPUs
the engine gets processes of its own, so that sockets and text never make the device wait.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cairn.core.errors import RequestError
from cairn.models.checkpoint import default_device
from cairn.models.runnable import OpenModel, open_model
from cairn.serve.answer import Answer
from cairn.serve.engine.facts import facts_of, stats_of
from cairn.serve.engine.messages import Facts, Stats
from cairn.serve.engine.page_map import map_of
from cairn.serve.engine.request import Limits, Request, RequestId, check_request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine_thread import EngineThread, Job
from cairn.serve.grammar import Grammar
from cairn.serve.http.server.settings import ServerConfig
from cairn.serve.prompts import of_each_answer

log = logging.getLogger("cairn")
CLOSED = "the engine is closed"
# Fewer than offline: every step then has a graph, and nobody waits long for the prompts of others.
GPU_STEP_TOKENS = 4096


class AnyEngine(Protocol):
    """What a thread and processes have in common."""

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Bring news in this loop's thread; before the first request. False: they come from another one."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def abort(self, ids: Sequence[RequestId]) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> Stats: ...

    def recent(self) -> list[StepTimes]:
        """The newest steps, oldest first."""
        ...

    def watch(self, seconds: float) -> None:
        """Somebody looks for so long: keep what there is to see fresh."""
        ...

    def page_map(self) -> str:
        """Empty when it is not known yet."""
        ...

    def restarting(self) -> str | None:
        """Why it is being started again; what is asked meanwhile waits for it."""
        ...

    def dead(self) -> str | None:
        """Why it takes nothing any more; None while it does."""
        ...


class ThreadedEngine(EngineThread):
    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        return False  # its own thread makes the texts, while the device computes

    def stats(self) -> Stats:
        return stats_of(self.engine)

    def recent(self) -> list[StepTimes]:
        return list(self.engine.times.copy())  # copied in one go: the engine may append meanwhile

    def watch(self, seconds: float) -> None:
        return None  # it is always fresh

    def page_map(self) -> str:
        return map_of(self.engine.scheduler.blocks)

    def restarting(self) -> str | None:
        return None  # a thread is never started again

    def dead(self) -> str | None:
        return self._over


class Backend:
    """A model that runs, with its tokenizer and its limits."""

    def __init__(
        self,
        opened: OpenModel,
        limits: Limits,
        engine: AnyEngine,
        notes: Sequence[str],
        facts: Facts = Facts(),  # noqa: B008 (immutable)
    ) -> None:
        self.opened, self.engine, self.notes = opened, engine, list(notes)
        self.facts = facts
        self.tokenizer, self.name = opened.tokenizer, opened.name
        # A request that outgrew the whole cache would fail half way; so it is refused at the door.
        context = min(limits.context, limits.capacity)
        self.limits = msgspec.structs.replace(limits, context=context)
        self._ids = itertools.count()
        self._reported: str | None = None

    def dead(self) -> str | None:
        """The reason goes to the log, once."""
        reason = self.engine.dead()
        if reason is not None and reason != self._reported and reason != CLOSED:
            log.error("the engine takes no requests any more: %s", reason)
        self._reported = reason
        return reason

    def jobs(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_news: Callable[[Job], None],
        *,
        first_index: int = 0,
        priority: int = 0,
        salt: str = "",
        grammar: Grammar | None = None,
    ) -> list[Job]:
        """One for each answer to a prompt. Refuses what the engine can never serve."""
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop is given, and {self.name} has no tokenizer to find it with",
                               hint="use stop_token_ids")  # fmt: skip
        check_request(Request(0, prompt, params, priority=priority, salt=salt), self.limits)
        most = params.max_tokens or self.limits.context - len(prompt)
        params = msgspec.structs.replace(params, max_tokens=most)
        jobs = []
        for index, own in enumerate(of_each_answer(params), start=first_index):
            constraint = None if grammar is None else grammar.start()
            request = Request(next(self._ids), prompt, own, priority=priority, salt=salt,
                              eos_ids=self.opened.eos_ids, constraint=constraint)  # fmt: skip
            job = Job(request, Answer(index, own, self.tokenizer, prompt), most, on_news)
            job.guide = None if grammar is None else grammar.guide  # for an engine elsewhere
            jobs.append(job)
        return jobs


def open_backend(config: ServerConfig) -> Backend:
    """Load the model and start the engine; raises what keeps it from starting."""
    device = default_device() if config.device == "auto" else config.device
    on_gpu = device.startswith("cuda")
    engine_config = config.engine()
    if on_gpu and config.max_num_batched_tokens is None:
        engine_config = msgspec.structs.replace(
            engine_config, max_num_batched_tokens=GPU_STEP_TOKENS
        )
    in_process = config.engine_in == "process"
    if config.engine_in == "auto":
        in_process = config.tensor_parallel_size > 1 or on_gpu
    if not in_process:
        started = start(engine_config)
        engine = ThreadedEngine(started.engine)
        limits, facts = started.engine.scheduler.limits, facts_of(started.engine)
        return Backend(started.opened, limits, engine, started.notes, facts)
    from cairn.serve.http.server.engine_watch import WatchedProcesses  # needs ZeroMQ

    opened = open_model(config.model)
    processes = WatchedProcesses(engine_config)
    client = processes.client
    return Backend(opened, client.limits, processes, client.notes, client.facts)
