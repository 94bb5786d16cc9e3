"""The ledger of wall time for a launched job: kept by rank 0 of each life, in the same files as a supervised run's.

    life 1   Submitted Started Trained Stepped ... |
    life 2                                         | Failed (what the wrappers wrote) Started Trained Stepped ... Ended

No process sees the whole, so each life of rank 0 reads what the one before wrote, and adds how that ended: from the
failures that ranks' wrappers leave in a folder, and from how many ranks are there now. Times are those of the wall
clock, because rank 0 may move to another machine.
"""

import os
import time
from pathlib import Path

from cairn.core.job_ledger import (
    EVENTS,
    FOLDER,
    Ended,
    Failed,
    Paused,
    Started,
    Stepped,
    Submitted,
    Trained,
)
from cairn.core.rank_failure import RankFailure, found_in
from cairn.train.recovery.journal import Journal
from cairn.train.recovery.meeting import Agreement


class LaunchedLedger:
    def __init__(self, run: Path, agreement: Agreement, world: int) -> None:
        attempt = int(os.environ.get("CAIRN_JOB_ATTEMPT", "0") or 0)
        again = (run / FOLDER / EVENTS).exists() and (attempt > 0 or agreement.before > 0)
        self.journal = Journal(run, go_on=again, clock=time.time, every_s=0.0)
        self.waited = 0.0
        self.back_to, now = agreement.back_to, time.time()
        if not self.journal.book.now:
            submitted = _told("CAIRN_JOB_SUBMITTED", now)
            self.journal.note(Submitted(at=min(submitted, now)))
            now = max(submitted, _told("CAIRN_JOB_STARTED", now))  # then its place was there
        else:
            self._tell_end(agreement, world)
        self.journal.note(Started(at=now, step=agreement.back_to))

    def _tell_end(self, agreement: Agreement, world: int) -> None:
        """How the life before ended, as far as anybody has written it down."""
        last, before = self.journal.book.now or time.time(), agreement.before
        if before and world > before:
            self.journal.note(Paused(at=last, cause="grow"))
            return
        failures = [one for one in written_failures() if one.at >= last - 1.0]
        own = min((one for one in failures if one.is_own), key=lambda one: one.at, default=None)
        smaller = bool(before) and world < before
        if smaller or agreement.youngest > last:
            cause, why, rung = "hardware", "a node was lost", "shrink" if smaller else "spare"
        elif own is not None:
            cause, why, rung = own.verdict.cause, own.verdict.why, "heal"
        else:
            cause, why, rung = "killed", "a process ended without a word", "heal"
        found_at = min((one.at for one in failures), default=time.time())
        self.journal.note(
            Failed(
                at=max(found_at, last), since=last, cause=cause, why=why, rung=rung,
                rank=own.rank if own is not None and rung == "heal" else None,
            )
        )  # fmt: skip

    def trained(self, step: int) -> None:
        if step != self.back_to:  # the newest was damaged, and an older one had to do
            self.journal.note(Started(at=time.time(), step=step))
        self.journal.note(Trained(at=time.time()))
        self.journal.write_sums(force=True)

    def stepped(self, step: int, waited: float, safe: int) -> None:
        """`waited`: seconds in this life that training has waited for checkpoints."""
        blocked, self.waited = waited - self.waited, waited
        self.journal.note(Stepped(at=time.time(), step=step, blocked=max(0.0, blocked)))
        self.journal.book.safe(safe)
        self.journal.write_sums()

    def ended(self) -> None:
        self.journal.note(Ended(at=time.time()))
        self.journal.close()


def written_failures() -> list[RankFailure]:
    folder = os.environ.get("CAIRN_JOB_FAILURES")
    if not folder or not Path(folder).is_dir():
        return []
    return found_in(
        line
        for path in Path(folder).glob("*.json")
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def _told(name: str, otherwise: float) -> float:
    """A moment by the wall clock, where whoever looks after the job has said it."""
    return float(os.environ.get(name) or otherwise)
