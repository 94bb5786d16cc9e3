"""GPU allocation on this machine: GPUs that no other local job holds, all or none.

    STATE/NAME/N/gpus.json      what a job holds, as long as its supervisor lives

Two launches at the same moment take turns (a lock on a file). Knows nothing of programs that Cairn has not started.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cairn.cluster import records
from cairn.cluster.records import JobRecord

HELD = "gpus.json"
LOCK = ".gpus.lock"


def claim(record: JobRecord, count: int, there: int) -> list[int] | str:
    """Their numbers, or why there are not enough now."""
    with _alone():
        holders = held_by_others(record)
        free = [number for number in range(there) if number not in holders]
        if len(free) < count:
            whose = ", ".join(f"'{name}'" for name in sorted(set(holders.values()))) or "nobody"
            return f"waiting for {count} GPUs at once; {len(free)} of {there} are free, the others are held by {whose}"
        (record.folder / HELD).write_bytes(msgspec.json.encode(free[:count]))
        return free[:count]


def release(record: JobRecord) -> None:
    (record.folder / HELD).unlink(missing_ok=True)


def held_by_others(mine: JobRecord) -> dict[int, str]:
    """GPU -> the job that has it; a job whose supervisor was killed holds nothing any more."""
    holders: dict[int, str] = {}
    for other in records.latest():
        if other.engine != "local" or other.folder == mine.folder or not records.supervised(other):
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):
            numbers = msgspec.json.decode((other.folder / HELD).read_bytes(), type=list[int])
            holders |= dict.fromkeys(numbers, other.name)
    return holders


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    path: Path = records.state_folder() / LOCK
    with path.open("w") as lock:  # closing it gives it back
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
