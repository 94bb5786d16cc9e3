"""Stop signals of a run: Ctrl-C, SIGTERM, hangup.

    one process        signal --> event; the loop ends after the current step, with a checkpoint
    several ranks      signal --> parent --SIGTERM--> every rank, which does the same; the parent waits for them
    a second Ctrl-C    ends at once; the newest complete checkpoint stays

Schedulers often signal a whole process group, so a rank may get SIGTERM from them and from its parent: the second one
changes nothing. Signals that the parent ignores (nohup) stay ignored. Knows nothing about training.
"""

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], None]


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The event is set by the first signal; a second Ctrl-C is an ordinary interrupt."""
    event = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    with handling(stop):
        yield event


@contextmanager
def forwarding(ranks: Callable[[], Iterable[int]]) -> Iterator[threading.Event]:
    """The first signal asks all `ranks` (process ids) to stop and sets the event; a second Ctrl-C kills them."""
    stop_requested = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if not stop_requested.is_set():
            stop_requested.set()
            send(ranks(), signal.SIGTERM)
        elif number == signal.SIGINT:
            send(ranks(), signal.SIGKILL)
            raise KeyboardInterrupt

    with handling(stop):
        yield stop_requested


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Install a handler for stop signals in the main thread; does nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def obey_parent() -> None:
    """Signal handling of a rank: only SIGTERM counts, because the parent forwards signals of the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def leave_terminal() -> None:
    """Output to a terminal that was closed is discarded: an error there must not cost the checkpoint."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # `isatty` denies it once it is closed
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def tolerant(log_line: Callable[[str], None]) -> Callable[[str], None]:
    """The same, where a reader that has gone is no reason to end a run."""

    def answer(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the file was closed
            log_line(text)

    return answer
