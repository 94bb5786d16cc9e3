"""Python's garbage collector held still while something runs that must not be paused, or not be disturbed.

    quiet_collector    for a run: what exists at its beginning is never looked at again (`freeze`)
    held_collector     for a moment: nothing is collected, and nothing else changes

A run of hours collects by hand, when it has time. Not for code that makes cycles without end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_collector() -> Iterator[None]:
    """The collector would otherwise stop the host for up to half a second whenever it likes."""
    gc.collect()
    gc.freeze()
    try:
        with held_collector():
            yield
    finally:
        gc.unfreeze()


@contextmanager
def held_collector() -> Iterator[None]:
    """What a collection ends may do something that is forbidden just now."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
