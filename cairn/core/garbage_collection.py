"""Pauses Python's garbage collector around work that it must not interrupt.

    keep_what_is_loaded  for a server: what exists by now stays, and is never looked at again (`freeze`)
    quiet_collector      for a run: the same until its end, and nothing is collected meanwhile
    held_collector       for a moment: nothing is collected, and nothing else changes

A run of hours collects by hand, when it has time. Not for code that makes cycles without end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_what_is_loaded() -> None:
    """Modules and the model stay for as long as the process does: to look at them again and again would hold up every
    answer for a tenth of a second now and then."""
    gc.collect()
    gc.freeze()


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
    """Disable garbage collection in a block, because destructors may do something that is forbidden there.

    Imports are such a moment, too: torch's make 250,000 objects that stay, and to look through them again and
    again is a tenth of the time that they take.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
