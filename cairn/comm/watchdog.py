"""Reports which rank is stuck in which collective while a job hangs, before its timeout ends it.

    every rank   thread: what did I enter, what did I leave?  --note-->  board  --all notes-->  rank 0, once

Flight recorders (torch's, and that of `cairn.labs.torch_backend`) count the collectives of each process group, so
nothing has to be wrapped. A note is small as long as collectives complete; a rank without progress adds its last
calls. Rank 0 compares the notes by the rules of the doctor and logs one sentence: the rank, its host, its last
collective. It logs once for each standstill, and once more when the job goes on. It never ends a process: that
is for the timeout.

The watchdog thread writes notes also while its rank runs Python or waits in a collective. A rank whose process is
stopped or gone writes none, and is reported for that. Covered are the collectives of gloo, of NCCL and of our own
backend; a backend without a flight recorder is invisible.
"""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cairn.comm.doctor.findings import RankTrace, ranked
from cairn.comm.doctor.flight_recorder import trace_of
from cairn.comm.doctor.ranks import python_backend_dump
from cairn.comm.doctor.traces import examine

PATIENCE_S = 60.0  # nothing moved for so long, and a rank waits
EARLY = 1 / 4  # of the patience, after which a process that writes no notes is named
EVERY_S = 3.0  # between two notes, at most
CALLS = 8  # of each group, in the note of a rank that stands still
LogLine = Callable[[str], None]


