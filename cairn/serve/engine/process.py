"""The processes of one engine: started, spoken with, watched, ended; their folder goes with them.

    folder/commands  to rank 0     folder/reports  from all ranks     folder/stacks-N  what rank N was doing

Each group has a folder of its own with sockets that only this user can open, so engines on one host never meet. The
processes are fresh interpreters, not forks: a parent may have threads and a GPU. They inherit no standard output, so
that nothing they print gets between what the parent prints. Says what happened; what to do about it is the client's
decision.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import zmq

import cairn
from cairn.serve.config import EngineConfig, RoleConfig
from cairn.serve.engine.messages import (
    Boot,
    Command,
    EngineFailed,
    Failure,
    Report,
    decode_report,
    encode,
)

COMMAND = (sys.executable, "-P", "-m", "cairn.serve.engine.worker")
LONGEST_FOLDER = 80  # bytes; the path of a socket may have 107
DUMP_S = 2.0  # how long the workers may take to write their stacks
KILL_S = 10.0  # to end after SIGKILL; a process inside a call of a driver may never do so

log = logging.getLogger("cairn")
Spawn = Callable[[Boot], "subprocess.Popen[bytes]"]


class WorkerGroup:
    """All ranks of one engine, from start to end."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        beat_s: float,
        grace_s: float,
        spawn: Spawn | None = None,
        role: RoleConfig | None = None,
    ) -> None:
        """`start` starts the processes; what is sent to them before that reaches them."""
        self._spawn = spawn or spawn_worker
        self.failure: Failure | None = None  # what a worker said before it ended
        self.killed = False  # by us
        self.folder = _private_folder()
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PUSH, "commands")
        self._reports = self._bind(zmq.PULL, "reports")
        self._unsent: deque[bytes] = deque()  # commands, while no worker is connected
        self._timeout_s: float | None = None  # of the reports, as it was last set
        self.processes: list[subprocess.Popen[bytes]] = []
        self._boots = [
            Boot(
                config=config,
                folder=str(self.folder),
                rank=rank,
                beat_s=beat_s,
                grace_s=grace_s,
                role=role,
            )
            for rank in range(config.tensor_parallel_size)
        ]

    def start(self) -> Self:
        try:
            for boot in self._boots:
                self.processes.append(self._spawn(boot))
        except BaseException:
            self.end()
            raise
        return self

    def send(self, *commands: Command) -> None:
        """Returns at once, also while the worker loads its model or has just ended."""
        self.send_encoded(encode(commands))

    def send_encoded(self, commands: bytes) -> None:
        self._unsent.append(commands)
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent yet. Without a connected worker ZeroMQ would wait for one.

        Small messages are copied all the same; a copy of many pictures would take half a second.
        """
        with suppress(zmq.Again):
            while self._unsent:
                self._commands.send(self._unsent[0], zmq.NOBLOCK, copy=False)
                self._unsent.popleft()

    def receive(self, timeout_s: float) -> Report | None:
        """The next that the workers say; None: nothing came in so long."""
        if timeout_s != self._timeout_s:  # it seldom is, and to set it is a call
            self._timeout_s = timeout_s
            self._reports.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        try:
            report = decode_report(self._reports.recv())
        except zmq.Again:
            return None
        if isinstance(report, Failure) and self.failure is None:
            self.failure = report
        return report

    def receive_all(self, timeout_s: float = 0.0) -> Iterator[Report]:
        """Until nothing comes in so long."""
        while (report := self.receive(timeout_s)) is not None:
            yield report

    def fallen(self) -> list[tuple[int, int]]:
        """Rank and exit status of those that have ended."""
        ended = ((rank, process.poll()) for rank, process in enumerate(self.processes))
        return [(rank, status) for rank, status in ended if status is not None]

    def explain(self, rank: int, status: int) -> EngineFailed:
        """Why a worker ended: in its own words, if it had time for some."""
        who = "the engine" if len(self.processes) == 1 else f"rank {rank} of the engine"
        killed = status < 0  # others only fell over it, whatever they said
        aborted = status == -signal.SIGABRT  # which may be the end of one that fell over another
        if self.failure is not None and (not killed or aborted or self.failure.rank == rank):
            who = who if self.failure.rank == rank else f"rank {self.failure.rank} of the engine"
            message = f"{self.failure.kind}: {self.failure.message}"
            also = f"; rank {rank} aborted" if aborted and self.failure.rank != rank else ""
            return EngineFailed(
                f"{who} failed with {message} (exit status {max(status, 1)}){also}",
                self.failure.hint,
                self.failure.traceback,
            )
        if status == -signal.SIGKILL and self.killed:
            return EngineFailed("the engine was stopped, and did not end by itself")
        if killed:
            name = signal.Signals(-status).name
            hint = "was the machine out of memory?" if name == "SIGKILL" else None
            return EngineFailed(f"{who} was ended by {name} (exit status {status})", hint)
        return EngineFailed(f"{who} ended without a word (exit status {status})")

    def stacks(self) -> str:
        """Stack traces of all threads of all ranks."""
        parts = []
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        for rank in range(len(self.processes)):
            path = self.folder / f"stacks-{rank}"
            while time.monotonic() < deadline and not _complete(path):
                time.sleep(0.02)
            parts.append(f"rank {rank}:\n{_read(path) or 'no stacks were written'}")
        return "\n".join(parts)

    def wait(self, timeout_s: float) -> bool:
        """Until all have ended; False if some have not."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                return False
        return True

    def kill(self) -> None:
        self.killed = True
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Whatever still runs is killed, and nothing is left: no zombie, no file."""
        self.kill()
        if not self.wait(KILL_S):
            left = [process.pid for process in self.processes if process.poll() is None]
            log.error("processes %s of the engine did not end %g s after SIGKILL", left, KILL_S)
        for process in self.processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bind(self, kind: int, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)  # nothing is ever dropped
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(f"ipc://{self.folder}/{name}")
        return socket


def _private_folder() -> Path:
    folder = tempfile.gettempdir()
    where = None if len(os.fsencode(folder)) <= LONGEST_FOLDER else "/tmp"
    return Path(tempfile.mkdtemp(prefix="cairn-engine-", dir=where))


def spawn_worker(boot: Boot, command: Sequence[str] = COMMAND) -> "subprocess.Popen[bytes]":
    """A fresh interpreter that runs `worker`, or what else reads its `Boot` as that does."""
    root = str(Path(cairn.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=environment)
    encoded = encode(boot)
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended already: `fallen` will say so
            process.stdin.write(len(encoded).to_bytes(4, "little") + encoded)
            process.stdin.flush()
    return process  # standard input stays open: its end tells the worker that we are gone


def _complete(path: Path) -> bool:
    text = _read(path)
    return "Current thread" in text and text.endswith("\n")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
