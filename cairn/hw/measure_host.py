"""Measurements of the host: disk and loopback network.

Writes a few files of random bytes in a temporary folder and removes them; opens one connection on
127.0.0.1 to a child process. Touches nothing else on the disk and nothing beyond this machine. A
disk behind a hypervisor may answer from the host's cache: the cold number is then the host's, and
no program inside can tell.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from cairn.hw.ceilings import Measured, duration, rate
from cairn.hw.loopback import MESSAGE_BYTES, Trip, travel
from cairn.hw.storage import IN_MEMORY, nearest_existing, read_filesystem
from cairn.hw.timing import summarize

Findings = dict[str, Measured | str]  # a ceiling, or the reason why there is none

DISK_KEYS = ("disk_write", "disk_read_cold", "disk_read_warm")
LOOPBACK_KEYS = ("loopback_round_trip", "loopback_throughput")
DISK_FILES = 3  # one sample each
BLOCK_BYTES = 4 << 20  # per system call; large enough that calls do not count


def disk_rates(folder: Path, size_bytes: int) -> Findings:
    """Write with fsync, read past the page cache, read out of the page cache."""
    filesystem = read_filesystem(folder)
    if filesystem.kind in IN_MEMORY:
        return dict.fromkeys(DISK_KEYS, f"{folder} is in memory ({filesystem.kind}), not on a disk")
    needed = 2 * DISK_FILES * size_bytes
    if (filesystem.free_bytes or 0) < needed:
        reason = f"{folder} has {filesystem.free_bytes} bytes free; the test wants {needed}"
        return dict.fromkeys(DISK_KEYS, reason)
    place = nearest_existing(folder)
    write = partial(_write, block=np.random.default_rng().bytes(BLOCK_BYTES))
    with tempfile.TemporaryDirectory(prefix="cairn-calibrate-", dir=place) as scratch:
        files = [Path(scratch) / f"{number}.bin" for number in range(DISK_FILES)]
        how = f"{DISK_FILES} files of {size_bytes >> 20} MiB on {filesystem.kind}"
        return {
            "disk_write": _disk_rate(write, files, size_bytes, f"{how}, fsync included"),
            "disk_read_cold": _cold_rate(files, size_bytes, how),
            "disk_read_warm": _disk_rate(_read, files, size_bytes, f"{how}, from the page cache"),
        }


def loopback_rates(rounds: int, size_bytes: int) -> Findings:
    """A small message there and back, and one direction at full speed, between two processes."""
    trip: Trip = travel(rounds, size_bytes)
    return {
        "loopback_round_trip": duration(
            summarize(trip.round_trips_s), f"{MESSAGE_BYTES} bytes there and back over TCP"
        ),
        "loopback_throughput": rate(
            trip.block_bytes,
            "B/s",
            summarize(trip.blocks_s),
            f"blocks of {trip.block_bytes >> 20} MiB over one TCP connection",
        ),
    }


def _disk_rate(
    act: Callable[[Path, int], None], files: list[Path], size_bytes: int, how: str
) -> Measured:
    seconds = []
    for path in files:
        start = time.perf_counter()
        act(path, size_bytes)
        seconds.append(time.perf_counter() - start)
    return rate(size_bytes, "B/s", summarize(seconds), how)


def _cold_rate(files: list[Path], size_bytes: int, how: str) -> Measured | str:
    if not hasattr(os, "posix_fadvise"):
        return "this system has no posix_fadvise to empty the page cache"
    for path in files:
        if _still_cached(path):
            return "the filesystem keeps the file in memory although it was asked not to"
    return _disk_rate(_read, files, size_bytes, f"{how}, past the page cache")


def _write(path: Path, size_bytes: int, *, block: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())


def _read(path: Path, size_bytes: int) -> None:
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def _still_cached(path: Path) -> bool:
    """Ask the kernel to forget the file, then try a read that must not touch the disk."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) > 0
        except OSError:  # it would have had to wait, or the filesystem does not know such reads
            return False
