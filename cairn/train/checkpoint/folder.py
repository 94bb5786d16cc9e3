"""Checkpoint folders of a run, and their validity.

    runs/x/checkpoints/
      step-00000100/  __0_0.distcp .metadata about.json COMPLETE      whole: COMPLETE is written last
      step-00000200/  __0_0.distcp                                    the run died while writing: ignored

COMPLETE lists every file with its size and a checksum for each 64 MiB, so a file that was cut off or damaged later is
distinguished from a good one before anything is loaded. Removing begins with COMPLETE, so half a removal is no
checkpoint. Reads and writes these few files; knows nothing about tensors or ranks (`choose` does).
"""

import contextlib
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from cairn.core.errors import DataError

Item = TypeVar("Item")
COMPLETE = "COMPLETE"
ABOUT = "about.json"
PREFIX = "step-"
METADATA = ".metadata"  # torch's: which tensor lies in which file
PASSED_OVER = "passed-over"
KEPT_ASIDE = 1  # of the checkpoints that were passed over, for a person to look at
VISIBLE_S = 30.0  # for a network file system to show every rank what one rank has written
POLL_S = 0.5
CHUNK = 64 << 20
SHARD = re.compile(rb"__\d+_\d+\.distcp")  # a file of tensors, by the number of its writer


class File(msgspec.Struct, frozen=True):
    size: int
    checks: list[int]  # crc32 of each CHUNK


class Marker(msgspec.Struct, frozen=True):
    step: int
    files: dict[str, File]


def folder_of(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step:08d}"


