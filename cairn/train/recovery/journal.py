"""Journal of a run with recovery, written under RUN/recovery/ for other processes.

    ledger.json    where the wall time went (`core/job_ledger.JobLedger`); `cairn jobs why` and the report read it
    metrics.prom   the same as Prometheus text
    events.jsonl   what happened and when, for the next life of rank 0
    status.json    who runs where, at which step: process ids, nodes, phases; fault injection reads it

Each file is replaced whole. A disk that is full costs these files, never the run: it is reported once. Knows files and
the ledger, no processes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from cairn.core.job_events import AnyEvent, Stepped
from cairn.core.job_ledger import Book, JobLedger
from cairn.core.job_ledger_files import EVENTS, FOLDER, STATUS, read_events, write_ledger
from cairn.train.parallel.layout import Layout

EVERY_S = 0.5  # between two writings of the ledger


class RankStatus(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    node: int
    phase: str
    step: int
    address: int = 0  # of a large tensor of its state
    bytes: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks and nodes of a run on one machine."""

    life: int  # how often the ranks were started before
    layout: Layout
    nodes: list[int]
    strikes: dict[int, int]
    failures: int
    cordoned: dict[int, str]  # node -> why
    driver: int  # process ids
    memories: dict[int, int]
    ranks: list[RankStatus]
    doubled: int  # the newest step that two nodes hold of every rank


class Journal:
    def __init__(
        self,
        run: Path,
        go_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
        log_line: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`go_on`: after an earlier life of the same run; otherwise what an earlier run wrote is begun anew.

        `every_s`: steps that end sooner after each other are not all written down.
        """
        self.clock, self.every_s, self.log_line = clock, every_s, log_line
        self.run, self.folder = run, run / FOLDER
        self.book = Book()
        self.lost = False  # the last write failed
        self.written = 0.0
        self.step_written_at = 0.0
        self.unwritten: Stepped | None = None  # the last step, while it is not in the file
        for event in read_events(run) if go_on else ():
            self.book.take(event)
        self.events: BinaryIO | None = None
        with self._tolerant():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.events = (self.folder / EVENTS).open("ab" if go_on else "wb", buffering=0)
            # The writer before may have been ended within its last line.
            if self.events.tell() and not (self.folder / EVENTS).read_bytes().endswith(b"\n"):
                self.events.write(b"\n")

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A write that fails is reported, once until one works again."""
        try:
            yield
            self.lost = False
        except OSError as error:
            if not self.lost:
                self.log_line(
                    f"warning: {self.folder} is not up to date: {error.strerror or error}; "
                    "training goes on"
                )
            self.lost = True

    def _append(self, event: AnyEvent) -> None:
        with self._tolerant():
            if self.events is None:  # the disk had no room for it before
                self.events = (self.folder / EVENTS).open("ab", buffering=0)
            self.events.write(_line(event))

    def note(self, event: AnyEvent) -> None:
        """Counts it; and writes it down, steps only now and then."""
        self.book.take(event)
        if isinstance(event, Stepped) and event.at - self.step_written_at < self.every_s:
            self.unwritten = event
            return
        if self.unwritten is not None and not isinstance(event, Stepped):
            self._append(self.unwritten)  # how far it had come before this
        self.unwritten = None
        if isinstance(event, Stepped):
            self.step_written_at = event.at
        self._append(event)

    def ledger(self) -> JobLedger:
        return self.book.ledger(self.clock())

    def write_sums(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self.written > EVERY_S:
            self.written = now
            with self._tolerant():
                write_ledger(self.run, self.ledger())

    def close(self) -> None:
        with self._tolerant():
            write_ledger(self.run, self.book.ledger())
        if self.events is not None:
            with contextlib.suppress(OSError):
                self.events.close()


def _line(event: AnyEvent) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def write_status(run: Path, status: Status) -> None:
    """A disk that is full leaves the one before."""
    with contextlib.suppress(OSError):
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{STATUS}"
        fresh.write_bytes(msgspec.json.encode(status))
        fresh.replace(folder / STATUS)


def read_status(run: Path) -> Status | None:
    try:
        return msgspec.json.decode((run / FOLDER / STATUS).read_bytes(), type=Status)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
