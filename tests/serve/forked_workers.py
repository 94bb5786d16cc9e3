"""Workers of an engine by fork: torch is imported already, so that a test costs tenths of a second.

    EngineClient(config, spawn=forked(lambda: hang_at_step(5)))

The child runs the worker's own `main` on a standard input of its own; what is passed to `forked` is called in it
first, and may break things on purpose.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

from cairn.serve.engine import worker
from cairn.serve.engine.messages import Boot, encode
from cairn.serve.engine.process import Spawn


class ForkedProcess:
    """As much of `subprocess.Popen` as a group of workers uses."""

    def __init__(self, boot: Boot, prepare: Callable[[Boot], None]) -> None:
        self.returncode: int | None = None
        inner, outer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
            self.pid = os.fork()
        if self.pid == 0:
            os.close(outer)
            _be_a_worker(inner, boot, prepare)
        os.close(inner)
        self.stdin = os.fdopen(outer, "wb")
        encoded = encode(boot)
        self.stdin.write(len(encoded).to_bytes(4, "little") + encoded)
        self.stdin.flush()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(prepare: Callable[[Boot], None] = lambda boot: None) -> Spawn:
    return lambda boot: ForkedProcess(boot, prepare)  # type: ignore[return-value]


def _be_a_worker(stdin: int, boot: Boot, prepare: Callable[[Boot], None]) -> None:
    try:
        os.dup2(stdin, 0)
        sys.stdin = os.fdopen(0, "r")
        prepare(boot)
        worker.main()
    finally:
        os._exit(99)
