"""Why did a process end? One word from what is known about it, with the evidence in a sentence.

    exit status, signal, last words, what the kernel and the scheduler say   ->   Verdict(cause, why)

    finished     it was done                      network      a peer or a link did not answer
    oom          memory ran out                   preemption   the machine was taken away, politely
    user         an error in what was asked       hang         alive, but nothing moved
    hardware     the device or the disk failed    corruption   replicas disagree
    killed       SIGKILL, the cause is unknown    straggler    far slower than the others, and taken out for that
    unknown      none of these

Pure and table-driven: the first row that matches decides, so the rows stand in order of trust. What is done about a
cause is policy and stands elsewhere (`core/restart_policy`, `train/recovery/ladder`).
"""

import re
import signal
from typing import Literal, NamedTuple

import msgspec

Cause = Literal[
    "finished",
    "oom",
    "user",
    "hardware",
    "network",
    "preemption",
    "hang",
    "straggler",
    "corruption",
    "killed",
    "unknown",
]
CAUSES: tuple[Cause, ...] = Cause.__args__  # type: ignore[attr-defined]
# SIGTERM, as Python and as shells report it; a program that makes an interrupt of it leaves as after Ctrl-C.
PREEMPTED = (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)


class ExitEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about the end of one process; what is not known keeps its default."""

    status: int | None = None  # exit status; negative: the signal that ended it, as Python says
    words: str = ""  # the end of its output or its traceback
    oom_kills: int = 0  # of the kernel in its control group, while it ran
    notice: bool = False  # a scheduler had said that it would be stopped
    silent: bool = False  # it gave no sign of life and was ended for that
    stuck: bool = False  # it was alive, but did not move, and was ended for that
    user_error: bool = False  # it said itself that the mistake is in what was asked
    corrupted: bool = False  # its numbers differ from its replicas'
    node_lost: bool = False  # the whole node went


class CauseVerdict(msgspec.Struct, frozen=True):
    cause: Cause
    why: str


class CauseRule(NamedTuple):
    cause: Cause
    pattern: re.Pattern[str]
    why: str


def _row(cause: Cause, pattern: str, why: str) -> CauseRule:
    return CauseRule(cause, re.compile(pattern, re.IGNORECASE), why)


# In order of trust: what the device says before what a peer noticed, and that before an ordinary exception.
WORDS: tuple[CauseRule, ...] = (
    _row(
        "oom",
        r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY",
        "the GPU's memory ran out",
    ),
    _row(
        "oom",
        r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: .*memory",
        "the host's memory ran out",
    ),
    _row(
        "hardware",
        r"\bXid\b|uncorrectable ECC|ECC error|fallen off the bus",
        "the GPU reported an error",
    ),
    _row(
        "hardware",
        r"CUDA error: (unspecified launch failure|uncorrectable|an illegal instruction)",
        "the GPU failed while it computed",
    ),
    _row(
        "hardware",
        r"Input/output error|Read-only file system|Stale file handle|\bEIO\b",
        "a disk failed",
    ),
    _row("hardware", r"NVLink|NVSwitch", "a link between GPUs failed"),
    _row(
        "network",
        r"Connection (closed|reset|refused|timed out)|Broken pipe|No route to host|Network is unreachable",
        "a connection to another rank was lost",
    ),
    _row(
        "network",
        r"(Watchdog caught|collective operation timeout|NCCL (error|WARN)|ncclRemoteError|ncclSystemError)",
        "a collective did not come to its end",
    ),
    _row(
        "network",
        r"(socket|store|rendezvous).{0,60}time(d )?out|Timed out waiting",
        "another rank did not answer in time",
    ),
    _row(
        "user",
        r"\b(Syntax|Import|ModuleNotFound|Name|Attribute|Key|Index|Type|Value|Assertion|FileNotFound|"
        r"Permission|ZeroDivision|NotImplemented|Config|Usage|Data)Error\b",
        "the program raised an error of its own",
    ),
    _row(
        "user",
        r"device-side assert triggered|index out of bounds",
        "the program indexed outside a tensor",
    ),
)


def classify(evidence: ExitEvidence) -> CauseVerdict:
    """The most trusted sign first: what the node, the kernel and the scheduler say, then the last words."""
    if evidence.corrupted:
        return CauseVerdict("corruption", _last_line(evidence.words) or "replicas disagree")
    if evidence.node_lost:
        return CauseVerdict("hardware", "the whole node went")
    if evidence.silent:
        return CauseVerdict("hang", "no sign of life: the process is stopped or swapped out")
    if evidence.stuck:
        return CauseVerdict("hang", "alive, but no step and no collective")
    if evidence.status == 0:
        return CauseVerdict("finished", "exit status 0")
    if evidence.oom_kills:
        return CauseVerdict("oom", f"the kernel ended it for memory ({evidence.oom_kills} times)")
    if evidence.notice or evidence.status in PREEMPTED:
        return CauseVerdict("preemption", "it was asked to stop (SIGTERM or an interrupt)")
    if evidence.user_error:
        return CauseVerdict("user", _last_line(evidence.words) or "a mistake in what was asked")
    return _by_words(evidence) or _by_signal(evidence)


def _by_words(evidence: ExitEvidence) -> CauseVerdict | None:
    for row in WORDS:
        if row.pattern.search(evidence.words):
            return CauseVerdict(row.cause, f"{row.why}: {_last_line(evidence.words)}")
    return None


def _by_signal(evidence: ExitEvidence) -> CauseVerdict:
    status = evidence.status
    if status is None:
        return CauseVerdict("unknown", "nothing is known about its end")
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return CauseVerdict("killed", "ended by SIGKILL, cause unknown")
    if status in (-signal.SIGBUS, 128 + signal.SIGBUS):
        return CauseVerdict("hardware", "SIGBUS: memory or a mapped file could not be read")
    if status in (-signal.SIGSEGV, -signal.SIGILL, -signal.SIGFPE, -signal.SIGABRT):
        return CauseVerdict("user", f"{signal.Signals(-status).name}: native code went wrong")
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return CauseVerdict("unknown", f"{how}; {_last_line(evidence.words) or 'no last words'}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
