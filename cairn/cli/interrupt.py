"""Ctrl-C while the large libraries are imported, which takes seconds and begins before anything is worth cleaning up.

Their C extensions turn a KeyboardInterrupt into an ImportError, or forget it, and the verb goes on as if it had not
been asked to stop. At any other time Ctrl-C is Python's own KeyboardInterrupt.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LARGE = ("torch", "numpy")


@contextmanager
def leave_while_importing(status: int) -> Iterator[None]:
    """Leaves the process with `status` where Ctrl-C comes during such an import."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        if any(map(_is_importing, LARGE)):
            os._exit(status)
        signal.default_int_handler(number, frame)

    try:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual:  # not where it is ignored, as in the background of a script
            signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not the main thread: Ctrl-C goes elsewhere
        usual = False
    try:
        yield
    finally:
        if usual and signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_importing(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
