"""A program at the other end of a pseudo-terminal: type keys, and wait for what it shows. No time is measured.

with Typed([sys.executable, "-m", "cairn", "chat"]) as shell:
    shell.expect("> ")
    shell.type("hello\r")
"""

import errno
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Mapping

PATIENCE_S = 60
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Typed:
    def __init__(
        self, command: list[str], env: Mapping[str, str], size: tuple[int, int] = (80, 24)
    ) -> None:
        """`size`: columns and lines."""
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, size[::-1])
        # A session of its own with this terminal, so that Ctrl-C becomes a signal as in a shell.
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=dict(env),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.seen = ""  # everything
        self._read = 0  # of it, what `expect` has passed

    def __enter__(self) -> "Typed":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        os.close(self._terminal)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def expect(self, text: str) -> str:
        """What was shown up to and with this."""
        ends = time.monotonic() + PATIENCE_S
        while text not in self.seen[self._read :]:
            if time.monotonic() > ends or not self._more():
                raise AssertionError(f"{text!r} never came: {self.seen[self._read :]!r}")
        before, self._read = self._read, self.seen.index(text, self._read) + len(text)
        return self.seen[before : self._read]

    def leave(self) -> int:
        """Wait for the end."""
        while self._more():
            pass
        return self.process.wait(PATIENCE_S)

    def _more(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], PATIENCE_S)
        try:
            data = os.read(self._terminal, 65536) if ready else b""
        except OSError as error:  # Linux says so when the other end is closed
            if error.errno != errno.EIO:
                raise
            data = b""
        self.seen += data.decode("utf-8", "replace")
        return bool(data)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
