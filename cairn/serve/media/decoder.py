"""Pictures through processes of their own: a file that crashes, hangs or swells a decoder ends that process alone.

    any thread --prepare--> an idle process, or a new one --> Picture | RequestError

Processes start when they are first needed and stay; one that fails is replaced by the next call.
"""

import os
import queue
import subprocess
import sys
import threading
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


class ImageDecoder:
    """May be used from any thread."""

    def __init__(self, processes: int = PROCESSES, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)  # a place in which a process can be started
        self._lock = threading.Lock()
        self._all: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def prepare(self, contents: Sequence[bytes], rules: ImageRules, fps: float = 0.0) -> Picture:
        """The picture in a file, or with `fps` a video in one or in its frames; RequestError: what is wrong."""
        size = sum(map(len, contents))
        if size > MOST_BYTES:
            what = "video" if fps else "image"
            raise RequestError(
                f"the {what} has {size} bytes", hint=f"send at most {MOST_BYTES} bytes"
            )
        process = self._idle.get()
        try:
            if process is not None and process.poll() is not None:
                self._end(process)  # its pipes are still open
                process = None
            process = process or self._start()
            done = self._ask(process, encode(Job(list(contents), rules, fps)))
        except BaseException:
            self._end(process)
            process = None
            raise
        finally:
            self._idle.put(process)
        if done.picture is None:
            kind = ConfigError if "not installed" in done.message else RequestError
            raise kind(done.message, hint=done.hint)
        return done.picture

    def close(self) -> None:
        """End all processes. May be called again."""
        with self._lock:
            self._closed = True
            ended, self._all = list(self._all), set()
        for process in ended:
            self._end(process)

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

    def _ask(self, process: "subprocess.Popen[bytes]", job: bytes) -> Decoded:
        """A timer ends the process when it takes too long, so that reading ends too."""
        if process.stdin is None or process.stdout is None:
            raise CairnError("a decoder has no pipes")
        timer = threading.Timer(self.patience_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, job)
            answer = read_message(process.stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            raise RequestError(
                "the image could not be decoded within the limits of time and memory",
                hint="send a smaller one, or another format",
            )
        return decode_done(answer)

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
