"""Runs a job, breaks it by a plan, and says what that has cost.

    unbroken run --losses-----------------------------.
    the same job, with faults --losses, ledger--> Report: found after? recovered after? steps lost? same losses?

The job is a command line, started like any other; it writes RUN/recovery/ while it lives (`core/job_ledger`), and that
is all that is looked at. Knows nothing of how training recovers.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cairn.cluster.chaos_faults import NotPermitted, RunStatus, inject, look
from cairn.cluster.chaos_network import ChaosNetwork
from cairn.cluster.chaos_plan import QUIET, ChaosPlan, Due, schedule, victim
from cairn.core.die_with_parent import die_with_parent
from cairn.core.errors import CairnError, ConfigError, DataError
from cairn.core.job_events import AnyEvent, Failed, Noticed, Trained
from cairn.core.job_ledger import JobLedger
from cairn.core.job_ledger_files import read_events, read_ledger

POLL_S = 0.02
OVER = "the job was over before this step"
NEAR = 0.02  # nats: what another order of the same sums may make of a loss
NOTICE_S = 60.0  # within which a fault that must be noticed is


class FaultOutcome(msgspec.Struct, kw_only=True):
    """An injected fault and its outcome; times are relative to the injection."""

    kind: str
    target: str
    step: int
    what: str = ""
    skipped: str = ""  # why it could not be done here
    at: float = 0.0
    found_s: float | None = None
    recovered_s: float | None = None
    found_step: int | None = None
    steps_lost: int | None = None
    cause: str = ""
    rung: str = ""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    plan: str
    fine: bool
    complaints: list[str]
    faults: list[FaultOutcome]
    steps: int
    steps_lost: int
    same_losses: bool | None  # None: not compared
    worst_difference: float | None
    ledger: JobLedger | None
    orphans: list[int]
    exit_status: int
    seconds: float
    unbroken_seconds: float | None
    folder: str
    said: str = ""  # the last lines of a job that failed


LogLine = Callable[[str], None]


class ChaosJob(Protocol):
    """A running job; a subprocess is one."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[ChaosPlan, Path, dict[str, str]], ChaosJob]


def run_chaos(
    plan: ChaosPlan, folder: Path, log_line: LogLine = print, start: Start | None = None
) -> ChaosReport:
    """`start`: how the job is started, with its folder and more environment; by default as a process."""
    start = start or start_process
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / name).exists() for name in ("broken", "unbroken")):
        raise DataError(f"{folder} holds an earlier run", hint="name another folder with --out")
    unbroken = None
    if plan.compare:
        log_line("the job without faults, to compare with")
        began = time.monotonic()
        process = start(plan, folder / "unbroken", {})
        try:
            status = _wait(process, plan.timeout_s)
        finally:  # an interrupted plan leaves no job behind
            _end(process)
        if status:
            raise CairnError(
                f"the job fails without any fault: exit status {status}",
                hint=f"its last lines:\n{last_lines(folder / 'unbroken.txt')}",
            )
        unbroken = time.monotonic() - began
    return _broken(plan, folder, unbroken, log_line, start)


def _broken(
    plan: ChaosPlan, folder: Path, unbroken: float | None, log_line: LogLine, start: Start
) -> ChaosReport:
    run = folder / "broken"
    wants_network = any(fault.kind == "partition" for fault in plan.faults)
    began = time.monotonic()
    with ChaosNetwork(wants_network) as network:
        process = start(plan, run, network.environment())
        chaos = _Chaos(plan, run, process, network, log_line)
        try:
            chaos.break_things()
            status = _wait(process, max(1.0, plan.timeout_s - (time.monotonic() - began)))
        finally:
            _end(process)
    seconds = time.monotonic() - began
    orphans = _orphans(chaos.pids)
    ledger = read_ledger(run)
    chaos.match(read_events(run))
    same, worst = _compare(folder) if plan.compare else (None, None)
    report = ChaosReport(
        plan=plan.name,
        fine=True,
        complaints=[],
        faults=chaos.happened,
        steps=ledger.steps if ledger else 0,
        steps_lost=sum(one.steps_lost or 0 for one in chaos.happened),
        same_losses=same,
        worst_difference=worst,
        ledger=ledger,
        orphans=orphans,
        exit_status=status,
        seconds=seconds,
        unbroken_seconds=unbroken,
        folder=str(folder),
        said=last_lines(run.with_suffix(".txt")) if status else "",
    )
    complaints = complaints_of(report, plan)
    return msgspec.structs.replace(report, complaints=complaints, fine=not complaints)


