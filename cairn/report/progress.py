"""Progress and ETA: a status line on a terminal, or a line every half minute in a log.

    training  ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌  212/480  0:33 left  loss 2.113
    training 212/480, 0:33 left, loss 2.113

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
LOG_S = (
    30.0  # between two lines where no terminal is, so that what takes minutes shows that it lives
)
WIDTH = 24  # characters of the bar itself
LABEL = 40  # characters of the words behind it, in `progress`
CLEAR = "\r\x1b[K"

Advance = Callable[[str], None]  # a word about the step that is done


class StatusLine:
    """A terminal line that is overwritten; it writes nothing to other streams."""

    def __init__(self, stream: TextIO | None = None, shown: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.shown = shown and self._stream.isatty()

    def show(self, text: str) -> None:
        if self.shown:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"{CLEAR}{text[:width]}")
            self._stream.flush()

    def clear(self) -> None:
        """Remove the line, so that something else can be printed."""
        if self.shown:
            self._stream.write(CLEAR)
            self._stream.flush()


class Bar:
    """Progress bar on a status line. It is a context manager that removes the line at its end.

    Where no terminal is, what is done within LOG_S is done without a word.
    """

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
        self._line = StatusLine(stream, shown)
        self._log = (sys.stderr if stream is None else stream) if shown else None
        self._began, self._drawn = clock(), float("-inf")
        self._logged = self._began
        self._left_s: float | None = None

    @property
    def shown(self) -> bool:
        return self._line.shown

    def advance(self, count: float = 1, words: str | None = None) -> None:
        self.update(self.done + count, words)

    def update(
        self,
        done: float,
        words: str | None = None,
        *,
        left_s: float | None = None,
        now: bool = False,
    ) -> None:
        """Set how far it is and what stands behind the bar.

        `left_s`: seconds until the end, where the caller knows better than the pace so far. `now`: draw even if it
        was drawn a moment ago.
        """
        self.done, self.words = done, self.words if words is None else words
        self._left_s = left_s
        if self.shown and (now or self._clock() - self._drawn >= REDRAW_S):
            self.draw()
        elif not self.shown and self._log is not None and self._clock() - self._logged >= LOG_S:
            self._logged = self._clock()
            print(self.log_line(), file=self._log, flush=True)

    def draw(self) -> None:
        self._drawn = self._clock()
        self._line.show(self.line())

    def clear(self) -> None:
        """Remove the line; the next update draws it again."""
        self._line.clear()
        self._drawn = float("-inf")

    def left_s(self) -> float | None:
        """Seconds until the end, by default at the pace so far; None before there is one."""
        moved = self.done - self._first
        if self._left_s is not None or moved <= 0:
            return self._left_s
        return (self._clock() - self._began) * max(self.total - self.done, 0) / moved

    def line(self) -> str:
        drawn = bar(self.done / self.total if self.total else 0.0)
        return "  ".join([self.what, drawn, self._counted(), *self._rest()])

    def log_line(self) -> str:
        return ", ".join([f"{self.what} {self._counted()}", *self._rest()])

    def _rest(self) -> list[str]:
        left = self.left_s()
        parts = [f"{clock_time(left)} left"] if left is not None else []
        return [*parts, self.words] if self.words else parts

    def _counted(self) -> str:
        if self._in_bytes:
            done, total = (format_bytes(count, "decimal") for count in (self.done, self.total))
            return f"{done}/{total}"
        return f"{self.done:,.0f}/{self.total:,.0f}"

    def __enter__(self) -> Self:
        if self.shown:
            self.draw()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()


class Activity:
    """Says what is being waited for: on one line of a terminal, in a log with a line every half a minute."""

    def __init__(self, shown: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._line, self._shown = StatusLine(self._stream, shown), shown
        self._began, self._logged = time.monotonic(), float("-inf")

    def __call__(self, said: str) -> None:
        now = time.monotonic()
        text = f"{clock_time(now - self._began)}  {said}"
        self._line.show(text)
        if self._shown and not self._line.shown and now - self._logged >= LOG_S:
            self._logged = now
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        self._line.clear()


@contextmanager
def progress(total: int, what: str) -> Generator[Advance]:
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