def steps(root: Path) -> list[int]:
    """Steps of all checkpoint folders, complete or not, oldest first."""
    names = (path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def complete_steps(root: Path) -> list[int]:
    return [step for step in steps(root) if (folder_of(root, step) / COMPLETE).is_file()]


def files_of(folder: Path, rank: int = 0) -> dict[str, File]:
    """The files that this rank has written, with checksums: rank 0 also those that are not tensors."""
    own = f"__{rank}_"
    return {
        path.name: File(path.stat().st_size, _checks(path))
        for path in sorted(folder.iterdir())
        if path.name != COMPLETE
        and (path.name.startswith(own) or (rank == 0 and not SHARD.fullmatch(path.name.encode())))
    }


def mark_complete(
    folder: Path, step: int, files: dict[str, File] | None = None, visible_s: float = VISIBLE_S
) -> None:
    """The last thing that is written. The files' own writer has synced them to the disk.

    `files`: those of all ranks, which have to be visible here within `visible_s`; None where this process has written
    all of them.
    """
    marker = Marker(step, files_of(folder) if files is None else files)
    deadline = time.monotonic() + (0.0 if files is None else visible_s)
    while (missing := _missing(folder, marker)) is not None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if missing is not None:
        raise DataError(
            f"{folder} is not a whole checkpoint: {missing}",
            hint="--out has to be a folder that all ranks share",
        )
    fresh = folder / f".{COMPLETE}"
    write_synced(fresh, msgspec.json.encode(marker))
    fresh.rename(folder / COMPLETE)
    for place in (folder, folder.parent):  # their names, too, before an older checkpoint is removed
        _sync_names(place)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and fsync it, so that it survives a power failure."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complaint(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why this checkpoint cannot be used, or None; reads one of `parts` equal parts of its bytes."""
    lacking = lacks(folder)
    if lacking is not None:
        return lacking
    try:
        files = read_marker(folder).files
        chunks = [
            (name, n) for name, file in sorted(files.items()) for n in range(len(file.checks))
        ]
        mine = chunks[part::parts]
        checks = _mapped(lambda one: _check(folder / one[0], one[1]), mine)
        for (name, number), check in zip(mine, checks, strict=True):
            if check != files[name].checks[number]:
                return f"{name} is damaged: its checksum differs"
    except OSError as error:  # a bad disk, or a run that makes room at the same time
        return f"{error.filename or folder} cannot be read: {error.strerror}"
    return None


def lacks(folder: Path) -> str | None:
    """Describe the missing files of a checkpoint; None if it is complete."""
    try:
        return _missing(folder, read_marker(folder))
    except FileNotFoundError:
        return "it has no COMPLETE: the run ended while it was written"
    except (OSError, msgspec.DecodeError) as error:
        return f"its COMPLETE cannot be read: {error}"


def read_marker(folder: Path) -> Marker:
    return msgspec.json.decode((folder / COMPLETE).read_bytes(), type=Marker)


def _missing(folder: Path, marker: Marker) -> str | None:
    for name, expected in marker.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != expected.size:
            return f"{name} has {size:,} bytes, {expected.size:,} were written"
    for name in _shards(folder):
        if name not in marker.files:
            return f"{name} is missing: {METADATA} names it, {COMPLETE} does not"
    return None


def _shards(folder: Path) -> list[str]:
    """The files of tensors that torch's metadata refers to; read as bytes, so that nothing in it is executed."""
    path = folder / METADATA
    shards = set(SHARD.findall(path.read_bytes())) if path.is_file() else set()
    return sorted(name.decode() for name in shards)


def newest(root: Path, warn: "list[str]") -> Path | None:
    """The newest checkpoint that can be used, for one process; `warn` gets the reasons for those that cannot.

    None where there is none. If there are some and none can be used, that is an error: a run must not begin again
    from nothing because a disk is bad.
    """
    saved = steps(root)
    complete = complete_steps(root)
    for step in reversed(saved):
        reason = complaint(folder_of(root, step))
        if reason is None:
            return folder_of(root, step)
        warn.append(f"passed over {folder_of(root, step).name}: {reason}")
    if complete:
        raise DataError(
            f"none of the {len(complete)} checkpoints in {root} can be used: {'; '.join(warn)}",
            hint="restore them from a copy, or name another folder with --out to begin anew",
        )
    return None


def remove(folder: Path) -> None:
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(root: Path, after: int) -> list[Path]:
    """Checkpoints of later steps than a run has come to: it has passed over them, so they are not to be trusted.

    They get another name, and the newest of them stays (`keep_newest`). Under their own one they would count as the
    newest: good ones would be removed for them, and a good copy in memory would be taken for an old one.
    """
    moved = []
    for step in complete_steps(root):
        if step > after:
            home = folder_of(root, step)
            aside = home.with_name(f"{home.name}.{PASSED_OVER}")
            shutil.rmtree(aside, ignore_errors=True)
            moved.append(home.rename(aside))
    return moved


def keep_newest(root: Path, count: int) -> list[int]:
    """Removes all but the newest `count` complete ones, unfinished ones older than those, and old ones passed over."""
    whole = [step for step in complete_steps(root) if lacks(folder_of(root, step)) is None]
    kept = set(whole[-count:])
    gone = [step for step in steps(root) if step not in kept and step < max(kept, default=0)]
    for step in gone:
        remove(folder_of(root, step))
    for folder in sorted(root.glob(f"{PREFIX}*.{PASSED_OVER}"))[:-KEPT_ASIDE]:
        remove(folder)
    return gone


def _checks(path: Path) -> list[int]:
    return _mapped(lambda number: _check(path, number), range(-(-path.stat().st_size // CHUNK)))


def _check(path: Path, number: int) -> int:
    with path.open("rb") as file:
        file.seek(number * CHUNK)
        return zlib.crc32(file.read(CHUNK))


def _mapped(function: Callable[[Item], int], items: Sequence[Item]) -> list[int]:
    """Map on a few threads; reading and crc32 release the GIL."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, items))


def listed(root: Path) -> Iterator[str]:
    """Describe each checkpoint and whether it can be used."""
    for step in steps(root):
        reason = complaint(folder_of(root, step))
        yield f"{folder_of(root, step).name}: {reason or 'complete'}"
