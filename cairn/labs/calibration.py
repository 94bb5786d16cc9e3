"""Which ceilings do predictions start from, and what do labs add to them?

    machine.json ──load──> usable? ──yes──> Ceilings ──────────────> labs
         ^                    └─no: missing, damaged, stale, busy      │ measured on the way
         │                       └─> quick calibration ──> Ceilings    v
         └──────────────────────────── save <─────────────────────── merge

A ceiling is the best that was ever seen: of two rates the higher, of two durations the shorter. Those of a busy
machine are marked and measured again once it is idle. A process that changes the file holds a lock beside it, so that
two lab runs at once lose nothing. Knows no lab.
"""

import fcntl
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import Ceilings, Measured, load, machine_file, save, staleness
from cairn.hw.machine import Machine
from cairn.labs.busy import is_busy, reading

MATMUL = "matmul."
# What the file keeps beside the ceilings themselves.
NOT_CEILINGS = frozenset(
    {
        "schema",
        "measured_at",
        "quick",
        "identity",
        "device",
        "device_name",
        "matmul",
        "absent",
        "busy",
    }
)

LogLine = Callable[[str], None]
Measure = Callable[[Machine], Ceilings]


class Merged(NamedTuple):
    ceilings: Ceilings
    better: list[str]  # names of the ceilings that rose


def ready(
    machine: Machine, measure: Measure, log_line: LogLine, path: Path | None = None
) -> Ceilings:
    """The ceilings of this machine; measured anew, and said, where the file is of no use."""
    path = machine_file() if path is None else path
    try:
        stored = load(path)
        if (why := _obstacle(stored, machine, path)) is None:
            return stored
    except HardwareError as error:
        why = error.message
    log_line(f"{why}: measuring this machine's ceilings quickly (`cairn calibrate` looks longer)")
    before = reading()
    fresh = measure(machine)
    fresh = msgspec.structs.replace(fresh, busy=before is not None and is_busy(before))
    if fresh.busy:
        log_line(
            "other programs held the cores meanwhile: these ceilings are measured again when they end"
        )
    _keep(fresh, path, log_line)
    return fresh


def _obstacle(stored: Ceilings, machine: Machine, path: Path) -> str | None:
    """Why the kept ceilings should be measured again, now."""
    if reasons := staleness(stored, machine):
        return f"{path} was measured on another machine ({'; '.join(reasons)})"
    if stored.busy and not is_busy():
        return f"{path} was measured while other programs held the cores"
    return None


def learn(
    ceilings: Ceilings,
    measured: Mapping[str, Measured],
    log_line: LogLine,
    path: Path | None = None,
) -> Merged:
    """What a lab measured goes into the file, if it is better than what the file has by now."""
    if not measured:
        return Merged(ceilings, [])
    path = machine_file() if path is None else path
    try:
        with _locked(path):
            try:
                stored = load(path)
            except HardwareError:
                stored = ceilings  # removed or broken meanwhile: these are the ones in use
            if (stored.identity, stored.device) != (ceilings.identity, ceilings.device):
                stored = ceilings
            merged = merge(stored, measured)
            if merged.better:
                save(merged.ceilings, path)
            return merged
    except (OSError, HardwareError) as error:
        log_line(f"the ceilings that were measured are not kept: {error}")
        return merge(ceilings, measured)


def merge(ceilings: Ceilings, found: Mapping[str, Measured]) -> Merged:
    """The better of each: a rate that is higher, a duration that is shorter. `how` stays with its number."""
    single, matmul, absent = {}, dict(ceilings.matmul), dict(ceilings.absent)
    better = []
    for name, fresh in found.items():
        old = _known(ceilings, name)
        _require_sane(name, fresh, old)
        if old is not None and not _beats(fresh, old):
            continue
        better.append(name)
        absent.pop(name, None)
        if name.startswith(MATMUL):
            matmul[name.removeprefix(MATMUL)] = fresh
        else:
            single[name] = fresh
    if "copy" in single and ceilings.device == "cpu":
        single["host_copy"] = single["copy"]  # on a CPU they are the same memory
    return Merged(msgspec.structs.replace(ceilings, matmul=matmul, absent=absent, **single), better)


def _known(ceilings: Ceilings, name: str) -> Measured | None:
    if name.startswith(MATMUL):
        return ceilings.matmul.get(name.removeprefix(MATMUL))
    if name not in Ceilings.__struct_fields__ or name in NOT_CEILINGS:
        raise ValueError(f"machine.json has no ceiling '{name}'")
    return getattr(ceilings, name)


def _require_sane(name: str, fresh: Measured, old: Measured | None) -> None:
    if not (math.isfinite(fresh.value) and fresh.value > 0):
        raise ValueError(f"ceiling {name} is {fresh.value}, which nothing can be")
    if old is not None and fresh.unit != old.unit:
        raise ValueError(f"ceiling {name} is in {old.unit}, not in {fresh.unit}")


def _beats(fresh: Measured, old: Measured) -> bool:
    return fresh.value < old.value if fresh.unit == "s" else fresh.value > old.value


def _keep(ceilings: Ceilings, path: Path, log_line: LogLine) -> None:
    try:
        with _locked(path):
            save(ceilings, path)
    except (OSError, HardwareError) as error:
        log_line(f"these ceilings hold for this run only: {error}")


@contextmanager
def _locked(path: Path) -> Generator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
