"""Performance ceilings of this machine, and whether the stored values are still valid.

The measured ceilings as data, the file `machine.json` that keeps them, and the question whether
the machine has changed since. Measures nothing (`calibrate` does) and needs no torch.

    calibrate ──> Ceilings ──save──> machine.json ──load──> Ceilings ──staleness──> reasons
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from cairn.core.errors import HardwareError
from cairn.hw.machine import Machine
from cairn.hw.storage import cache_folder, nearest_existing
from cairn.hw.timing import CallTiming

SCHEMA = 1  # of machine.json; another number is another format
WRITE_HINT = "name a file with --out, or set CAIRN_CACHE to a folder that you own"

Unit = Literal["B/s", "FLOP/s", "s"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A ceiling: the median, the middle 80% of the runs, and the method."""

    value: float
    unit: Unit
    low: float
    high: float
    runs: int
    how: str


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware that ceilings depend on. There are no serial numbers, so machines of one type are equal."""

    cpu: str | None
    threads: int | None
    gpus: list[str]
    driver: str | None
    torch: str | None


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    measured_at: str  # UTC, ISO 8601
    quick: bool
    identity: Identity
    device: str  # "cuda:0"; "cpu" where the CPU plays the device
    device_name: str
    copy: Measured | None = None  # device memory, bytes read plus bytes written
    matmul: dict[str, Measured] = {}  # by dtype
    launch: Measured | None = None  # one small kernel from Python
    launch_in_graph: Measured | None = None
    host_to_device_pinned: Measured | None = None
    host_to_device_pageable: Measured | None = None
    device_to_host_pinned: Measured | None = None
    device_to_host_pageable: Measured | None = None
    host_copy: Measured | None = None  # host memory, bytes read plus bytes written
    disk_write: Measured | None = None  # fsync included
    disk_read_cold: Measured | None = None
    disk_read_warm: Measured | None = None  # out of the page cache
    loopback_round_trip: Measured | None = None
    loopback_throughput: Measured | None = None
    absent: dict[str, str] = {}  # what could not be measured, and why; "matmul.fp8" for a dtype
    busy: bool = False  # other programs held the cores meanwhile: the true ceilings may be higher


def rate(work: float, unit: Literal["B/s", "FLOP/s"], timing: CallTiming, how: str) -> Measured:
    """Work per second. The slow runs (p90 of time) make the low end."""
    return Measured(
        value=work / timing.median_s,
        unit=unit,
        low=work / timing.p90_s,
        high=work / timing.p10_s,
        runs=timing.runs,
        how=how,
    )


def duration(timing: CallTiming, how: str) -> Measured:
    return Measured(
        value=timing.median_s,
        unit="s",
        low=timing.p10_s,
        high=timing.p90_s,
        runs=timing.runs,
        how=how,
    )


def identify(machine: Machine) -> Identity:
    return Identity(
        cpu=machine.cpu.model,
        threads=machine.cpu.usable_threads or machine.cpu.threads,
        gpus=[gpu.name for gpu in machine.gpus],
        driver=machine.versions.driver,
        torch=machine.versions.torch,
    )


def staleness(ceilings: Ceilings, machine: Machine) -> list[str]:
    """Why these ceilings may not hold here any more; an empty list when nothing has changed."""
    then, now = ceilings.identity, identify(machine)
    shown: dict[str, Callable[[Identity], object]] = {
        "CPU": lambda identity: identity.cpu,
        "CPU threads": lambda identity: identity.threads,
        "GPUs": lambda identity: ", ".join(identity.gpus) or "none",
        "GPU driver": lambda identity: identity.driver,
        "torch": lambda identity: identity.torch,
    }
    return [
        f"{what}: {get(then)} when measured, {get(now)} now"
        for what, get in shown.items()
        if get(then) != get(now)
    ]


def machine_file() -> Path:
    return cache_folder() / "machine.json"


def save(ceilings: Ceilings, path: Path) -> None:
    """Write the file whole or not at all: another process may read it at any time."""
    text = msgspec.json.format(msgspec.json.encode(ceilings), indent=2) + b"\n"
    fresh = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(text)
        fresh.replace(path)
    except OSError as error:
        raise HardwareError(f"cannot write {path}: {error}", hint=WRITE_HINT) from error


def require_writable(path: Path) -> None:
    """Fail now and not after half a minute of measuring."""
    if path.is_dir():
        raise HardwareError(f"cannot write {path}: it is a folder", hint=WRITE_HINT)
    folder = nearest_existing(path.parent)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise HardwareError(f"cannot write {path}: {folder} is not writable", hint=WRITE_HINT)


def load(path: Path | None = None) -> Ceilings:
    """Read the ceilings of this machine, or say how to get them."""
    path = machine_file() if path is None else path
    again = "run `cairn calibrate`"
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise HardwareError(f"no measured ceilings: {path} does not exist", hint=again) from error
    except OSError as error:
        raise HardwareError(f"cannot read {path}: {error}", hint=again) from error
    try:
        ceilings = msgspec.json.decode(text, type=Ceilings)
    except msgspec.DecodeError as error:
        raise HardwareError(f"{path} is damaged: {error}", hint=again) from error
    if ceilings.schema != SCHEMA:
        raise HardwareError(f"{path} has schema {ceilings.schema}, not {SCHEMA}", hint=again)
    return ceilings
