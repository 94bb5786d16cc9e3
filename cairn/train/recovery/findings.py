"""Findings of the watches of a launched job: one line each in RUN/recovery/findings.jsonl.

    node watch --append--> findings.jsonl --> rank 0 of this life (stragglers), of the next one (why the last one ended)
                                          --> the leader of the next life (how often which node has failed)

Times are those of the wall clock, because nodes have no other one in common.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from cairn.core.exit_cause import Cause
from cairn.core.job_ledger_files import FOLDER

FINDINGS = "findings.jsonl"


class WatchFinding(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    since: float  # the last moment in which all was well
    what: str  # silence, stuck, late, straggler, straggler over; decision: what a driver has decided about an end
    cause: Cause
    rank: int  # -1: none is to blame
    node: str
    host: str
    step: int
    why: str
    rung: str  # what is done about it
    collective: str = "none"

    @property
    def place(self) -> str:
        """Key for counting strikes: host and node, because a node name may move to another machine."""
        return f"{self.host}/{self.node}"

    @property
    def node_number(self) -> int | None:
        """Index of a node of this machine (`node-1`); None for other names."""
        name, _, number = self.node.rpartition("-")
        return int(number) if name == "node" and number.isdecimal() else None

    @property
    def ends(self) -> bool:
        """Return whether a rank was killed because of the finding."""
        return self.rung not in ("", "tell")


def write_found(run: str | Path, finding: WatchFinding) -> None:
    """Append a finding in one write, so that lines do not interleave; an inaccessible folder is ignored."""
    with contextlib.suppress(OSError):
        folder = Path(run) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / FINDINGS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, msgspec.json.encode(finding) + b"\n")
        finally:
            os.close(descriptor)


def read_found(run: str | Path) -> list[WatchFinding]:
    try:
        lines = (Path(run) / FOLDER / FINDINGS).read_bytes().splitlines()
    except OSError:
        return []
    findings = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # cut off by the end of its writer
            findings.append(msgspec.json.decode(line, type=WatchFinding))
    return findings


def forget_found(run: str | Path) -> None:
    """Delete the findings of an earlier start of the run."""
    with contextlib.suppress(OSError):
        (Path(run) / FOLDER / FINDINGS).unlink(missing_ok=True)
