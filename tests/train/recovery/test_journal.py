"""What a run writes down about itself is never a reason to end it."""

import errno
import os
from pathlib import Path

import pytest

from cairn.core.job_ledger import Started, Submitted, read_ledger
from cairn.train.recovery.journal import Journal


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
