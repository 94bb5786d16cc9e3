"""Locations of Cairn's files, and the disks they are on.

`cache_folder` and `hub_folder` name the two places; `read_filesystem` says what lies under a path.
Nothing here creates or removes anything, and nothing here measures: that is `calibrate`.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cairn.hw.machine import Filesystem
from cairn.hw.sysfs import read_int, read_text

# Filesystems that live in memory: a "disk" speed measured there is a memory speed.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """`$CAIRN_CACHE`, else `$XDG_CACHE_HOME/cairn`, else `~/.cache/cairn`."""
    environment = os.environ if environment is None else environment
    if own := environment.get("CAIRN_CACHE"):
        return Path(own).expanduser()
    return _user_cache(environment) / "cairn"


def hub_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Download folder of huggingface_hub: `$HF_HUB_CACHE`, else `$HF_HOME/hub`."""
    environment = os.environ if environment is None else environment
    if own := environment.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    home = environment.get("HF_HOME")
    return (Path(home).expanduser() if home else _user_cache(environment) / "huggingface") / "hub"


def read_filesystem(path: Path, root: Path = Path("/")) -> Filesystem:
    """The filesystem that holds the path, or would hold it: the path need not exist yet."""
    existing = nearest_existing(path)
    try:
        stat = os.statvfs(existing)
    except OSError:
        return Filesystem(path=str(path))
    mount, kind = _mount_of(existing.resolve(), root)
    return Filesystem(
        path=str(path),
        mount=mount,
        kind=kind,
        total_bytes=stat.f_frsize * stat.f_blocks,
        free_bytes=stat.f_frsize * stat.f_bavail,
        rotational=_rotational(existing, root),
    )


def nearest_existing(path: Path) -> Path:
    """The path itself, or the closest folder above it that exists."""
    # os.path.exists, because Path.exists raises where a folder may not be searched.
    steps = (path.absolute(), *path.absolute().parents)
    return next((step for step in steps if os.path.exists(step)), Path("/"))


def _user_cache(environment: Mapping[str, str]) -> Path:
    if configured := environment.get("XDG_CACHE_HOME"):
        return Path(configured).expanduser()
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container may run under a user that has no home
        return Path(tempfile.gettempdir())


def _mount_of(path: Path, root: Path) -> tuple[str | None, str | None]:
    """Mount point and kind: the longest mount above the path, the last one where they stack."""
    best: tuple[str | None, str | None] = (None, None)
    depth = 0
    for line in (read_text(root / "proc/self/mounts") or "").splitlines():
        _, mount, kind = (*line.split(" "), "", "")[:3]
        where = Path(mount.replace("\\040", " "))
        if len(where.parts) >= depth and path.is_relative_to(where):
            best, depth = (str(where), kind), len(where.parts)
    return best


def _rotational(path: Path, root: Path) -> bool | None:
    device = path.stat().st_dev
    block = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    # A partition has no queue of its own: its disk, one folder up, has.
    for folder in (block, block.resolve().parent):
        spins = read_int(folder / "queue/rotational")
        if spins is not None:
            return spins == 1
    return None
