"""Processes that outlive their parents become this process's children, and are waited for here."""

import contextlib
import ctypes
import os
import signal
import time

from cairn.train.recovery.process_state import process_state

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PATIENCE_S = 10.0


def adopt_orphans(adopt: bool) -> None:
    """Set whether orphaned descendants become children of this process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, int(adopt))


def reap(pid: int) -> bool:
    """Return whether this was a child of ours that has ended; it is no zombie any more."""
    with contextlib.suppress(ChildProcessError):  # another one's, as long as that lives
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def end_process(pid: int) -> None:
    """Kills it and waits until it is gone, also if it has another parent; 0 is none."""
    if pid <= 0 or process_state(pid) == "":
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:  # its main thread may be gone while others still end: only this says that all are
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return
        except ChildProcessError:  # another one's child
            if process_state(pid) in ("", "Z"):
                return
        time.sleep(0.005)
