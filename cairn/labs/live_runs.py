"""Labs that the page started: one at a time, each a process of its own, with the steps it has gone through so far.

    start(name) ──> python -m cairn.labs.live NAME [GUESS]        state(name) ──> steps, verdict, whether it still runs

Belongs to the event loop of the server. Knows nothing about HTTP. A run ends with the server, or after `LIMIT_S`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from cairn.core.errors import RequestError

LIMIT_S = 240.0


class LiveRun:
    """One run: what it has said, and how it ended."""

    def __init__(self, lab: str, guess: float | None = None) -> None:
        self.lab, self.guess = lab, guess
        self.steps: list[str] = []
        self.end: dict[str, Any] | None = None  # status and verdict
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.end is None

    async def follow(self) -> None:
        """Runs the lab to its end, whatever that is: the next one waits for it."""
        try:
            await self._run()
        except OSError as error:
            self.steps.append(f"no process could be started for it: {error}")
        finally:
            self.end = self.end or {"status": "failed", "verdict": None}

    async def _run(self) -> None:
        """Starts the process and reads it; one that takes too long is killed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cairn.labs.live",
            self.lab,
            *([] if self.guess is None else [str(self.guess)]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that what the lab has started ends with it
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._read(process)
        except TimeoutError:
            self.steps.append(f"did not end within {LIMIT_S:g} s")
        finally:
            if process.returncode is None:
                with contextlib.suppress(
                    ProcessLookupError
                ):  # it has ended, and the loop is to hear of it
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):  # printed by something that the lab uses
                continue
            if "step" in message:
                self.steps.append(message["step"])
            elif "status" in message:
                self.end = message


class LiveRuns:
    """The newest run of each lab that the page started."""

    def __init__(self) -> None:
        self.runs: dict[str, LiveRun] = {}

    def start(self, lab: str, guess: float | None = None) -> None:
        """`guess`: what the learner expects of the lab's first check."""
        busy = next((one.lab for one in self.runs.values() if one.running), None)
        if busy is not None:
            raise RequestError(
                f"lab {busy} is running", hint="labs measure time: one runs at a time; wait for it"
            )
        run = self.runs[lab] = LiveRun(lab, guess)
        run.task = asyncio.get_running_loop().create_task(run.follow())

    def state(self, lab: str) -> dict[str, Any]:
        run = self.runs.get(lab)
        if run is None:
            return {"running": False, "steps": [], "status": None, "verdict": None}
        end = run.end or {"status": None, "verdict": None}
        return {"running": run.running, "steps": run.steps, **end}
