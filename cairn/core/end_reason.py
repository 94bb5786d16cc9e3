"""Why a process was ended on purpose: written by the process that ends it, read by the one that waits for it.

    watcher --write (cause, why)--> $CAIRN_RANK_END_REASON of the process, SIGKILL
    wrapper (`cluster.rank`) --wait: signal 9--> read --> one line in the log that says "hang", not "killed"

The path stands in the environment of the process that may be ended, which /proc shows to processes of the same user: so
the two need to know nothing else of each other. Written whole or not at all.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from cairn.core.exit_cause import Cause

VARIABLE = "CAIRN_RANK_END_REASON"


class EndReason(msgspec.Struct, frozen=True, kw_only=True):
    cause: Cause
    why: str
    step: int | None = None  # the last one that it had done
    collective: str = "none"  # that it had begun last
    words: str = ""  # where it was: its stack


def write_end_reason(pid: int, reason: EndReason) -> bool:
    """Write the reason before the process is ended; returns False if nobody will read it."""
    path = path_of(pid)
    if path is None:
        return False
    with contextlib.suppress(OSError):
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(reason))
        fresh.replace(path)
        return True
    return False


def read_end_reason(path: str | Path) -> EndReason | None:
    """And takes it away: it is told once."""
    try:
        text = Path(path).read_bytes()
        Path(path).unlink()
        return msgspec.json.decode(text, type=EndReason)
    except (OSError, msgspec.DecodeError):
        return None


def path_of(pid: int) -> Path | None:
    """The file for the end reason of a process, from the environment it was started with."""
    try:
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = f"{VARIABLE}=".encode()
    given = next((word.removeprefix(start) for word in env if word.startswith(start)), b"")
    return Path(os.fsdecode(given)) if given else None
