"""How far is a load test? One line on a terminal, rewritten a few times a second; nothing in a log.

    8/s poisson  ███████████████-------------  212/480  17 in flight  0:33 left

Costs tens of microseconds, where a bar of rich costs milliseconds: it is drawn in the thread that takes the times.
"""

import shutil
import sys
from typing import TextIO

from cairn.bench.serve_bench import Progress

BAR = 28


class LoadProgress:
    """Call it with each Progress; `clear` removes the line before something is printed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()

    def __call__(self, progress: Progress) -> None:
        if self._shown:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{line(progress)[:width]}")
            self._stream.flush()

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def line(progress: Progress) -> str:
    full = round(BAR * progress.share)
    total = f"/{progress.total}" if progress.total is not None else ""
    left = progress.left_s
    return (
        f"{progress.load}  {'█' * full}{'-' * (BAR - full)}  {progress.ended}{total}"
        f"  {progress.in_flight} in flight  {'' if left is None else clock(left) + ' left'}"
    ).rstrip()


def clock(seconds: float) -> str:
    """0:33, 12:05, 1:02:03"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
