"""CPU, memory, NUMA nodes and limits of the host.

Reads /proc and /sys below a given root, so that a test can hand it a folder. Where there is no
/proc it asks psutil, and says so when psutil is missing as well. Knows nothing about GPUs,
networks or disks.
"""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from cairn.hw.cgroup import cpu_quota, memory_limit
from cairn.hw.machine import Cpu, CpuCache, HostMemory, NumaNode, ResourceLimits, Unlimited
from cairn.hw.sysfs import parse_range_list, parse_size, read_int, read_text

# What kernels care about: the name we print, and the flag that /proc/cpuinfo shows for it.
FEATURE_FLAGS = {
    "avx2": "avx2",
    "avx512": "avx512f",
    "avx512-vnni": "avx512_vnni",
    "avx512-bf16": "avx512_bf16",
    "avx512-fp16": "avx512_fp16",
    "amx": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-fp16": "amx_fp16",
    "amx-int8": "amx_int8",
    "neon": "asimd",
    "dot": "asimddp",
    "sve": "sve",
    "sve2": "sve2",
    "bf16": "bf16",
    "i8mm": "i8mm",
}

# Arm chips name themselves by number (Main ID Register): implementer, part.
ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1A",
}


def read_cpu(root: Path) -> Cpu:
    info = _cpuinfo(root)
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"))
    sockets, cores = _topology(folders)
    psutil = _psutil() if cores is None else None
    return Cpu(
        model=_cpu_model(info) or platform.processor() or None,
        architecture=platform.machine() or None,
        sockets=sockets,
        cores=cores if psutil is None else psutil.cpu_count(logical=False),
        threads=_threads(root) or len(folders) or os.cpu_count(),
        usable_threads=_usable_threads(),
        quota=cpu_quota(root),
        features=_features(info),
        caches=_caches(root / "sys/devices/system/cpu/cpu0/cache"),
    )


def read_memory(root: Path) -> tuple[HostMemory, list[str]]:
    """The memory of the machine and of the container, and what to know about the answer."""
    sizes = _meminfo(root)
    limit, used = memory_limit(root)
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    notes: list[str] = []
    if total is None:
        psutil = _psutil()
        if psutil is None:
            notes.append(
                "memory is unknown: there is no /proc/meminfo, and psutil is not installed"
            )
        else:
            memory = psutil.virtual_memory()
            total, available = int(memory.total), int(memory.available)
    return HostMemory(
        total_bytes=total,
        available_bytes=available,
        limit_bytes=limit,
        used_bytes=used,
        shm_bytes=_shm_size(root / "dev/shm"),
    ), notes


def read_numa(root: Path) -> list[NumaNode]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s*(\d+ kB)", read_text(folder / "meminfo") or "")
        nodes.append(
            NumaNode(
                node=int(folder.name.removeprefix("node")),
                cpus=parse_range_list(read_text(folder / "cpulist") or ""),
                memory_bytes=parse_size(total[1]) if total else None,
            )
        )
    return sorted(nodes, key=lambda node: node.node)


def read_limits(root: Path) -> ResourceLimits:
    balancing = read_int(root / "proc/sys/kernel/numa_balancing")
    admin_only = re.search(
        r"RmProfilingAdminOnly:\s*(\d)", read_text(root / "proc/driver/nvidia/params") or ""
    )
    return ResourceLimits(
        open_files=_soft_limit("RLIMIT_NOFILE"),
        locked_memory_bytes=_soft_limit("RLIMIT_MEMLOCK"),
        numa_balancing=None if balancing is None else balancing != 0,
        profiling_admin_only=None if admin_only is None else admin_only[1] != "0",
    )


def read_kernel(root: Path) -> str | None:
    return read_text(root / "proc/sys/kernel/osrelease") or platform.release() or None


def read_container(root: Path, environment: Mapping[str, str]) -> str | None:
    """Type of container this process runs in, detected by the files and variables that each runtime creates."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = read_text(root / "proc/1/cgroup") or ""
    marks = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}
    return next((kind for mark, kind in marks.items() if mark in groups), None)


def read_virtual(root: Path) -> bool | None:
    """x86 says so in its flags; elsewhere the firmware's vendor name does, or nothing."""
    flags = _flags(_cpuinfo(root))
    if "hypervisor" in flags:
        return True
    vendor = (read_text(root / "sys/class/dmi/id/sys_vendor") or "").lower()
    if any(name in vendor for name in ("qemu", "amazon ec2", "google", "microsoft", "vmware")):
        return True
    return (
        False if "vme" in flags else None
    )  # "vme" stands for: this is x86 and its flags were read


def _cpuinfo(root: Path) -> dict[str, str]:
    """The block of the first processor; the others repeat it."""
    first, _, _ = (read_text(root / "proc/cpuinfo") or "").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_model(info: Mapping[str, str]) -> str | None:
    arm = ARM_PARTS.get((info.get("CPU implementer", ""), info.get("CPU part", "")))
    return info.get("model name") or arm


def _flags(info: Mapping[str, str]) -> set[str]:
    return set((info.get("flags") or info.get("Features") or "").split())


def _features(info: Mapping[str, str]) -> list[str]:
    flags = _flags(info)
    return [name for name, flag in FEATURE_FLAGS.items() if flag in flags]


def _threads(root: Path) -> int | None:
    online = read_text(root / "sys/devices/system/cpu/online")
    return len(parse_range_list(online)) if online else None


def _topology(folders: list[Path]) -> tuple[int | None, int | None]:
    """Sockets and cores: two threads of one core carry the same pair of numbers."""
    places = {
        (read_int(f / "topology/physical_package_id"), read_int(f / "topology/core_id"))
        for f in folders
        if (f / "topology/core_id").exists()
    }
    return (len({socket for socket, _ in places}), len(places)) if places else (None, None)


def _caches(folder: Path) -> list[CpuCache]:
    caches = []
    for index in folder.glob("index[0-9]*"):
        level, size = read_int(index / "level"), parse_size(read_text(index / "size") or "")
        if level is not None and size is not None:
            kind = read_text(index / "type") or "Unified"
            caches.append(CpuCache(level=level, kind=kind, size_bytes=size))
    return sorted(caches, key=lambda cache: (cache.level, cache.kind))


def _meminfo(root: Path) -> dict[str, int]:
    pairs = (line.partition(":") for line in (read_text(root / "proc/meminfo") or "").splitlines())
    sizes = ((key, parse_size(value)) for key, _, value in pairs)
    return {key: size for key, size in sizes if size is not None}


def _usable_threads() -> int | None:
    if not hasattr(os, "sched_getaffinity"):  # not on macOS
        return None
    return len(os.sched_getaffinity(0))


def _shm_size(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def _soft_limit(name: str) -> int | Unlimited | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _psutil() -> ModuleType | None:
    try:
        import psutil
    except ImportError:
        return None
    return psutil
