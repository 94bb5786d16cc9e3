"""Calibration: measures the performance ceilings of this machine.

`calibrate` runs one step after another and gathers what they find into `Ceilings`. A step that
this machine cannot do leaves its reason behind instead of a number. Measures the first visible
GPU, or the CPU where there is none; does not know what to do with the numbers (`roofline` does)
and prints nothing.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from cairn.core.events import span
from cairn.hw.ceilings import Ceilings, Measured, identify
from cairn.hw.datasheet import DTYPES
from cairn.hw.machine import Machine
from cairn.hw.measure_device import (
    Unmeasurable,
    copy_rate,
    launch_cost,
    launch_cost_in_graph,
    matmul_rate,
    transfer_rate,
)
from cairn.hw.measure_host import (
    DISK_KEYS,
    LOOPBACK_KEYS,
    Findings,
    disk_rates,
    loopback_rates,
)
from cairn.hw.storage import cache_folder

Progress = Callable[[str, int, int], None]  # what is measured now, steps done, steps in all

MEBI = 1 << 20
GIBI = 1 << 30


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement effort. A longer measurement has a smaller spread and the same median."""

    budget_ms: float  # for each ceiling
    device_bytes: int
    host_bytes: int
    transfer_bytes: int
    disk_bytes: int  # per file
    echoes: int
    loopback_bytes: int


FULL = Effort(
    budget_ms=800,
    device_bytes=2 * GIBI,
    host_bytes=256 * MEBI,
    transfer_bytes=256 * MEBI,
    disk_bytes=64 * MEBI,
    echoes=5000,
    loopback_bytes=512 * MEBI,
)
QUICK = Effort(
    budget_ms=150,
    device_bytes=1 * GIBI,
    host_bytes=128 * MEBI,
    transfer_bytes=64 * MEBI,
    disk_bytes=16 * MEBI,
    echoes=1000,
    loopback_bytes=128 * MEBI,
)


class CalibrationStep(msgspec.Struct, frozen=True):
    label: str
    keys: tuple[str, ...]  # the ceilings that it finds
    run: Callable[[], Findings]


def calibrate(
    machine: Machine,
    *,
    quick: bool = False,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Ceilings:
    """Measure everything; half a minute at most, a few seconds when quick."""
    device, name = choose_device(machine)
    steps = plan_steps(
        device, machine, QUICK if quick else FULL, cache_folder() if folder is None else folder
    )
    findings: Findings = {}
    for done, step in enumerate(steps):
        if progress is not None:
            progress(step.label, done, len(steps))
        with span("calibrate", what=step.label):
            findings |= run_step(step)
    if progress is not None:
        progress("done", len(steps), len(steps))
    return gather(findings, machine, device, name, quick)


def copy_again(ceilings: Ceilings, machine: Machine) -> Ceilings:
    """Measure the memory bandwidth again quickly and keep the higher value."""
    step = _one("memory bandwidth", "copy", _copy_rate, ceilings.device, machine, QUICK)
    found = run_step(step)["copy"]
    stored = 0.0 if ceilings.copy is None else ceilings.copy.value
    if isinstance(found, str) or found.value <= stored:
        return ceilings
    host = found if ceilings.device == "cpu" else ceilings.host_copy
    return msgspec.structs.replace(ceilings, copy=found, host_copy=host)


def choose_device(machine: Machine) -> tuple[str, str]:
    """The torch device of this machine and its name."""
    import torch

    if torch.cuda.is_available():
        return "cuda:0", torch.cuda.get_device_name(0)
    return "cpu", machine.cpu.model or "CPU"


def plan_steps(
    device: str, machine: Machine, effort: Effort, folder: Path
) -> list[CalibrationStep]:
    return [*_device_steps(device, machine, effort), *_host_steps(device, machine, effort, folder)]


def _device_steps(device: str, machine: Machine, effort: Effort) -> list[CalibrationStep]:
    budget = effort.budget_ms
    return [
        _one("memory bandwidth", "copy", _copy_rate, device, machine, effort),
        *(
            _one(f"{dtype} matmul", f"matmul.{dtype}", matmul_rate, device, dtype, budget)
            for dtype in DTYPES
        ),
        _one("kernel launch", "launch", launch_cost, device, budget),
        _one("launch in a graph", "launch_in_graph", launch_cost_in_graph, device, budget),
        *(
            _one(
                f"{direction} {kind}".replace("_", " "),
                f"{direction}_{kind}",
                transfer_rate,
                device,
                direction,
                kind,
                effort.transfer_bytes,
                budget,
            )
            for direction in ("host_to_device", "device_to_host")
            for kind in ("pinned", "pageable")
        ),
    ]


def _host_steps(
    device: str, machine: Machine, effort: Effort, folder: Path
) -> list[CalibrationStep]:
    disk = partial(disk_rates, folder, effort.disk_bytes)
    loopback = partial(loopback_rates, effort.echoes, effort.loopback_bytes)
    steps = [
        CalibrationStep("disk", DISK_KEYS, disk),
        CalibrationStep("loopback network", LOOPBACK_KEYS, loopback),
    ]
    if device == "cpu":  # its own copy is the host's: `gather` notes it
        return steps
    return [_one("host memory", "host_copy", _copy_rate, "cpu", machine, effort), *steps]


def run_step(step: CalibrationStep) -> Findings:
    """Run a step and return its findings. A failure of torch or the system becomes a finding with its reason."""
    try:
        return step.run()
    except Unmeasurable as error:
        reason = str(error)
    except (RuntimeError, OSError) as error:  # torch raises RuntimeError, also when memory is short
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
    return dict.fromkeys(step.keys, reason)


def gather(findings: Findings, machine: Machine, device: str, name: str, quick: bool) -> Ceilings:
    if device == "cpu" and "copy" in findings:
        findings = {**findings, "host_copy": findings["copy"]}
    measured = {key: value for key, value in findings.items() if isinstance(value, Measured)}
    absent = {key: value for key, value in findings.items() if isinstance(value, str)}
    if device == "cpu" and machine.gpus:
        absent["gpu"] = f"torch {machine.versions.torch} cannot use {machine.gpus[0].name}"
    prefix = "matmul."
    bare = Ceilings(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=quick,
        identity=identify(machine),
        device=device,
        device_name=name,
        matmul={k.removeprefix(prefix): v for k, v in measured.items() if k.startswith(prefix)},
        absent=absent,
    )
    rest = {key: value for key, value in measured.items() if not key.startswith(prefix)}
    return msgspec.structs.replace(bare, **rest)


def _one(
    label: str, key: str, call: Callable[..., Measured], *arguments: object
) -> CalibrationStep:
    return CalibrationStep(label, (key,), lambda: {key: call(*arguments)})


def _copy_rate(device: str, machine: Machine, effort: Effort) -> Measured:
    """Buffers several times the last cache, and never more than an eighth of what is free."""
    if device == "cpu":
        wanted = max(effort.host_bytes, 4 * (machine.cpu.last_level_bytes or 0))
        free = machine.memory.free_bytes or 2 * GIBI
    else:
        import torch

        wanted = effort.device_bytes
        free, _ = torch.cuda.mem_get_info(device)
    size = min(wanted, free // 8) // MEBI * MEBI
    return copy_rate(device, size, effort.budget_ms)
