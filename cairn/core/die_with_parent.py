"""Makes a child process end with its parent, however the parent ended: a killed parent cannot clean up.

Linux only; elsewhere it does nothing. The kernel means the thread that forked: start children from one that stays.
"""

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to send SIGKILL to this process when its parent ends. Called in the child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
