"""Makes a child process end with its parent, however the parent ended: a killed parent cannot clean up.

Linux only; elsewhere it does nothing. The kernel means the thread that forked: start children from one that stays.
"""

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on SIGKILL comes when the parent goes. To be called in the child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
