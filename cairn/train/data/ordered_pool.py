"""Parallel map over units of work on all cores, with results in input order.

    units --> [ worker 0 | worker 1 | ... ] --> answers, in order       at most a few units per worker are in flight

The order does not depend on how many workers there are, and memory is bounded however long the input. A worker
that dies is an error, not a hang. With one worker everything runs in this process.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from cairn.core.errors import CairnError, ConfigError

Unit = TypeVar("Unit")
Answer = TypeVar("Answer")

IN_FLIGHT = 3  # units per worker: one at work, two waiting


def available_cores() -> int:
    """The cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ordered_map(
    make: Callable[..., Callable[[Unit], Answer]],
    arguments: tuple[Any, ...],
    units: Iterable[Unit],
    workers: int,
) -> Iterator[Answer]:
    """`make(*arguments)(unit)` for each unit, in order; every worker makes its function once."""
    if workers < 1:
        raise ConfigError(f"{workers} workers cannot do anything", hint="give --workers 1 or more")
    if workers == 1:
        yield from map(make(*arguments), units)
        return
    # spawn: a fork would copy threads that hold locks, such as those of the tokenizers library
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (make, arguments))
    waiting: deque[Future[Any]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(_work, unit))
            if len(waiting) >= IN_FLIGHT * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise CairnError(
            f"a worker process died: {error}",
            hint="it may have run out of memory: use fewer --workers",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_made: list[Callable[[Any], Any]] = []  # the function of this process, if it is a worker


def _begin(make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer, once
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _made.append(make(*arguments))


def _leave_with_parent() -> None:
    """A parent that is killed cannot say goodbye; its workers must not wait for it for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(unit: Any) -> Any:
    return _made[0](unit)
