"""The failures that the ranks of a job have reported, and whether the job goes on after them.

    failures/*.json (one for each end, written by `rank`)  --new-->  Report: the failure; why the job is over, if it is

One policy for each cause (`failure`): a mistake of the program is never tried again, memory that ran out twice. Of
ranks that failed together, the first with a reason of its own counts. How often in all is for torch elastic and the
supervisor. Reads files, starts nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from cairn.core.rank_failure import RankFailure, found_in
from cairn.core.restart_policy import POLICIES, RestartHistory, answer

CALM_S = 1800.0  # a job that ran so long has left its last failure behind
UNLIMITED = 1 << 30
ADVICE = {"oom": "; give its role more memory, or its ranks less to do at once"}


class FailureReport(msgspec.Struct, frozen=True):
    failure: RankFailure
    over: str | None = None  # why nothing is tried any more


class FailureReports:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.looked_at: set[Path] = set()
        self.counted: set[str] = set()  # meetings of ranks of which a failure was counted
        self.history, self.last = RestartHistory(limit=UNLIMITED), 0.0

    def new(self) -> Iterator[FailureReport]:
        """Failures that were not reported before, each with what it means; bystanders are left out."""
        for path in sorted(set(self.folder.glob("*.json")) - self.looked_at):
            self.looked_at.add(path)
            for failure in found_in([path.read_text(encoding="utf-8")]):
                if POLICIES[failure.verdict.cause].again == "never":
                    yield FailureReport(failure, "not tried again")
                elif failure.is_own:
                    yield FailureReport(failure, self._count(failure))

    def _count(self, failure: RankFailure) -> str | None:
        together = failure.meeting or f"{failure.node} {failure.at}"  # a program alone meets nobody
        if together in self.counted:
            return None
        self.counted.add(together)
        calm = failure.at - self.last > CALM_S
        before = RestartHistory(limit=UNLIMITED) if calm else self.history
        action, self.history = answer(failure.verdict, before)
        self.last = failure.at
        if action.again != "never":
            return None
        return f"not tried again ({action.why}{ADVICE.get(action.cause, '')})"
