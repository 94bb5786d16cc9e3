"""An operator that acts while it holds the Lease: what `election` decides is written here.

wait --take--> lead --renew--> lead ...      lost, or the API silent for too long --> stop at once, wait again
"""

import asyncio
import datetime
import time
from collections.abc import Callable
from contextlib import suppress

from cairn.cluster.operator.api import CONFLICT, Api, ApiRefused, ApiUnreachable
from cairn.cluster.operator.election import LeaseView, lease_of
from cairn.cluster.operator.objects import Ref
from cairn.cluster.operator.run import Operator, Say


async def lead(
    api: Api, lease: Ref, me: str, work: Callable[[], Operator], duration_s: int, say: Say
) -> None:
    """Loop forever: wait for the Lease, run an operator while it is held, start over when it is lost."""
    view, refusals, term = LeaseView(me=me), Refusals(say), Term(me, work, say)
    renewed_s = 0.0
    try:
        while True:
            held, asked_s = None, time.monotonic()
            with suppress(TimeoutError):  # of an API that takes a request and never answers
                async with asyncio.timeout(duration_s / 3):
                    held = await _hold(api, lease, view, duration_s, refusals)
            if held:
                renewed_s = asked_s  # others count from the write, whose answer may come late
                term.begin()
            elif held is False or time.monotonic() - renewed_s >= duration_s * 2 / 3:
                await term.end()
            term.check()
            await asyncio.sleep(duration_s / 3 if held else duration_s / 9)
    finally:
        if term.runs:
            await term.stop()
            await _give_up(api, lease, me)


class Term:
    """The operator that runs while this process holds the Lease."""

    def __init__(self, me: str, work: Callable[[], Operator], say: Say) -> None:
        self._me, self._work, self._say = me, work, say
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self._task is not None

    def begin(self) -> None:
        if self._task is None:
            self._say(f"{self._me} leads")
            self._task = asyncio.create_task(self._work().run())

    async def end(self) -> None:
        if self._task is not None:
            self._say(f"{self._me} does not lead any more")
            await self.stop()

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """An operator that the API has ended is begun again with the next renewal; any other error is raised."""
        if self._task is None or not self._task.done():
            return
        error = self._task.exception()
        if error is not None and not isinstance(error, ApiRefused | ApiUnreachable):
            raise error
        self._task = None
        self._say(f"begins again: {error}")


class Refusals:
    """Says why the API refuses the Lease, once for each reason: an operator without rights does not wait in silence."""

    def __init__(self, say: Say) -> None:
        self.say, self.last = say, ""

    def note(self, lease: Ref, error: ApiRefused) -> None:
        said = f"Lease {lease.namespace}/{lease.name} is refused: {error}"
        if said != self.last:
            self.say(said)
        self.last = said


async def _hold(
    api: Api, lease: Ref, view: LeaseView, duration_s: int, refusals: Refusals
) -> bool | None:
    """Acquire or renew the Lease; return whether it is held, or None if the API does not respond."""
    try:
        current = await api.get(lease)
        step = view.step(current, time.monotonic())
        if step == "wait":
            return False
        now = datetime.datetime.now(datetime.UTC)
        renewed = lease_of(lease, view.me, current, step, now, duration_s)
        await (api.create(renewed) if current is None else api.replace(renewed))
    except ApiRefused as error:
        if error.code == CONFLICT:
            return False
        refusals.note(lease, error)
        return None
    except ApiUnreachable:
        return None
    return True


async def _give_up(api: Api, lease: Ref, me: str) -> None:
    """So that the next one need not wait for the Lease to end."""
    try:
        current = await api.get(lease)
        if current is not None and current["spec"].get("holderIdentity") == me:
            current["spec"]["holderIdentity"] = ""
            await api.replace(current)
    except (ApiRefused, ApiUnreachable):
        return