class RankNote(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    beat: int  # how many notes it has written
    moved: str  # changes whenever a collective begins or ends
    trace: RankTrace | None = None  # where nothing moved for a while
    waits: list[str] = []  # what it is in: op and peer, also point to point


class NoteBoard(Protocol):
    """Shared storage for the notes of all ranks."""

    def put(self, rank: int, note: bytes) -> None: ...
    def notes(self, world: int) -> dict[int, bytes]: ...
    def close(self, rank: int) -> None: ...


class HangWatch:
    """Analysis of the notes by rank 0. Pure: the clock is an argument."""

    def __init__(self, world: int, patience_s: float) -> None:
        self.world, self.patience_s = world, patience_s
        self.last_move: dict[int, tuple[str, float]] = {}  # last change of `moved`, and when
        self.last_beat: dict[int, tuple[int, float]] = {}  # last beat, and when
        self.last_note: dict[
            int, RankNote
        ] = {}  # of each rank the last one, also of those that have left
        self.reported = self.early = False

    def look(self, notes: dict[int, RankNote], now: float) -> str | None:
        """A sentence when there is something to say."""
        notes = self.last_note = self.last_note | notes
        for rank, note in notes.items():
            if self.last_move.get(rank, ("", 0.0))[0] != note.moved:
                self.last_move[rank] = (note.moved, now)
            if self.last_beat.get(rank, (-1, 0.0))[0] != note.beat:
                self.last_beat[rank] = (note.beat, now)
        quiet = now - max((when for _, when in self.last_move.values()), default=now)
        if quiet < EARLY * self.patience_s:
            again, self.reported, self.early = self.reported or self.early, False, False
            return "watchdog: the job goes on" if again else None
        if quiet < self.patience_s:
            return self._stopped(notes, now)
        silent = [r for r, (_, when) in self.last_beat.items() if now - when >= self.patience_s / 2]
        waiting = any(note.waits for note in notes.values())
        if self.reported or not (waiting or silent):
            return None
        if self._expects_notes(notes, silent) and quiet < 2 * self.patience_s:
            return None
        self.reported = True
        return f"watchdog: nothing has moved for {quiet:.0f} s. {explain(notes, silent)}"

    def _stopped(self, notes: dict[int, RankNote], now: float) -> str | None:
        """A process that is stopped writes no notes: that is known long before the patience is over."""
        late = {rank: now - when for rank, (_, when) in self.last_beat.items()}
        stopped = [rank for rank, silent_s in late.items() if silent_s >= EARLY * self.patience_s]
        if self.early or self.reported or not stopped or len(stopped) == len(notes):
            return None
        self.early = True
        who = ", ".join(f"rank {rank} on {notes[rank].host}" for rank in stopped)
        return f"watchdog: no sign of life from {who} for {late[stopped[0]]:.0f} s: stopped, or swapped out?"

    def _expects_notes(self, notes: dict[int, RankNote], silent: list[int]) -> bool:
        """A rank writes notes, and has not written yet where it stands: on a busy machine it may only be slow."""
        here = [rank for rank in range(self.world) if rank not in silent]
        return any(rank not in notes or notes[rank].trace is None for rank in here)


def explain(notes: dict[int, RankNote], silent: list[int]) -> str:
    """Name the ranks that hang, their hosts and their collectives."""
    hosts = {rank: note.host for rank, note in notes.items()}
    parts = [
        f"rank {rank} on {hosts[rank]} writes no notes any more: its process is stopped or gone"
        for rank in silent
    ]
    traces = [note.trace for note in notes.values() if note.trace is not None]
    explained = False
    for one in examine(traces):
        if one.cause in ("hang", "mismatch"):
            culprits = [rank for rank in hosts if one.where == f"rank {rank}"]
            where = f"rank {culprits[0]} on {hosts[culprits[0]]}" if culprits else one.where
            parts.append(f"{where}: {'; '.join(one.evidence)}")
            explained = True
    if not explained or all(rank in silent for rank in hosts):
        waits = [
            f"rank {note.rank} on {note.host} is in {', '.join(note.waits)}"
            for note in notes.values()
            if note.waits
        ]
        rest = [rank for rank, note in notes.items() if not note.waits]
        parts += [*waits[:8], f"{ranked(rest)} in no collective" if rest else ""]
    return "; ".join(part for part in parts if part)


@contextmanager
def watching(
    rank: int,
    world: int,
    log_line: LogLine,
    *,
    patience_s: float = PATIENCE_S,
    every_s: float | None = None,
) -> Iterator[None]:
    """While the block runs, notes are written and, on rank 0, read. All ranks have to enter it."""
    if world < 2 or patience_s <= 0 or recorder() is None:
        yield
        return
    stop = threading.Event()
    pause = every_s or max(0.2, min(EVERY_S, patience_s / 6))
    body = _Body(rank, world, log_line, patience_s, _board())
    thread = threading.Thread(target=body.run, args=(stop, pause), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
        body.board.close(rank)


class _Body:
    def __init__(
        self, rank: int, world: int, log_line: LogLine, patience_s: float, board: NoteBoard
    ) -> None:
        self.rank, self.log_line, self.board = rank, log_line, board
        self.world, self.host = world, socket.gethostname()
        self.patience_s, self.watch = patience_s, HangWatch(world, patience_s)
        self.beat, self.moved, self.since = 0, "", time.monotonic()

    def run(self, stop: threading.Event, pause: float) -> None:
        while not stop.wait(pause):
            with contextlib.suppress(Exception):  # a watchdog never harms what it watches
                self.board.put(self.rank, msgspec.json.encode(self.note()))
                if self.rank == 0:
                    self.read()

    def note(self) -> RankNote:
        status = _dump(collectives=False)
        moved = str(status.get("pg_status"))
        now, self.beat = time.monotonic(), self.beat + 1
        if moved != self.moved:
            self.moved, self.since = moved, now
        if now - self.since < self.patience_s / 2:
            return RankNote(rank=self.rank, host=self.host, beat=self.beat, moved=moved)
        dump = _dump(collectives=True)
        trace = trace_of(dump, self.rank, "watchdog")
        groups = {call.group for call in trace.calls}
        last = [c for g in groups for c in [x for x in trace.calls if x.group == g][-CALLS:]]
        return RankNote(
            rank=self.rank,
            host=self.host,
            beat=self.beat,
            moved=moved,
            trace=msgspec.structs.replace(trace, calls=last),
            waits=_waits(dump),
        )

    def read(self) -> None:
        encoded = self.board.notes(self.world)
        notes = {rank: msgspec.json.decode(note, type=RankNote) for rank, note in encoded.items()}
        sentence = self.watch.look(notes, time.monotonic())
        if sentence:
            self.log_line(sentence)


def recorder() -> Any:
    """The function of this torch that dumps as JSON; None where there is none."""
    from torch._C import _distributed_c10d as c10d

    return getattr(c10d, "_dump_fr_trace_json", None)


def last_call() -> tuple[str, bool]:
    """The collective that this process began last, with its number; and whether it is in one now."""
    entries = _dump(collectives=True)["entries"] if recorder() is not None else []
    if not entries:
        return "none", False
    last = max(entries, key=lambda entry: entry.get("time_created_ns") or 0)
    name = f"{last['profiling_name']} #{last['collective_seq_id']}"
    return name, bool(_waits({"entries": entries}))


def _dump(collectives: bool) -> dict[str, Any]:
    """The flight recorders of gloo, NCCL and Python backends, merged into one document."""
    from torch._C import _distributed_c10d as c10d

    whole: dict[str, Any] = {"entries": [], "pg_config": {}, "pg_status": {}}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        status = msgspec.json.decode(dump(includeCollectives=collectives, onlyActive=False))
        whole["entries"] += status.get("entries") or []
        whole["pg_config"] |= status.get("pg_config") or {}
        whole["pg_status"][name] = status.get("pg_status")
    ours = python_backend_dump(collectives)
    whole["entries"] += ours["entries"]
    whole["pg_config"] |= ours["pg_config"]
    whole["pg_status"]["cairn"] = ours["pg_status"]
    return whole


def _waits(dump: dict[str, Any]) -> list[str]:
    waiting = [e for e in dump["entries"] if e.get("state") != "completed" and not e.get("retired")]
    return [f"{entry['profiling_name']} #{entry['collective_seq_id']}" for entry in waiting[-4:]]


class FileBoard:
    """A folder that all ranks see: for ranks of one host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def close(self, rank: int) -> None:
        """Takes the own note away; the last rank takes the folder."""
        (self.folder / str(rank)).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def put(self, rank: int, note: bytes) -> None:
        fresh = self.folder / f".{rank}.{os.getpid()}"
        fresh.write_bytes(note)
        fresh.replace(self.folder / str(rank))

    def notes(self, world: int) -> dict[int, bytes]:
        encoded = {}
        for rank in range(world):
            with contextlib.suppress(FileNotFoundError):
                encoded[rank] = (self.folder / str(rank)).read_bytes()
        return encoded


class StoreBoard:
    """A TCPStore, over a connection of its own."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def close(self, rank: int) -> None:
        pass  # the notes go with the store

    def put(self, rank: int, note: bytes) -> None:
        self.store.set(f"watchdog/{rank}", note)

    def notes(self, world: int) -> dict[int, bytes]:
        keys = {rank: f"watchdog/{rank}" for rank in range(world)}
        return {r: self.store.get(k) for r, k in keys.items() if self.store.check([k])}


def _board() -> NoteBoard:
    """The group's own store if it is over TCP; a file store only grows, so a folder stands in for it."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    under = store
    while isinstance(under, dist.PrefixStore):
        under = under.underlying_store
    if isinstance(under, dist.TCPStore):
        return StoreBoard(store.clone())
    path = getattr(under, "path", None) or Path(tempfile.gettempdir()) / f"cairn-{os.getpid()}"
    return FileBoard(Path(f"{path}.watchdog"))  # beside the store, where all ranks can write
