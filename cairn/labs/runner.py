"""Runs one lab from its needs to its verdict, and leaves the process as it was.

    unmet needs ──> skipped          raises, or takes too long ──> failed (the whole traceback is kept)
    run(bench) ──judge──> held | off ──> what it measured goes into machine.json
                             └──> once more: held | off | busy (the machine was disturbed, and the number changed)

Prints nothing and writes no record: the caller does both. A lab that raises has told nothing about this machine's
ceilings, so none of them is kept.
"""

import contextlib
import gc
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from cairn.core.events import span
from cairn.hw.ceilings import Ceilings
from cairn.hw.machine import Machine
from cairn.labs import calibration
from cairn.labs.busy import Watch
from cairn.labs.entry import Entry, Where, failed_entry, measured_entry, skipped_entry
from cairn.labs.lab import Lab, Outcome, Verdict, judge
from cairn.labs.needs import unmet
from cairn.labs.ranks import ranks_prepared
from cairn.labs.workbench import Workbench

LIMIT_S = 180.0  # a lab takes 30 s at most on an idle machine; beyond this it hangs


class LabTimeout(Exception):
    """A lab ran far beyond what labs may take."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What all labs of one command share."""

    machine: Machine
    ceilings: Ceilings
    where: Where
    quick: bool = False
    limit_s: float = LIMIT_S
    log_line: calibration.LogLine = lambda message: None
    settings: Mapping[str, float] = field(default_factory=dict)  # knobs that were set
    watch: Watch | None = None  # asked after an "off" whether the machine was disturbed


def run_lab(
    lab: Lab,
    session: Session,
    report: Callable[[str], None] = lambda label: None,
    guess: float | None = None,
) -> Entry:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    quick, where = session.quick, session.where
    if reasons := unmet(lab.needs, session.machine, session.ceilings.device):
        return skipped_entry(lab, reasons, at=at, quick=quick, where=where)
    if session.watch is not None:
        session.watch.begin()
    began = time.perf_counter()
    try:
        measured = _measured(lab, session, report)
        # Raises where one is nonsense.
        calibration.merge(session.ceilings, measured.outcome.calibrates)
    except Exception:  # noqa: BLE001  a lab is an experiment: its failure is a result, shown whole
        seconds = time.perf_counter() - began
        failure = traceback.format_exc()
        return failed_entry(lab, failure, at=at, seconds=seconds, quick=quick, where=where)
    seconds = time.perf_counter() - began
    learned = calibration.learn(session.ceilings, measured.outcome.calibrates, session.log_line)
    return measured_entry(
        lab,
        measured.outcome,
        measured.verdict,
        at=at,
        seconds=seconds,
        quick=quick,
        where=where,
        calibrated=learned.better,
        guess=guess,
        settings=session.settings,
        busy=measured.busy,
        attempts=measured.attempts,
    )


class _Measured(NamedTuple):
    outcome: Outcome
    verdict: Verdict
    busy: bool = False
    attempts: int = 1


def _measured(lab: Lab, session: Session, report: Callable[[str], None]) -> _Measured:
    """Once, or twice where a check is off: a moment's disturbance does not come again, a wrong claim does."""
    first, watch = _once(lab, session, report), session.watch
    verdict = judge(lab, first)
    if verdict.held:
        return _Measured(first, verdict)
    if watch is not None:
        watch.look()
    second = _once(lab, session, report)
    verdict = judge(lab, second)
    changed = not verdict.held and not _repeats(first, second)
    busy = changed and (session.ceilings.busy or (watch is not None and watch.was_disturbed()))
    return _Measured(second, verdict, busy, attempts=2)


def _once(lab: Lab, session: Session, report: Callable[[str], None]) -> Outcome:
    with (
        span("lab", name=lab.name),
        _alone(),
        _limit(lab.name, session.limit_s),
        tempfile.TemporaryDirectory(prefix=f"cairn-lab-{lab.name}-") as folder,
    ):
        bench = Workbench(
            ceilings=session.ceilings,
            quick=session.quick,
            folder=Path(folder),
            report=report,
            settings=session.settings,
            sizes=lab.sizes,
        )
        return lab.run(bench)


def _repeats(first: Outcome, second: Outcome) -> bool:
    """Whether a check is off by the very same number twice: no load of a machine does that."""
    before = {check.what.en: check.measured for check in first.checks if not check.held}
    return any(
        not check.held and before.get(check.what.en) == check.measured for check in second.checks
    )


def prepare(labs: Sequence[Lab]) -> None:
    """Where several labs share a process, torch is there before the first, so that each can be undone."""
    if len(labs) < 2:
        return
    several = [lab for lab in labs if "2 processes" in lab.needs]
    with ranks_prepared() if len(several) > 1 else contextlib.nullcontext():
        import torch  # noqa: F401


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """The next lab finds torch as this one did: threads, seed, gradients, and no garbage.

    Standard output is the caller's, who may be writing JSON: what a library prints goes to stderr.
    """
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    try:
        if torch is not None:
            torch.manual_seed(0)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        torch = sys.modules.get("torch")
        if torch is not None:
            if threads is not None and torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            torch.set_grad_enabled(True)
        gc.collect()


@contextlib.contextmanager
def _limit(name: str, seconds: float) -> Generator[None]:
    """Raises in the lab when it takes longer; only the main thread of a process can be asked to."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise LabTimeout(f"lab {name} did not end within {seconds:g} s")

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # somebody else's alarm rings later
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others:
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 0.01))
