"""How far is it, and how long will it take? One line on stderr where a person watches, nothing in a log.

    training  ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌  212/480  0:33 left  loss 2.113

The line is drawn by the thread that reports progress, at most ten times a second and in tens of microseconds: no
second thread runs beside what is measured. Knows nothing about what is counted; needs only the standard library.
"""

import shutil
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Self, TextIO

from cairn.core.units import format_bytes

REDRAW_S = 0.1
WIDTH = 24  # characters of the bar itself
LABEL = 40  # characters of the words behind it, in `progress`
CLEAR = "\r\x1b[K"


class Bar:
    """One line that is drawn over and over. A context manager: at its end the line is removed."""

    def __init__(
        self,
        what: str,
        total: float,
        *,
        done: float = 0,
        in_bytes: bool = False,
        shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done`: where it begins, such as the step of a run that is resumed. `shown`: False never draws."""
        self.what, self.total, self.words = what, total, ""
        self.done = self._first = done
        self._in_bytes, self._clock = in_bytes, clock
        self._stream = sys.stderr if stream is None else stream
        self.shown = shown and self._stream.isatty()
        self._began, self._drawn = clock(), float("-inf")

    def advance(self, count: float = 1, words: str | None = None) -> None:
        self.update(self.done + count, words)

    def update(self, done: float, words: str | None = None, *, now: bool = False) -> None:
        """Set how far it is and what stands behind the bar. `now`: draw even if it was drawn a moment ago."""
        self.done, self.words = done, self.words if words is None else words
        if self.shown and (now or self._clock() - self._drawn >= REDRAW_S):
            self._draw()

    def clear(self) -> None:
        """Remove the line, so that something else can be printed; the next update draws it again."""
        if self.shown:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._drawn = float("-inf")

    def left_s(self) -> float | None:
        """Seconds until the end at the pace so far; None before there is one."""
        moved = self.done - self._first
        if moved <= 0:
            return None
        return (self._clock() - self._began) * max(self.total - self.done, 0) / moved

    def _draw(self) -> None:
        self._drawn = self._clock()
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"{CLEAR}{self.line()[:width]}")
        self._stream.flush()

    def line(self) -> str:
        counted = f"{self._count(self.done)}/{self._count(self.total)}"
        left = self.left_s()
        parts = [self.what, bar(self.done / self.total if self.total else 0.0), counted]
        parts += [f"{clock_time(left)} left"] if left is not None else []
        return "  ".join([*parts, self.words] if self.words else parts)

    def _count(self, value: float) -> str:
        return format_bytes(value) if self._in_bytes else f"{value:,.0f}"

    def __enter__(self) -> Self:
        if self.shown:
            self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()


@contextmanager
def progress(total: int, what: str) -> Generator[Callable[[str], None]]:
    """A bar of `total` steps; call the function with a word about each step that is done."""
    with Bar(what, total) as line:
        yield lambda label: line.update(line.done + 1, label[:LABEL], now=True)


@contextmanager
def byte_progress(total: int, what: str) -> Generator[Callable[[int], None]]:
    """A bar of bytes; call the function with how many have just been read."""
    with Bar(what, total, in_bytes=True) as line:
        yield line.advance


def bar(share: float, width: int = WIDTH) -> str:
    full = round(width * min(max(share, 0.0), 1.0))
    return "━" * full + "╌" * (width - full)


def clock_time(seconds: float) -> str:
    """0:33, 12:05, 1:02:03"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
