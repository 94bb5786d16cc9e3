"""Pictures through processes of their own: a file that crashes, hangs or swells a decoder ends that process alone.

    any thread --prepare--> an idle process, or a new one --> Picture | RequestError

Processes start when they are first needed and stay; one that fails is replaced by the next call.
"""

import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from cairn.core.errors import CairnError, ConfigError, RequestError
from cairn.models.vision.picture import MOST_BYTES, Picture
from cairn.models.vision.tiling_rules import ImageRules
from cairn.serve.media.decode_process import (
    Decoded,
    Job,
    decode_done,
    encode,
    read_message,
    write_message,
)

# A thread for each core, with its own memory, would go beyond what the process may have.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
PROCESSES = 2
PATIENCE_S = 20.0  # for one picture, the start of the process included
BUDGET_S = 30.0  # for all pictures of a request to a server
Place = subprocess.Popen[bytes] | None  # None: a place in which a process can be started


class DecodingBudget:
    """The seconds for which one request may occupy decoder processes; waiting for a process is free."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = BUDGET_S if seconds is None else seconds
        self.used_s, self.pictures = 0.0, 0

    @property
    def left_s(self) -> float:
        return self.seconds - self.used_s

    def check(self) -> None:
        if self.left_s < 1e-6:  # sums of seconds are rounded
            raise RequestError(
                f"the images of the request took {self.used_s:.1f} s to decode, and a request may take "
                f"{self.seconds:g} s; {self.pictures} of them were decoded",
                hint="send fewer or smaller images",
            )


class ImageDecoder:
    """May be used from any thread. Pictures are decoded in the order in which they were asked for."""

    def __init__(self, processes: int = PROCESSES, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._idle: list[Place] = [None] * processes
        # Threads that wait for a place, first come, first served.
        self._waiting: deque[queue.SimpleQueue[Place]] = deque()
        self._lock = threading.Lock()
        self._all: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def prepare(
        self,
        contents: Sequence[bytes],
        rules: ImageRules,
        fps: float = 0.0,
        budget: DecodingBudget | None = None,
    ) -> Picture:
        """The picture in a file, or with `fps` a video in one or in its frames; RequestError: what is wrong."""
        size = sum(map(len, contents))
        if size > MOST_BYTES:
            what = "video" if fps else "image"
            raise RequestError(
                f"the {what} has {size} bytes", hint=f"send at most {MOST_BYTES} bytes"
            )
        budget = budget or DecodingBudget(math.inf)
        budget.check()
        process = self._take()
        began = time.monotonic()
        try:
            if process is not None and process.poll() is not None:
                self._end(process)  # its pipes are still open
                process = None
            process = process or self._start()
            job = encode(Job(list(contents), rules, fps))
            done = self._ask(process, job, min(self.patience_s, budget.left_s))
            if done is None:
                self._end(process)
                process = None
        except BaseException:
            self._end(process)
            process = None
            raise
        finally:
            self._give_back(process)
            budget.used_s += time.monotonic() - began
        if done is None:
            budget.check()
            raise RequestError(
                "the image could not be decoded within the limits of time and memory",
                hint="send a smaller one, or another format",
            )
        if done.picture is None:
            kind = ConfigError if "not installed" in done.message else RequestError
            raise kind(done.message, hint=done.hint)
        budget.pictures += 1
        return done.picture

    def close(self) -> None:
        """End all processes. May be called again."""
        with self._lock:
            self._closed = True
            ended, self._all = list(self._all), set()
        for process in ended:
            self._end(process)

    def _take(self) -> Place:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            turn: queue.SimpleQueue[Place] = queue.SimpleQueue()
            self._waiting.append(turn)
        try:
            return turn.get()
        except BaseException:  # the wait was interrupted
            with self._lock:
                is_waiting = turn in self._waiting
                if is_waiting:
                    self._waiting.remove(turn)
            if not is_waiting:
                self._give_back(turn.get_nowait())
            raise

    def _give_back(self, place: Place) -> None:
        """Hand it to the thread that has waited longest; a lock would let the one that has just run go on."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().put(place)
            else:
                self._idle.append(place)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._closed:
                raise CairnError("the engine is closed")
            process = subprocess.Popen(
                [sys.executable, "-m", "cairn.serve.media.decode_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
            )
            self._all.add(process)
            return process

    def _ask(
        self, process: "subprocess.Popen[bytes]", job: bytes, limit_s: float
    ) -> Decoded | None:
        """None: the process is of no more use. A timer ends it when it takes too long, so that reading ends too."""
        if process.stdin is None or process.stdout is None:
            raise CairnError("a decoder has no pipes")
        expired = threading.Event()

        def end() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, job)
            answer = read_message(process.stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
            timer.join()  # it may be at the kill: the next picture must not get that process
        return None if answer is None or expired.is_set() else decode_done(answer)

    def _end(self, process: "subprocess.Popen[bytes] | None") -> None:
        if process is None:
            return
        with self._lock:
            self._all.discard(process)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # it was broken with the process