class _Chaos:
    """Waits for each fault's step, breaks, and waits until the run is back."""

    def __init__(
        self,
        plan: ChaosPlan,
        run: Path,
        process: ChaosJob,
        network: ChaosNetwork,
        log_line: LogLine,
    ) -> None:
        self.plan, self.run, self.process, self.network, self.log_line = (
            plan,
            run,
            process,
            network,
            log_line,
        )
        self.chance = random.Random(plan.seed + 1)
        self.happened: list[FaultOutcome] = []
        self.pids: set[int] = {process.pid}
        self.deadline = time.monotonic() + plan.timeout_s

    def break_things(self) -> None:
        for due in schedule(self.plan):
            state = self._until(
                lambda state, step=due.step: state.training() and state.step >= step
            )
            if state is None:
                missing = FaultOutcome(kind=due.fault.kind, target=due.fault.target, step=due.step)
                missing.skipped = OVER
                self.happened.append(missing)
                continue
            self._break(due, state)

    def _break(self, due: Due, state: RunStatus) -> None:
        fault = due.fault
        target = victim(fault.target, self.chance, len(state.ranks), len(state.nodes))
        one = FaultOutcome(kind=fault.kind, target=" ".join(map(str, target)), step=state.step)
        before = state.life
        one.at = time.time()  # as in the events of the run
        try:
            cut = self.network.inject(fault, target)
            one.what = cut or inject(fault, target, state, self.run, self.chance)
        except NotPermitted as error:
            one.skipped = error.message
        self.happened.append(one)
        self.log_line(f"step {state.step}: {fault.kind} {one.target}: {one.skipped or one.what}")
        if one.skipped or fault.kind in QUIET or target[0] == "memory":
            time.sleep(0.2)  # let it be seen
            return
        limit = time.monotonic() + NOTICE_S
        self._until(
            lambda state: (state.life > before and state.training()) or time.monotonic() > limit
        )

    def _until(self, ready: Callable[[RunStatus], bool]) -> RunStatus | None:
        """Wait for a status; None if the job ends first."""
        while self.process.poll() is None and time.monotonic() < self.deadline:
            state = look(self.run)
            if state is not None:
                self.pids.update(state.pids())
                if ready(state):
                    return state
            time.sleep(POLL_S)
        return None

    def match(self, events: list[AnyEvent]) -> None:
        """Match each fault with the first failure recorded after it."""
        failures = [(n, event) for n, event in enumerate(events) if isinstance(event, Failed)]
        ledger = read_ledger(self.run)
        incidents = list(ledger.incidents) if ledger else []
        for one in self.happened:
            if one.kind == "slow":
                self._notice(one, events)
            if one.skipped or one.target.startswith("memory ") or one.kind in QUIET:
                continue
            for place, (number, event) in enumerate(failures):
                if event.at >= one.at:
                    self._describe(one, event, events[number:], incidents[place])
                    failures, incidents = failures[place + 1 :], incidents[place + 1 :]
                    break

    def _notice(self, one: FaultOutcome, events: list[AnyEvent]) -> None:
        noticed = (event for event in events if isinstance(event, Noticed) and event.at >= one.at)
        first = next((event for event in noticed if one.target == f"rank {event.rank}"), None)
        if first is not None:
            one.found_s, one.cause = first.at - one.at, first.what

    def _describe(
        self, one: FaultOutcome, event: Failed, later: list[AnyEvent], incident: Any
    ) -> None:
        one.found_s = event.at - one.at
        one.cause, one.rung = event.cause, event.rung
        one.found_step, one.steps_lost = incident.step, incident.steps_lost
        again = next((other for other in later if isinstance(other, Trained)), None)
        if again is not None:
            one.recovered_s = again.at - one.at


