"""Where a rank stands while nothing moves: its stack and its last collective, in a small file for whoever ends it.

    heart (a thread of the rank) --no step, no collective for a while--> NODE/stall-3.json --> node watch, leader

Written once for each standstill, taken away when something moves again. A process that is stopped writes nothing, and
neither does one in which native code holds Python's lock: those give no sign of life, and are found by that.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

LEAST_S = 0.5  # a shorter pause is no standstill
MOST_S = 5.0


class StallNote(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    step: int
    collectives: int  # begun
    collective: str  # the last of them, with its number
    waits: bool  # still in it
    stack: str  # of the main thread, as a traceback shows it


class StallWriter:
    """Told now and then how far this rank is; finds out by itself that nothing moves."""

    def __init__(self, path: Path, stuck_s: float) -> None:
        self.path = path
        self.after_s = min(MOST_S, max(LEAST_S, stuck_s / 4))  # well before somebody asks
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
        from cairn.comm.watchdog import last_call

        collective, waits = last_call()
        note = StallNote(
            pid=os.getpid(), step=step, collectives=collectives, collective=collective, waits=waits,
            stack=main_stack(),
        )  # fmt: skip
        fresh = self.path.with_name(f".{self.path.name}")
        fresh.write_bytes(msgspec.json.encode(note))
        fresh.replace(self.path)


def main_stack() -> str:
    """What the main thread does, the innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    lines = traceback.format_stack(frame)
    return "Stack (most recent call last):\n" + "".join(lines).rstrip()


def stall_path(folder: Path, rank: int) -> Path:
    return folder / f"stall-{rank}.json"


def where(collectives: Mapping[int, str], rank: int) -> str:
    """The last collective of that rank, and in which one another waits for it; what is not known is left out."""
    said = f"; its last collective was {collectives[rank]}" if collectives.get(rank) else ""
    others = [other for other, name in collectives.items() if other != rank and name]
    return said + (f"; rank {others[0]} is in {collectives[others[0]]}" if others else "")


def read_note(path: Path, pid: int) -> StallNote | None:
    """What this process has written, if it stands still."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=StallNote)
    except (OSError, msgspec.DecodeError):
        return None
    return note if note.pid == pid else None
