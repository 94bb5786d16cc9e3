"""An operator that acts while it holds the Lease: what `election` decides is written here.

wait --take--> lead --renew--> lead ...      lost, or the API silent for too long --> stop at once, wait again
"""

import asyncio
import datetime
import time
from collections.abc import Callable
from contextlib import suppress

from cairn.cluster.operator.api import CONFLICT, Api, ApiRefused, Unreachable
from cairn.cluster.operator.election import LeaseView, lease_of
from cairn.cluster.operator.objects import Ref
from cairn.cluster.operator.run import Operator, Say


async def lead(
    api: Api, lease: Ref, me: str, work: Callable[[], Operator], duration_s: int, say: Say
) -> None:
    """For ever: waits for the Lease, runs an operator while it is held, begins again when it is lost."""
    view = LeaseView(me=me)
    refusals = Refusals(say)
    task: asyncio.Task[None] | None = None
    renewed_s = 0.0
    try:
        while True:
            held, asked_s = None, time.monotonic()
            with suppress(TimeoutError):  # of an API that takes a question and never answers
                async with asyncio.timeout(duration_s / 3):
                    held = await _hold(api, lease, view, duration_s, refusals)
            now = time.monotonic()
            if held:
                renewed_s = asked_s  # others count from the write, which an answer may follow late
                if task is None:
                    say(f"{me} leads")
                    task = asyncio.create_task(work().run())
            late = held is None and now - renewed_s < duration_s * 2 / 3
            if task is not None and not held and not late:
                say(f"{me} does not lead any more")
                await _end(task)
                task = None
            if task is not None and task.done():
                error = task.exception()
                if error is not None and not isinstance(error, ApiRefused | Unreachable):
                    raise error
                say(f"begins again: {error}")
                task = None
            await asyncio.sleep(duration_s / 3 if held else duration_s / 9)
    finally:
        if task is not None:
            await _end(task)
            await _give_up(api, lease, me)


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
    """Whether the Lease is ours now; None: the API does not answer."""
    try:
        there = await api.get(lease)
        step = view.step(there, time.monotonic())
        if step == "wait":
            return False
        now = datetime.datetime.now(datetime.UTC)
        made = lease_of(lease, view.me, there, step, now, duration_s)
        await (api.create(made) if there is None else api.replace(made))
    except ApiRefused as error:
        if error.code == CONFLICT:
            return False
        refusals.note(lease, error)
        return None
    except Unreachable:
        return None
    return True


async def _give_up(api: Api, lease: Ref, me: str) -> None:
    """So that the next one need not wait for the Lease to end."""
    try:
        there = await api.get(lease)
        if there is not None and there["spec"].get("holderIdentity") == me:
            there["spec"]["holderIdentity"] = ""
            await api.replace(there)
    except (ApiRefused, Unreachable):
        return


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
