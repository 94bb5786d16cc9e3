"""What collecting the suite leaves in memory is never looked at again by Python's garbage collector.

    collection of the tests -> 1,000,000 objects (modules, items) -> frozen, for as long as the process lives

A look at all of them takes 0.7 s of CPU time, and 0.9 s in a forked rank, which also copies their pages; the trainer,
the server and the benchmarks look once at every start. They also freeze and release objects of their own, which has no
effect in the process of the tests: a release would let go of all that is frozen. Programs that tests start do it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_freeze, _unfreeze = gc.freeze, gc.unfreeze


def keep() -> None:
    """Freezes what there is, for good."""
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


@contextmanager
def real_collector() -> Iterator[None]:
    """Nothing is frozen, and everything works as Python has it: for tests of freezing itself."""
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    _unfreeze()
    try:
        yield
    finally:
        keep()
