"""A rank that does not move writes down where it stands: its stack and its last collective, in a small file.

    heartbeat (a thread of the rank) --no step, no collective for a while--> NODE/stall-3.json     read by `stall_note`

Written once for each standstill, taken away when something moves again. A process that is stopped writes nothing, and
neither does one in which native code holds Python's lock: those give no sign of life, and are found by that.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec

from cairn.comm.watchdog import last_call
from cairn.train.recovery.stall_note import StallNote

LEAST_S = 0.5  # a shorter pause is no standstill
MOST_S = 5.0


class StallWriter:
    """Told now and then how far this rank is; finds out by itself that nothing moves."""

    def __init__(self, path: Path, stuck_s: float) -> None:
        self.path = path
        self.after_s = min(MOST_S, max(LEAST_S, stuck_s / 4))  # well before it is asked for
        self.at: tuple[int, int] = (-1, -1)
        self.since = time.monotonic()
        self.written = False

    def look(self, step: int, collectives: int) -> None:
        now = time.monotonic()
        if (step, collectives) != self.at:
            self.at, self.since = (step, collectives), now
            self.clear()
        elif not self.written and now - self.since >= self.after_s:
            self.written = True
            with contextlib.suppress(OSError):
                self._write(step, collectives)

    def clear(self) -> None:
        if self.written:
            self.written = False
            self.path.unlink(missing_ok=True)

    def _write(self, step: int, collectives: int) -> None:
        collective, waits = last_call()
        note = StallNote(
            pid=os.getpid(),
            step=step,
            collectives=collectives,
            collective=collective,
            waits=waits,
            stack=main_stack(),
        )
        fresh = self.path.with_name(f".{self.path.name}")
        fresh.write_bytes(msgspec.json.encode(note))
        fresh.replace(self.path)


def main_stack() -> str:
    """Stack of the main thread, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    lines = traceback.format_stack(frame)
    return "Stack (most recent call last):\n" + "".join(lines).rstrip()
