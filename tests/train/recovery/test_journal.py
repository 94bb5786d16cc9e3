"""What a run writes down about itself is never a reason to end it."""

import errno
import os
import time
from pathlib import Path

import pytest

from cairn.core.job_events import Started, Submitted
from cairn.core.job_ledger_files import read_events, read_ledger
from cairn.train.recovery.findings import WatchFinding, write_found
from cairn.train.recovery.journal import Journal
from cairn.train.recovery.launched_ledger import LaunchedLedger
from cairn.train.recovery.resume_agreement import Agreement
from cairn.train.recovery.status_board import Board


@pytest.mark.parametrize("at_the_start", [False, True])
def test_a_full_disk_costs_the_journal_and_not_the_run(tmp_path, monkeypatch, at_the_start):
    said, full = [], [at_the_start]

    def unless_full(function):
        def checked(self, *args, **named):
            if full[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(self, *args, **named)

        return checked

    for name in ("write_bytes", "mkdir", "open"):
        monkeypatch.setattr(Path, name, unless_full(getattr(Path, name)))
    journal = Journal(tmp_path, clock=lambda: 1.0, log_line=said.append)
    journal.note(Submitted(at=0.0))
    full[0] = True
    for _ in range(3):
        journal.write_sums(force=True)
    assert len(said) == 1
    assert "No space left on device; training goes on" in said[0]
    full[0] = False
    journal.note(Started(at=0.5, step=0))
    journal.write_sums(force=True)
    assert read_ledger(tmp_path).wall == 1.0
    journal.close()


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path):
    """Also in the lives behind the next one."""
    for at in (0.0, 1.0, 2.0, 3.0):
        journal = Journal(tmp_path, go_on=at > 0)
        journal.note(Started(at=at, step=int(at)))
        journal.events.write(b'{"type": "Sta')  # it is killed here
        journal.events.close()
    Journal(tmp_path, go_on=True).close()
    assert [event.step for event in read_events(tmp_path)] == [0, 1, 2, 3]


def test_a_life_of_less_than_a_second_has_an_end_of_its_own(tmp_path):
    """Two failures shortly after each other: the second one is not taken for the first again."""
    for life, cause in enumerate(("", "corruption", "hang")):
        if cause:
            now = time.time()
            about = dict(node="node-0", host="", step=2 * life, why="seen", rung="heal")
            found = WatchFinding(
                at=now, since=now, what="decision", cause=cause, rank=life, **about
            )
            write_found(tmp_path, found)
        agreement = Agreement(
            (), "", None, life, back_to=0, before=4 * bool(life), youngest=0.0, leads=True
        )
        ledger = LaunchedLedger(tmp_path, agreement, world=4, board=Board(4, 1))
        ledger.trained(0)
        ledger.stepped(2 * life + 1, 0.0, safe=-1)
        if cause != "hang":
            ledger.over.set()
            ledger.journal.close()
    ledger.ended()
    found = [(incident.cause, incident.rank) for incident in read_ledger(tmp_path).incidents]
    assert found == [("corruption", 1), ("hang", 2)]
