"""Which checkpoints a run has, and which of them can be trusted.

    runs/x/checkpoints/
      step-00000100/  __0_0.distcp .metadata about.json COMPLETE      whole: COMPLETE is written last
      step-00000200/  __0_0.distcp                                    the run died while writing: ignored

COMPLETE lists every file with its size and a checksum for each 64 MiB, so a file that was cut off or damaged later is
told from a good one before anything is loaded. Removing begins with COMPLETE, so half a removal is no checkpoint.
Reads and writes these few files; knows nothing about tensors.
"""

import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from cairn.core.errors import DataError

COMPLETE = "COMPLETE"
ABOUT = "about.json"
PREFIX = "step-"
PASSED_OVER = "passed-over"
CHUNK = 64 << 20


class File(msgspec.Struct, frozen=True):
    size: int
    checks: list[int]  # crc32 of each CHUNK


class Marker(msgspec.Struct, frozen=True):
    step: int
    files: dict[str, File]


def folder_of(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step:08d}"


def steps(root: Path) -> list[int]:
    """Of all step folders, complete or not, oldest first."""
    names = (path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def complete_steps(root: Path) -> list[int]:
    return [step for step in steps(root) if (folder_of(root, step) / COMPLETE).is_file()]


def mark_complete(folder: Path, step: int) -> None:
    """The last thing that is written. The files' own writer has synced them to the disk."""
    names = sorted(path.name for path in folder.iterdir() if path.name != COMPLETE)
    marker = Marker(step, {name: _file(folder / name) for name in names})
    fresh = folder / f".{COMPLETE}"
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(marker))
        file.flush()
        _sync(file.fileno())
    fresh.rename(folder / COMPLETE)


def complaint(folder: Path) -> str | None:
    """Why this checkpoint cannot be used, or None; reads all of it."""
    lacking = lacks(folder)
    if lacking is not None:
        return lacking
    try:
        marker = msgspec.json.decode((folder / COMPLETE).read_bytes(), type=Marker)
        for name, expected in marker.files.items():
            if _checks(folder / name) != expected.checks:
                return f"{name} is damaged: its checksum differs"
    except OSError as error:  # a bad disk, or a run that makes room while somebody else looks
        return f"{error.filename or folder} cannot be read: {error.strerror}"
    return None


def lacks(folder: Path) -> str | None:
    """What is not there, by name and size; None: every file is."""
    try:
        marker = msgspec.json.decode((folder / COMPLETE).read_bytes(), type=Marker)
    except FileNotFoundError:
        return "it has no COMPLETE: the run ended while it was written"
    except (OSError, msgspec.DecodeError) as error:
        return f"its COMPLETE cannot be read: {error}"
    for name, expected in marker.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected.size:
            return f"{name} has {size:,} bytes, {expected.size:,} were written"
    return None


def newest(root: Path, warn: "list[str]") -> Path | None:
    """The newest checkpoint that can be used; what is passed over is told in `warn`.

    None where there is none. If there are some and none can be used, that is an error: a run must not begin again
    from nothing because a disk is bad.
    """
    found = steps(root)
    complete = complete_steps(root)
    for step in reversed(found):
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

    They stay on disk under another name. Under their own one they would count as the newest: good ones would be removed
    for them, and a good copy in memory would be taken for an old one.
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
    """Removes all but the newest `count` complete ones, and unfinished ones older than those."""
    kept = set(complete_steps(root)[-count:])
    gone = [step for step in steps(root) if step not in kept and step < max(kept, default=0)]
    for step in gone:
        remove(folder_of(root, step))
    return gone


def _file(path: Path) -> File:
    return File(path.stat().st_size, _checks(path))


def _checks(path: Path) -> list[int]:
    def check(begin: int) -> int:
        with path.open("rb") as file:
            file.seek(begin)
            return zlib.crc32(file.read(CHUNK))

    begins = range(0, path.stat().st_size, CHUNK)
    if len(begins) < 2:
        return [check(begin) for begin in begins]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(check, begins))


def _sync(descriptor: int) -> None:
    import os

    os.fsync(descriptor)


def listed(root: Path) -> Iterator[str]:
    """For a person: each checkpoint and whether it can be used."""
    for step in steps(root):
        reason = complaint(folder_of(root, step))
        yield f"{folder_of(root, step).name}: {reason or 'complete'}"
