"""A server of our own for the time of a load test: started, waited for, stopped.

    with started(["random:qwen3-8b", "--dtype", "bfloat16"]) as served:
        served.url, served.ready_s

`ready_s` is what an operator waits: from the start of the process to the first /health that says ok. The server is a
process of its own, like in production, on a free port of loopback. Its output goes to `log_line`, line by line; when it
ends before it is ready, its last lines are the error. Measures nothing else.
"""

import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cairn.core.errors import CairnError, UsageError

READY = re.compile(r" at (http://\S+)$")
PATIENCE_S = 900.0  # large weights come from slow disks
STOP_S = 60.0
POLL_S = 0.05
LAST_LINES = 12
OURS = ("--host", "--port")  # flags that this file sets


class StartedServer(NamedTuple):
    url: str
    ready_s: float
    pid: int


class _Output:
    """Reads what the server says, in a thread, so that it never waits for a reader."""

    def __init__(self, process: "subprocess.Popen[str]", log_line: Callable[[str], None]) -> None:
        self.url: str | None = None
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._process, self._log_line = process, log_line
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.rstrip()
            self.last.append(text)
            self._log_line(text)
            if self.url is None and (match := READY.search(text)):
                self.url = match[1]

    def close(self) -> None:
        """Everything has been said: the process is over."""
        self._thread.join(STOP_S)
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextmanager
def started(
    args: Sequence[str], log_line: Callable[[str], None] = lambda line: None
) -> Generator[StartedServer]:
    """`args` are those of `cairn serve`; the port is chosen here."""
    for argument in args:
        if argument.partition("=")[0] in OURS:
            raise UsageError(
                f"--start has {argument}", hint="the server of a load test takes a free port"
            )
    command = [sys.executable, "-m", "cairn", "serve", *args, "--host", "127.0.0.1", "--port", "0"]
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = _Output(process, log_line)
    try:
        url = _wait(process, output, began)
        yield StartedServer(url, time.perf_counter() - began, process.pid)
    finally:
        _stop(process)
        output.close()


def _wait(process: "subprocess.Popen[str]", output: _Output, began: float) -> str:
    while time.perf_counter() - began < PATIENCE_S:
        if output.url is not None and _healthy(output.url):
            return output.url
        if process.poll() is not None:
            output.close()
            output_lines = "\n".join(output.last) or "(it said nothing)"
            raise CairnError(
                f"the server ended with status {process.returncode} before it was ready:\n{output_lines}",
                hint="try the same arguments with `cairn serve`",
            )
        time.sleep(POLL_S)
    raise CairnError(
        f"the server was not ready after {PATIENCE_S:g} s", hint="start it yourself, and use --url"
    )


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[str]") -> None:
    """Terminate the server, and kill it if it does not exit."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
