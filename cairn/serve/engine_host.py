"""Interface between a server and its engine: `EngineThread` in this process, `EngineProcesses` in others.

Requests go in by `submit` and come back by each job's `on_update`. The rest is life (pause, sleep, other weights,
adapters) and what can be seen from outside (steps, pages, whether it lives). Names and texts are no part of it.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Protocol

from cairn.serve.config import RoleConfig
from cairn.serve.engine.messages import EngineFailed, Stats
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.page_map import PageMap
from cairn.serve.engine.request import RequestId
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.weight_sources import WeightsFrom
from cairn.serve.job import Job

CALL_TIMEOUT_S = 3600.0  # of a call to an engine in a thread; other weights may take long


class EngineHost(Protocol):
    """An engine that takes jobs. Any thread may call it."""

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Call `on_update` in this loop's thread; before the first request. False: it is called in another one."""
        ...

    def encode(self, jobs: Sequence[Job]) -> None:
        """Serialise what `submit` sends to another process. Optional; with pictures it takes long, and no lock."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None: ...

    def abort(self, ids: Sequence[RequestId]) -> None: ...

    def close(self) -> None: ...

    def pause(self, keep: bool = True) -> None:
        """Take no step until `resume`; requests are kept, or aborted."""
        ...

    def resume(self) -> None: ...

    def check_sleep(self, level: int = 1) -> None:
        """Raises what keeps it from ever sleeping at this level."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`; refused while requests are under way."""
        ...

    def switch_role(self, role: RoleConfig) -> None: ...
    def wake(self) -> None: ...

    def load_weights(self, version: int, source: WeightsFrom) -> None:
        """Serve with these weights from the next step on."""
        ...

    def load_adapter(self, number: int, folder: str) -> None:
        """Keep an adapter for requests of this number; numbers are never used again."""
        ...

    def unload_adapter(self, number: int) -> None:
        """Its requests finish; there will be no others."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def stats(self) -> Stats: ...

    def recent(self) -> list[StepTimes]:
        """The newest steps, oldest first."""
        ...

    def watch(self, seconds: float) -> None:
        """Keep `stats`, `recent` and `page_map` fresh for so long."""
        ...

    def page_map(self) -> PageMap:
        """Empty while it is not known."""
        ...

    def follow_pages(self) -> PageEvents | None:
        """Start reporting changes of the prefix cache; None if the engine does not support it."""
        ...

    def weights_version(self) -> int:
        """Version of the current weights; 0 for the initial ones, also after a restart."""
        ...

    def restarting(self) -> str | None:
        """Why it is being started again; requests wait meanwhile."""
        ...

    def dead(self) -> str | None:
        """Why it takes no requests any more; None while it does."""
        ...

    def give_up(self, reason: str) -> None:
        """Give up a hanging engine: end every request with the reason. Engines in processes detect hangs themselves."""
        ...


def wait_for(done: Future[None], timeout_s: float) -> None:
    """Until another thread has resolved the future; an EngineFailed if that takes too long."""
    try:
        done.result(timeout_s)
    except TimeoutError:
        if done.done():  # the call itself raised it
            raise
        raise EngineFailed(
            f"the engine has not carried out a call for {timeout_s:g} s",
            hint="a step or an earlier call hangs; GET /health says for how long",
        ) from None


def resolve(done: Future[None], problem: BaseException | None = None) -> None:
    """Unless that has happened already: a thread that hung may come back after its calls have failed."""
    with suppress(InvalidStateError):
        done.set_result(None) if problem is None else done.set_exception(problem)
