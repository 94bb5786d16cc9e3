"""Flight recorder of the backend, in the format of torch's own.

    begin(call) --> Record .. started .. end(record) --> completed
                       '--> the last `KEPT` of them, dumped as torch dumps its own

torch records the collectives of gloo and NCCL in C++, where no Python backend can write; so ours keeps
its own book, and the watchdog and `cairn comm doctor` read both alike. A record is a few numbers: what it
says in words, and the line of the program that waits, is worked out when it is asked for.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from cairn.comm.doctor.ranks import python_backend_dump
from cairn.labs.torch_backend.wire import Call

KEPT = 512  # records of each group
FRAMES = 8  # of the program, innermost first
# Frames of these files are not the caller's.
OURS = ("/cairn/comm/", "/cairn/labs/torch_backend/", "/torch/", "/threading.py", "/contextlib.py")


class Record:
    """One operation of this rank. `ended_ns` is 0 while it is in flight."""

    __slots__ = ("admitted", "began_ns", "call", "ended_ns", "label", "thread")

    def __init__(self, call: Call, label: str = "") -> None:
        self.call, self.label = call, label  # the label of a message: "recv 2<-0"
        self.admitted = bool(label)  # otherwise the group was stopped before it was called
        self.thread = threading.get_ident()
        self.began_ns, self.ended_ns = time.time_ns(), 0


class FlightRecorder:
    """The recorder of one group. One thread writes collectives, others messages; any thread may read."""

    def __init__(self, ranks: list[int]) -> None:
        self.name = self.description = ""  # torch names a group after it was made
        self._ranks = ranks
        self._records: deque[Record] = deque(maxlen=KEPT)
        self._begun = self._done = 0  # operations of either kind

    def begin(self, call: Call) -> Record:
        record = Record(call)
        self._begun += 1
        self._records.append(record)
        return record

    def begin_message(self, call: Call, verb: str, me: int, peer: int) -> Record:
        """A send or a receive; counted apart from the collectives, as torch does."""
        arrow = f"{me}->{peer}" if verb == "send" else f"{me}<-{peer}"
        record = Record(call, f"{verb} {arrow}")
        self._begun += 1
        self._records.append(record)
        return record

    def end(self, record: Record) -> None:
        record.ended_ns = time.time_ns()
        self._done += 1

    def status(self) -> dict[str, Any]:
        """Changes whenever an operation begins or ends."""
        return {"begun": self._begun, "done": self._done}

    def config(self) -> dict[str, Any]:
        return {"name": self.name, "desc": self.description, "ranks": str(self._ranks)}

    def entries(self) -> list[dict[str, Any]]:
        """Entries in the format of torch's dump, oldest first."""
        stacks = sys._current_frames()
        return [self._entry(record, stacks) for record in list(self._records)]

    def _entry(self, record: Record, stacks: dict[int, FrameType]) -> dict[str, Any]:
        call, completed = record.call, record.ended_ns > 0
        dtype = str(call.dtype).removeprefix("torch.")
        elements = call.total // call.dtype.itemsize
        frames = [] if completed else list(_program(stacks.get(record.thread)))
        return {
            "process_group": [self.name, self.description],
            "collective_seq_id": call.sequence,
            "is_p2p": bool(record.label),
            "profiling_name": f"cairn:{record.label or call.operation}",
            "input_sizes": [[elements]] if call.total else [],
            "input_dtypes": [dtype],
            "state": "completed" if completed else "started",
            "retired": completed,
            "refused": not record.admitted,
            "time_created_ns": record.began_ns,
            "time_discovered_completed_ns": record.ended_ns or None,
            "frames": frames,
        }


def _program(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """The lines of the program that wait in an operation, innermost first."""
    frames = 0
    while frame is not None and frames < FRAMES:
        code = frame.f_code
        if not any(part in code.co_filename for part in OURS):
            frames += 1
            yield {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
        frame = frame.f_back


def write_dump(prefix: str, rank: int) -> Path:
    """`prefix` and the rank are its name, as with torch's own dumps: `cairn comm doctor` reads it."""
    path = Path(f"{prefix}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(python_backend_dump()))
    return path
