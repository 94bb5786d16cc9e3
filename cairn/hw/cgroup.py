"""CPU and memory limits of the container's control group.

Reads both generations of control groups below a given root. Knows nothing about who set the
limits, and nothing about what the machine has beyond them.
"""

from pathlib import Path, PurePosixPath

from cairn.hw.sysfs import read_int, read_text

# Version 1 writes "no limit" as the largest page-aligned number; no machine has an exbibyte.
NO_LIMIT_BYTES = 1 << 60


def cpu_quota(root: Path) -> float | None:
    """CPUs this process may use at once on average; None when nothing limits it."""
    quotas = [_quota_v2(folder) for folder in _unified(root)]
    quotas += [_quota_v1(folder) for folder in _controller(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(root: Path) -> tuple[int | None, int | None]:
    """The tightest memory limit in bytes and how much of it is used; None when there is none.

    Files that the kernel keeps in memory are counted by the group, and given back when the room is needed: a
    checkpoint that was just read is not used memory.
    """
    limits: list[tuple[int, int | None]] = []
    for folder, limit_file, used_file in _memory_files(root):
        limit = read_int(folder / limit_file)  # "max" is no number: no limit
        if limit is not None and limit < NO_LIMIT_BYTES:
            used = read_int(folder / used_file)
            limits.append((limit, None if used is None else max(0, used - _files_kept(folder))))
    return min(limits, key=lambda pair: pair[0], default=(None, None))


def _memory_files(root: Path) -> list[tuple[Path, str, str]]:
    second = [(folder, "memory.max", "memory.current") for folder in _unified(root)]
    first = [
        (folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder in _controller(root, "memory")
    ]
    return second + first


def _files_kept(folder: Path) -> int:
    """Bytes of files in memory, without /dev/shm, which has no other place to be."""
    counts: dict[str, int] = {}
    for line in (read_text(folder / "memory.stat") or "").splitlines():
        name, _, count = line.partition(" ")
        if count.isascii() and count.isdecimal():
            counts[name] = int(count)
    first = "total_cache" in counts
    kept, shared = ("total_cache", "total_shmem") if first else ("file", "shmem")
    return max(0, counts.get(kept, 0) - counts.get(shared, 0))


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
    if not quota.isdecimal() or not period.isdecimal():  # "max" is no limit
        return None
    return int(quota) / int(period) if int(period) else None


def _quota_v1(folder: Path) -> float | None:
    quota = read_int(folder / "cpu.cfs_quota_us")
    period = read_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _unified(root: Path) -> list[Path]:
    """Folders of version 2 from this process's group up to the top."""
    mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
    mount = next((m for m in mounts if (m / "cgroup.controllers").exists()), None)
    group = _groups(root).get("")
    return _upwards(mount, group) if mount is not None and group is not None else []


def _controller(root: Path, name: str) -> list[Path]:
    """Folders of one version 1 controller from this process's group up to the top."""
    group = _groups(root).get(name)
    return _upwards(root / "sys/fs/cgroup" / name, group) if group is not None else []


def _groups(root: Path) -> dict[str, str]:
    """Controller to group, from lines `4:memory:/a/b`; version 2 is the line without a name."""
    groups: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        groups.update(dict.fromkeys(controllers.split(","), group))
    return groups


def _upwards(mount: Path, group: str) -> list[Path]:
    """A limit anywhere above holds too. A container may not see its own group's folder."""
    own = PurePosixPath(group.lstrip("/"))
    steps = [step for step in (own, *own.parents) if ".." not in step.parts]
    return [mount / step for step in steps if (mount / step).is_dir()] or [mount]
