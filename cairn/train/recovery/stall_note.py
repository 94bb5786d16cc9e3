"""Stall note: the position of a rank when progress stopped, for the process that ends it.

    rank: `stall_writer` --> NODE/stall-3.json --read_note--> node watch, leader, driver

Reads files and makes words of them; torch is not needed for that.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec


class StallNote(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    step: int
    collectives: int  # begun
    collective: str  # the last of them, with its number
    waits: bool  # still in it
    stack: str  # of the main thread, as a traceback shows it


def stall_path(folder: Path, rank: int) -> Path:
    return folder / f"stall-{rank}.json"


def read_note(path: Path, pid: int) -> StallNote | None:
    """Read the stall note of a process, or None."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=StallNote)
    except (OSError, msgspec.DecodeError):
        return None
    return note if note.pid == pid else None


def where(collectives: Mapping[int, str], rank: int) -> str:
    """The last collective of that rank, and in which one another waits for it; what is not known is left out."""
    text = f"; its last collective was {collectives[rank]}" if collectives.get(rank) else ""
    others = [other for other, name in collectives.items() if other != rank and name]
    return text + (f"; rank {others[0]} is in {collectives[others[0]]}" if others else "")
