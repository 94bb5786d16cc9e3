"""Python's garbage collector held still while something runs that must not be paused.

What exists at the beginning is never looked at again (`freeze`), and nothing is collected until the end. A run of hours
collects by hand, when it has time. Not for code that makes cycles without end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_collector() -> Iterator[None]:
    """The collector would otherwise stop the host for up to half a second whenever it likes."""
    gc.collect()
    gc.freeze()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        gc.unfreeze()
