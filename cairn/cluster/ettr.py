"""Report of a job's time: read from the folder of the run, while it runs or after.

    RUN/recovery/ledger.json  --read_ledger-->  one line for `cairn jobs why`, a table, Prometheus text

The supervisor of a training run keeps the ledger and writes that file; see `core/job_ledger` for what each part
means. A job without one has nothing to tell, and that is said.
"""

from pathlib import Path

import msgspec

from cairn.core.job_ledger import PARTS, JobLedger
from cairn.core.job_ledger_files import metrics_text, read_ledger

MEANING = {
    "productive": "steps that stayed",
    "lost": "steps that had to be done again",
    "checkpoint": "training waited for a copy",
    "detect": "something had failed and was not detected yet",
    "restart": "processes started, state was read",
    "queue": "waiting for a place",
}


def why(run: Path, over: str = "") -> str | None:
    """Describe a run in one line: state, productive share, last failure, stragglers; None without a ledger.

    `over`: how the job ended, where its ranks could not say so any more.
    """
    ledger = read_ledger(run)
    if ledger is None:
        return None
    if over and ledger.state not in ("ended", "failed"):
        ledger = msgspec.structs.replace(ledger, state=over)
    return ledger.line()


def rows(ledger: JobLedger) -> list[list[str]]:
    """Part, seconds, share, causes: a table for a page or a terminal."""
    table = []
    for part in PARTS:
        causes = ledger.by_cause.get(part, {})
        named = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in causes.items())
        seconds = ledger.parts[part]
        share = seconds / ledger.wall if ledger.wall else 0.0
        table.append([part, f"{seconds:.2f} s", f"{share:.1%}", named or MEANING[part]])
    return table


def scrape(run: Path) -> str | None:
    """The ledger in Prometheus's text format."""
    ledger = read_ledger(run)
    return None if ledger is None else metrics_text(ledger)
