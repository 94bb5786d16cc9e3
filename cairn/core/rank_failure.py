"""Root cause of a failed job: the first rank that failed, its host, its collective and its error text.

A rank's wrapper writes one line about its end into the log, in a form that a program finds again on any engine:

    ::cairn-rank-failed:: {"rank": 2, "host": "n7", "status": 1, "collective": "all_reduce", "words": "Traceback ..."}

When one rank dies the others follow, each with a lost connection: the one that is reported is the first that failed
for a reason of its own.
"""

import re
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cairn.core.exit_cause import Cause, CauseVerdict, ExitEvidence, classify

MARK = "::cairn-rank-failed:: "
LOST = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused|aborted)|Broken pipe|timed out|Timed out|recvBytes|failed to recv"
)
_FRAME = re.compile(r'File "([^"]*)", line \d+, in (\w+)')
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_WRAPPERS = ("wrapper", "func_wrapper", "_coalescing_manager", "wait")
KEPT_LINES = 60
KEPT_CHARACTERS = 2800
ENDED_BY_US = (-15, 143, -2, 130)  # SIGTERM and SIGINT, as a process says it and as a shell does


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The exit of one process of a job."""

    rank: int
    host: str
    node: str = ""
    attempt: int = 0
    meeting: str = ""  # the port of the attempt's own store: the same for all who were in it
    at: float = 0.0
    status: int = 1  # negative: killed by that signal
    collective: str = "none"
    words: str = ""  # its traceback, or the last lines that it wrote
    cause: Cause | None = None  # where it was ended on purpose (`core/end_reason`): for what ...
    why: str = ""  # ... in one line
    step: int | None = None  # that it had done, where that is known
    oom_kills: int = 0  # of the kernel around it, while it ran
    machine: str = ""  # what the engine calls the host, where that is another name

    @property
    def blamed(self) -> str:
        """The node as the engine knows it: what a cordon list holds."""
        return self.machine or self.host

    @property
    def how(self) -> str:
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"

    @property
    def is_own(self) -> bool:
        """Not the loss of a connection to a rank that had gone before, and not our own SIGTERM."""
        if self.cause is not None:
            return True
        if self.status in ENDED_BY_US:
            return False
        return not LOST.search("\n".join(self.words.splitlines()[-4:]))

    @property
    def verdict(self) -> CauseVerdict:
        """Why it ended: a program that refuses its arguments, or is not there, is a mistake of the user."""
        if self.cause is not None:
            return CauseVerdict(self.cause, self.why)
        refused = self.status == 2 and re.search(r"^(error|usage): ", self.words, re.MULTILINE)
        mistake = bool(refused) or self.status in (126, 127)
        killed = self.oom_kills if self.status == -signal.SIGKILL else 0  # else it was another one
        return classify(
            ExitEvidence(status=self.status, words=self.words, user_error=mistake, oom_kills=killed)
        )


def mark(failure: RankFailure) -> str:
    return MARK + msgspec.json.encode(failure).decode()


def found_in(lines: Iterable[str]) -> list[RankFailure]:
    """Every failure that a log tells of."""
    failures = []
    for line in lines:
        _, marked, text = line.partition(MARK)
        if marked:
            try:
                failures.append(msgspec.json.decode(text, type=RankFailure))
            except msgspec.DecodeError:
                continue  # cut off by the end of its process
    return failures


def failures_in(logs: Path) -> list[RankFailure]:
    """Every failure that the logs of a job tell of."""
    failures: list[RankFailure] = []
    for path in sorted(logs.glob("*.log")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            failures += found_in(lines)
    return failures


def first_of(failures: Iterable[RankFailure]) -> RankFailure | None:
    """The first failure of the last attempt that no other caused. A program of one rank has no peers."""
    every = list(failures)
    if not every:
        return None
    last = max(every, key=lambda failure: failure.at)
    latest = [failure for failure in every if failure.meeting == last.meeting]
    if not last.meeting:
        latest = [failure for failure in latest if failure.attempt == last.attempt]
    own = [failure for failure in latest if failure.is_own]
    return min(own or latest, key=lambda failure: failure.at)


def summary(failure: RankFailure) -> str:
    """Describe the failure in one line."""
    where = f"{failure.host} ({failure.node})" if failure.node else failure.host
    if failure.cause is not None:
        return f"rank {failure.rank} on {where}: {failure.cause}{_at(failure)}: {failure.why}"
    inside = f" in {failure.collective}" if failure.collective != "none" else ""
    cause = failure.verdict.cause
    return f"rank {failure.rank} on {where} ended with {failure.how}{inside} ({cause})"


def report(failure: RankFailure, others: int = 0) -> str:
    """The final report: the first failed rank and its last output."""
    where = f"{failure.host} ({failure.node})" if failure.node else failure.host
    followed = f"; {others} others followed" if others else ""
    head = (
        f"rank {failure.rank} on {where} failed with {failure.how} "
        f"(last collective: {failure.collective}){followed}"
    )
    if failure.cause is not None:
        head = f"{summary(failure)} (last collective: {failure.collective}){followed}"
    return f"{head}\n{failure.words.rstrip()}" if failure.words else head


def _at(failure: RankFailure) -> str:
    return "" if failure.step is None else f" at step {failure.step}"


def last_words(lines: list[str]) -> str:
    """The last traceback of the output, or its last lines."""
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    tail = lines[starts[-1] :] if starts else lines[-10:]
    if len(tail) > KEPT_LINES:
        tail = [
            *tail[:2],
            f"  ... {len(tail) - KEPT_LINES} lines left out",
            *tail[2 - KEPT_LINES :],
        ]
    return "\n".join(tail)


def shortened(words: str) -> str:
    """Short enough for one write into a pipe that several ranks share: its beginning and most of its end."""
    if len(words) <= KEPT_CHARACTERS:
        return words
    return f"{words[:100]}\n  ...\n{words[100 - KEPT_CHARACTERS :]}"


def collective_of(words: str) -> str:
    """The function of torch.distributed that was called, from the outside."""
    for path, function in _FRAME.findall(words):
        if path.endswith(_COLLECTIVES) and function not in _WRAPPERS:
            return function
    return "none"
