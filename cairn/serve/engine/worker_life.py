"""Heartbeat and exit of an engine process.

    Pulse               a beat with the steps so far, from a thread of its own: also while a step hangs
    report_failure      an exception with its traceback, as the last message
    leave_with_parent   the end of the parent is the end of this process, and of the folder of its sockets

Knows nothing about commands or requests.
"""

import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import zmq

from cairn.core.errors import CairnError
from cairn.serve.engine.facts import stats_of
from cairn.serve.engine.failure import first_line
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.messages import Beat, Boot, Failure, encode
from cairn.serve.engine.page_map import PageMap, map_of

if TYPE_CHECKING:
    from cairn.serve.engine.worker import Worker

WATCHED_BEAT_S = 0.25  # while the engine is watched
MOST_STEPS = 512  # of one beat


class Pulse(threading.Thread):
    """Says that the process lives, and how many steps it has taken. Sees its parent's end, too."""

    def __init__(self, boot: Boot, context: zmq.Context) -> None:
        super().__init__(daemon=True)
        self.boot, self.context = boot, context
        self.worker: Worker | None = None
        self.stopped = threading.Event()
        self._told = -1  # the newest step that was reported to the client

    def run(self) -> None:
        parent, due = os.getppid(), 0.0
        socket = connect(self.context, zmq.PUSH, self.boot.folder, "reports")
        while not self.stopped.wait(min(WATCHED_BEAT_S, self.boot.beat_s)):
            if os.getppid() != parent:
                _abandon(self.boot.folder)
            if self.boot.rank != 0 or self.worker is None:
                continue
            now = time.monotonic()
            watched = now < self.worker.watched_until
            if watched or now >= due:
                due = now + self.boot.beat_s - WATCHED_BEAT_S / 2  # never a turn later than asked
                socket.send(encode(self._beat(self.worker.engine, watched)))
        socket.close()

    def _beat(self, engine: Engine, watched: bool) -> Beat:
        fresh = []
        for step in reversed(engine.times.copy()):  # in C, in one go: the loop may append meanwhile
            if step.number <= self._told or len(fresh) == MOST_STEPS:
                break
            fresh.append(step)
        self._told = fresh[0].number if fresh else self._told
        pages = map_of(engine.scheduler.blocks) if watched else PageMap()
        return Beat(stats_of(engine), fresh[::-1], pages)


def connect(context: zmq.Context, kind: int, folder: str, name: str) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)  # nothing is ever dropped, and a slow reader delays no sender
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"ipc://{folder}/{name}")
    return socket


def report_failure(boot: Boot, problem: BaseException) -> None:
    hint = problem.hint if isinstance(problem, CairnError) else None
    message = problem.message if isinstance(problem, CairnError) else first_line(problem)
    text = "".join(traceback.format_exception(problem))
    context = zmq.Context()  # its end waits until the words have left, and for nothing else
    socket = connect(context, zmq.PUSH, boot.folder, "reports")
    socket.send(encode(Failure(boot.rank, type(problem).__name__, message, hint, text)))
    context.destroy(linger=2000)


def leave_with_parent(folder: str) -> None:
    sys.stdin.buffer.read()  # until the other end is closed, which only its death or its wish does
    _abandon(folder)


def _abandon(folder: str) -> NoReturn:
    for _ in range(3):  # another rank may be at it, too
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            break
        time.sleep(0.1)
    os._exit(1)


def leave(status: int) -> NoReturn:
    """Exit without waiting for other threads or for ranks in a collective that never completes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
