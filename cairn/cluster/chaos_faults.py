"""Breaks things for real: one function per fault, each against a live process or its files.

    kill  stop  slow        signals                           partition            `chaos_network`
    fill-disk               no file may grow any more         corrupt-checkpoint   a byte of the newest one
    flip-bit                one bit in another process's memory, where its weights lie

What this machine does not permit raises NotPermitted, and is reported as skipped with the reason. Knows no training: it
is told process ids, addresses and folders (RUN/recovery/status.json).
"""

import contextlib
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import msgspec

from cairn.cluster.chaos_plan import Fault
from cairn.core.errors import CairnError
from cairn.core.job_ledger_files import FOLDER, STATUS
from cairn.core.units import parse_bytes

PERIOD_S = 0.05  # of a slow process: it runs for a part of this, and stands still for the rest


class NotPermitted(CairnError):
    """This machine does not allow this fault."""


class RankSeen(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    node: int
    phase: str
    step: int
    address: int = 0
    bytes: int = 0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of RUN/recovery/status.json that faults need."""

    life: int
    driver: int
    memories: dict[int, int]
    ranks: list[RankSeen]
    nodes: list[int]

    @property
    def step(self) -> int:
        return min((one.step for one in self.ranks), default=0)

    def training(self) -> bool:
        return bool(self.ranks) and all(one.phase == "training" for one in self.ranks)

    def pids(self) -> list[int]:
        return [self.driver, *self.memories.values(), *(one.pid for one in self.ranks if one.pid)]


def look(run: Path) -> RunStatus | None:
    try:
        return msgspec.json.decode((run / FOLDER / STATUS).read_bytes(), type=RunStatus)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def inject(
    fault: Fault, target: tuple[str, int], state: RunStatus, run: Path, chance: random.Random
) -> str:
    """Breaks it; says what was done. Slow and partition go on in a thread."""
    pids = pids_of(target, state)
    match fault.kind:
        case "kill":
            return _signal(pids, signal.SIGKILL, "killed")
        case "stop":
            return _signal(pids, signal.SIGSTOP, "stopped")
        case "slow":
            threading.Thread(target=slow_down, args=(pids, fault), daemon=True).start()
            return f"{pids} may run {fault.duty:.0%} of the time for {fault.seconds} s"
        case "partition":  # `chaos_network` has the links
            raise NotPermitted("the job has no network of its own that could be cut")
        case "fill-disk":
            return _fill(pids, fault)
        case "corrupt-checkpoint":
            return corrupt_newest(run, chance)
        case "flip-bit":
            return _flip(target, state, chance)


def pids_of(target: tuple[str, int], state: RunStatus) -> list[int]:
    kind, number = target
    if kind == "memory":
        return [state.memories[number]]
    if kind == "memories":  # all of them and a rank: nothing is left to go back to but the disk
        return [*filter(None, state.memories.values()), state.ranks[-1].pid]
    if kind == "node":  # its memory first, as when the power goes
        return [state.memories[number], *(one.pid for one in state.ranks if one.node == number)]
    return [one.pid for one in state.ranks if one.rank == number]


def _signal(pids: list[int], number: signal.Signals, word: str) -> str:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return f"{word} {', '.join(map(str, pids))}"


def slow_down(pids: list[int], fault: Fault) -> None:
    """Slow processes down with SIGSTOP and SIGCONT. Late wake-ups on a busy machine are compensated by longer stops."""
    end = time.monotonic() + fault.seconds
    ran_s = PERIOD_S * fault.duty
    try:
        while time.monotonic() < end:
            _signal(pids, signal.SIGSTOP, "")
            still_s = ran_s * (1 - fault.duty) / fault.duty
            time.sleep(max(0.0, min(still_s, end - time.monotonic())))
            began = time.monotonic()
            _signal(pids, signal.SIGCONT, "")
            time.sleep(PERIOD_S * fault.duty)
            ran_s = time.monotonic() - began
    finally:
        _signal(pids, signal.SIGCONT, "")


def _fill(pids: list[int], fault: Fault) -> str:
    """Simulate a full disk or quota: writes fail when a file would grow beyond the limit."""
    size = parse_bytes(fault.limit)
    for pid in pids:
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        except (PermissionError, OSError) as error:
            raise NotPermitted(f"the limits of process {pid} cannot be set: {error}") from None
    return f"files of {pids} may not grow beyond {fault.limit}"


def corrupt_newest(run: Path, chance: random.Random) -> str:
    """Change a byte in the middle of the newest complete checkpoint."""
    complete = sorted(run.glob("checkpoints/step-*/COMPLETE"))
    if not complete:
        raise NotPermitted(f"{run} has no complete checkpoint to corrupt yet")
    files = sorted(complete[-1].parent.glob("*.distcp"), key=lambda path: path.stat().st_size)
    path = files[-1]
    at = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return f"byte {at} of {path.parent.name}/{path.name} was {byte}"


def _flip(target: tuple[str, int], state: RunStatus, chance: random.Random) -> str:
    """Through /proc/PID/mem, which a parent may write; the bit is one that keeps the number finite."""
    one = next((rank for rank in state.ranks if rank.rank == target[1]), None)
    if one is None or not one.address:
        raise NotPermitted(f"rank {target[1]} has not said where its weights lie")
    word = chance.randrange(one.bytes // 4)
    at = one.address + 4 * word + 2  # the upper part of the fraction of a float32
    try:
        memory = os.open(f"/proc/{one.pid}/mem", os.O_RDWR)
    except OSError as error:
        raise NotPermitted(f"the memory of process {one.pid} cannot be written: {error}") from None
    try:
        byte = os.pread(memory, 1, at)[0]
        os.pwrite(memory, bytes([byte ^ 1 << chance.randrange(6)]), at)
    except OSError as error:
        raise NotPermitted(f"the memory of process {one.pid} cannot be written: {error}") from None
    finally:
        os.close(memory)
    return f"a bit of weight {word} on rank {one.rank}"