def complaints_of(report: ChaosReport, plan: ChaosPlan) -> list[str]:
    """Every promise that was not kept."""
    complaints = []
    if report.faults and all(one.skipped == OVER for one in report.faults):
        why = "" if report.ledger else ", or it never said where it is (--recovery.on does)"
        complaints.append(
            f"nothing was broken: the job was over before the first fault was due{why}"
        )
    if report.exit_status:
        complaints.append(f"the job ended with status {report.exit_status}")
    if report.orphans:
        complaints.append(f"processes are left: {report.orphans}")
    off = report.worst_difference
    if report.same_losses is False and (plan.exact or off is None or off > NEAR):
        complaints.append(f"the losses differ by up to {off}")
    for one in report.faults:
        name = f"{one.kind} {one.target} at step {one.step}"
        silent = one.kind in QUIET or one.target.startswith("memory ")
        if one.skipped:
            continue
        if one.found_s is None and not silent:
            complaints.append(f"{name} was never found")
        for value, most, what in (
            (one.steps_lost, plan.most_steps_lost, "steps lost"),
            (one.found_s, plan.most_detect_s, "seconds until found"),
            (one.recovered_s, plan.most_recovery_s, "seconds until recovered"),
        ):
            if value is not None and most is not None and value > most:
                complaints.append(f"{name}: {value:.3g} {what}, {most:.3g} are promised")
    return complaints


def last_lines(path: Path, count: int = 5) -> str:
    """Last lines of a job's output; its folder may have been removed."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) or "(nothing)"
    except OSError:
        return "(nothing)"


# -- the job as a process -------------------------------------------------------------------------------


def start_process(plan: ChaosPlan, run: Path, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a run whose output goes to a file next to its folder."""
    words = [sys.executable, "-m", "cairn"] if plan.argv[0] == "cairn" else [plan.argv[0]]
    argv = [*words, *plan.argv[1:], "--out", str(run)]
    try:
        with run.with_suffix(".txt").open("wb") as out:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | extra,
                preexec_fn=die_with_parent,
            )
    except OSError as error:
        raise ConfigError(
            f"plan '{plan.name}' starts {argv[0]}: {(error.strerror or str(error)).lower()}",
            hint='argv = ["cairn", "train", "{here}/tiny.toml"]',
        ) from None


def _wait(process: ChaosJob, seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return 124


def _end(process: ChaosJob) -> None:
    if process.poll() is None:
        process.kill()  # the kernel ends what it has started
        process.wait(60)


def _orphans(pids: set[int], patience_s: float = 5.0) -> list[int]:
    deadline = time.monotonic() + patience_s
    while True:
        left = sorted(pid for pid in pids if pid > 0 and _lives(pid))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- what it left behind --------------------------------------------------------------------------------


def _losses(run: Path) -> dict[int, tuple[float | None, float | None]]:
    path = run / "log.jsonl"
    rows = (
        [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        if path.exists()
        else []
    )
    return {row["step"]: (row["loss"], row["norm"]) for row in rows}


def _compare(folder: Path) -> tuple[bool, float | None]:
    """Compare all logged steps: whether loss and norm are equal, and the largest difference of the loss."""
    one, other = _losses(folder / "unbroken"), _losses(folder / "broken")
    both = [(one[step][0], other[step][0]) for step in one.keys() & other.keys()]
    worst = max((abs(a - b) for a, b in both if a is not None and b is not None), default=None)
    return one == other, worst
