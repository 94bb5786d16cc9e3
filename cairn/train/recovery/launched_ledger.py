"""The ledger of wall time for a launched job: kept by rank 0 of each life, in the same files as the driver's.

    life 1   Submitted Started Trained Stepped ... |
    life 2                                         | Failed (what the wrappers wrote) Started Trained Stepped ... Ended

No process sees the whole, so each life of rank 0 reads what the one before wrote, and adds how that ended: from the
failures that ranks' wrappers leave in a folder, and from how many ranks are there now. Times are those of the wall
clock, because rank 0 may move to another machine.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

from cairn.core.events import instant
from cairn.core.job_events import (
    Ended,
    Failed,
    Noticed,
    Paused,
    Started,
    Stepped,
    Submitted,
    Trained,
)
from cairn.core.job_ledger_files import EVENTS, FOLDER
from cairn.core.rank_failure import RankFailure, found_in
from cairn.train.recovery.findings import WatchFinding, forget_found, read_found
from cairn.train.recovery.journal import EVERY_S, Journal
from cairn.train.recovery.resume_agreement import Agreement
from cairn.train.recovery.status_board import Board


class LaunchedLedger:
    def __init__(self, run: Path, agreement: Agreement, world: int, board: Board) -> None:
        attempt = int(os.environ.get("CAIRN_JOB_ATTEMPT", "0") or 0)
        again = (run / FOLDER / EVENTS).exists() and (attempt > 0 or agreement.before > 0)
        if not again:
            forget_found(run)
        self.journal = Journal(run, go_on=again, clock=time.time, every_s=0.0)
        self.run, self.board, self.waited = run, board, 0.0
        self.dragged = int(board.head["dragged_ns"][0])  # until now, in other lives
        self.findings = int(board.head["findings"][0])
        findings = read_found(run)
        self.known = len(findings)  # of the findings, how many are in the ledger
        self.back_to, now = agreement.back_to, time.time()
        if not self.journal.book.now:
            submitted = _moment("CAIRN_JOB_SUBMITTED", now)
            self.journal.note(Submitted(at=min(submitted, now)))
            now = max(submitted, _moment("CAIRN_JOB_STARTED", now))  # then its place was there
        else:
            self._note_end(agreement, world, findings)
        self.journal.note(Started(at=now, step=agreement.back_to))
        self.lock, self.over = threading.Lock(), threading.Event()
        threading.Thread(target=self._keep_live, name="ledger", daemon=True).start()

    def _keep_live(self) -> None:
        """Also while rank 0 waits in a collective, or restores: what /metrics shows must not stand still."""
        while not self.over.wait(EVERY_S):
            with self.lock, contextlib.suppress(OSError):
                self.journal.write_sums()

    def _note_end(self, agreement: Agreement, world: int, findings: list[WatchFinding]) -> None:
        """How the life before ended, as far as the findings say."""
        last, before = self.journal.book.now or time.time(), agreement.before
        self._note_stragglers([one for one in findings if one.at > last])
        if before and world > before:
            self.journal.note(Paused(at=last, cause="grow"))
            return
        # What was found before that life began is why an earlier one ended, however short ago that was.
        oldest = max(last - 1.0, self.journal.book.started)
        ended = [one for one in findings if one.ends and one.at >= oldest]
        decided = [one for one in ended if one.what == "decision"]
        if ended:
            self._note_found((decided or ended)[0], last)
            return
        failures = [one for one in written_failures() if one.at >= oldest]
        own = min((one for one in failures if one.is_own), key=lambda one: one.at, default=None)
        smaller = bool(before) and world < before
        if smaller or agreement.youngest > last:
            cause, why, rung = "hardware", "a node was lost", "shrink" if smaller else "spare"
        elif own is not None:
            cause, why, rung = own.verdict.cause, own.verdict.why, "heal"
        else:
            cause, why, rung = "killed", "a process ended and reported no error", "heal"
        found_at = min((one.at for one in failures), default=time.time())
        self.journal.note(
            Failed(
                at=max(found_at, last),
                since=last,
                cause=cause,
                why=why,
                rung=rung,
                rank=own.rank if own is not None and rung == "heal" else None,
            )
        )

    def _note_found(self, one: WatchFinding, last: float) -> None:
        """A watch has ended a rank, or the driver has decided about an end: they know why, and at which step."""
        if one.step > self.journal.book.step:
            self.journal.note(Stepped(at=last, step=one.step))
        self.journal.note(
            Failed(
                at=max(one.at, last),
                since=min(max(one.since, last), one.at),
                cause=one.cause,
                rank=one.rank if one.rank >= 0 else None,
                node=one.node_number,
                host=one.host,
                why=f"at step {one.step}, {one.why}",
                rung=one.rung,
            )
        )

    def _read_findings(self) -> list[str]:
        """What the watch of all nodes has noticed since the last step."""
        count = int(self.board.head["findings"][0])
        if count == self.findings:
            return []
        self.findings, findings = count, read_found(self.run)
        before, self.known = self.known, len(findings)
        return self._note_stragglers(findings[before:])

    def _note_stragglers(self, findings: list[WatchFinding]) -> list[str]:
        named = [one for one in findings if one.cause == "straggler" and one.what != "decision"]
        for one in named:
            about = dict(rank=one.rank, host=one.host, step=one.step, why=one.why)
            self.journal.note(Noticed(at=one.at, what=one.what, **about))  # type: ignore[arg-type]
            instant(one.what, **about)
        return [f"{one.what}: rank {one.rank} on {one.host}: {one.why}" for one in named]

    def _dragged(self) -> float:
        """Seconds by which slow ranks made steps longer, that were not noted before."""
        now = int(self.board.head["dragged_ns"][0])
        more, self.dragged = max(0, now - self.dragged), now
        return more / 1e9

    def trained(self, step: int) -> None:
        with self.lock:
            if step != self.back_to:  # the newest was damaged, and an older one had to do
                self.journal.note(Started(at=time.time(), step=step))
            self.journal.note(Trained(at=time.time()))
            self.journal.write_sums(force=True)

    def stepped(self, step: int, waited: float, safe: int) -> list[str]:
        """What there is to say. `waited`: seconds in this life that training has waited for checkpoints."""
        blocked, self.waited = waited - self.waited, waited
        with self.lock:
            news = self._read_findings()
            dragged = self._dragged()
            self.journal.note(
                Stepped(at=time.time(), step=step, blocked=max(0.0, blocked), dragged=dragged)
            )
            self.journal.book.safe(safe)
            self.journal.write_sums()
        return news

    def copies(self, copied: int, doubled: int) -> None:
        """The newest step that memory holds, and that two nodes hold."""
        with self.lock:
            self.journal.book.copied, self.journal.book.doubled = copied, doubled

    def ended(self) -> None:
        self.over.set()
        with self.lock:
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


def _moment(name: str, otherwise: float) -> float:
    """A moment by the wall clock, where the job's supervisor has written it."""
    return float(os.environ.get(name) or otherwise)
