"""Is this node fit for work? Measured before a job starts on it, after a failure, and before it is used again.

    measure() -> Vitals --judge--> complaints, each with the number and its limit --> Cordons (core/cordon)

`judge` is pure. A GPU's own errors come from NVML where there is one; without it only the host is looked at. A node
that fails a check is named with the reason, so that the next job does not find out again.
"""

import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from cairn.core.cordon import Cordons


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Minimum resources of a healthy node."""

    free_memory: float = 0.02  # share
    free_disk_bytes: int = 1 << 30
    free_shared_bytes: int = 64 << 20
    load_per_core: float = 16.0
    write_s: float = 5.0  # for a small file with fsync
    gpus: int = 0
    ecc_errors: int = 0  # uncorrected, since the driver started
    gpu_celsius: int = 92


class GpuHealth(msgspec.Struct, frozen=True):
    index: int
    ecc_uncorrected: int = 0
    celsius: int = 0
    retired_pages: int = 0


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    free_memory: float
    free_disk_bytes: int
    free_shared_bytes: int
    load_per_core: float
    write_s: float | None  # None: it could not be written at all
    gpus: list[GpuHealth] | None = []  # None: there is no driver to ask


def judge(vitals: Vitals, limits: HealthLimits = HealthLimits()) -> list[str]:  # noqa: B008
    """Everything that is wrong; an empty list: fit."""
    v, complaints = vitals, []
    if v.write_s is None:
        complaints.append("the disk cannot be written")
    elif v.write_s > limits.write_s:
        complaints.append(
            f"a small file takes {v.write_s:.1f} s to write, at most {limits.write_s} s"
        )
    for name, value, least, unit in (
        ("memory", v.free_memory, limits.free_memory, "of all"),
        ("disk", v.free_disk_bytes, limits.free_disk_bytes, "bytes"),
        ("shared memory", v.free_shared_bytes, limits.free_shared_bytes, "bytes"),
    ):
        if value < least:
            complaints.append(f"{name}: {value:,.3g} {unit} free, at least {least:,.3g}")
    if v.load_per_core > limits.load_per_core:
        complaints.append(f"load {v.load_per_core:.1f} per core, at most {limits.load_per_core}")
    if v.gpus is not None and len(v.gpus) < limits.gpus:
        complaints.append(f"{len(v.gpus)} GPUs answer, {limits.gpus} should")
    return complaints + [word for gpu in v.gpus or [] for word in _of_gpu(gpu, limits)]


def _of_gpu(gpu: GpuHealth, limits: HealthLimits) -> list[str]:
    complaints = []
    if gpu.ecc_uncorrected > limits.ecc_errors:
        complaints.append(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected memory errors")
    if gpu.celsius > limits.gpu_celsius:
        complaints.append(f"GPU {gpu.index}: {gpu.celsius} degrees, at most {limits.gpu_celsius}")
    return complaints


def examine(
    cordons: Cordons,
    vitals: Vitals,
    now: float,
    limits: HealthLimits = HealthLimits(),  # noqa: B008
) -> Cordons:
    """The list with this node on it if it is unfit."""
    complaints = judge(vitals, limits)
    return cordons.cordon(vitals.node, now, "; ".join(complaints)) if complaints else cordons


def fitness(env: Mapping[str, str], folder: Path) -> tuple[list[str], bool]:
    """Problems of this machine found by a starting rank, and whether they prevent the start."""
    how = env.get("CAIRN_JOB_HEALTH", "warn")
    first = env.get("LOCAL_RANK", "0") == "0"  # one for all ranks of a node
    if how == "off" or not first:
        return [], False
    node = env.get("CAIRN_NODE") or "here"
    complaints = judge(
        measure(node, folder), HealthLimits(load_per_core=math.inf)
    )  # it may be our own load
    return complaints, bool(complaints) and how == "refuse"


def measure(node: str, folder: Path) -> Vitals:
    """This machine; `folder`: where its jobs write."""
    shared = Path("/dev/shm")
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    return Vitals(
        node=node,
        free_memory=memory.available / memory.total,
        free_disk_bytes=shutil.disk_usage(folder).free if folder.exists() else 0,
        free_shared_bytes=shutil.disk_usage(shared).free if shared.exists() else 0,
        load_per_core=os.getloadavg()[0] / cores,
        write_s=_write_time(folder),
        gpus=_gpus(),
    )


def _write_time(folder: Path) -> float | None:
    path = folder / f".health-{os.getpid()}"
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _gpus() -> list[GpuHealth] | None:
    """A library that is there and does not answer is a driver that is broken: then no GPU can be used."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return None if getattr(error, "value", None) == missing else []
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(GpuHealth(index, _ecc(pynvml, handle), _celsius(pynvml, handle)))
    return gpus


def _ecc(nvml: object, handle: object) -> int:
    try:
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  a GPU without ECC
        return 0


def _celsius(nvml: object, handle: object) -> int:
    try:
        return int(nvml.nvmlDeviceGetTemperature(handle, 0))  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  a sensor that does not answer
        return 0
