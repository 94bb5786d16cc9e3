"""Writes event records to a file in a thread of its own, so that no caller waits for the disk.

    caller --append--> bounded queue --every 50 ms--> writer thread --whole lines--> file
            `--full: count the drop

Whatever happens to the file, the program goes on. Does not know spans from scalars, nor who
listens; `events` does.
"""

import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

from cairn.core.records import VERSION, Dropped, Process, Record, Thread, encode

QUEUE_LIMIT = 65_536  # records; some 20 MB when the disk stands still
PAUSE_S = 0.05  # between two writes; a process that is killed loses about this much


class EventSink:
    """The file, its queue and its writer thread. One process has one at most."""

    def __init__(self, path: Path, name: str, limit: int) -> None:
        self.path = path
        self.root = path  # the path that was asked for; a child's path is made from it
        self.name = name
        self.limit = limit
        self.queue: deque[Record] = deque()  # append and popleft are atomic: no lock is needed
        self.drops: dict[int, int] = {}  # by thread, so that counting needs no lock either
        self.reported = 0
        self.threads: dict[int, str] = {}
        self.file: int | None = None
        self.writer: threading.Thread | None = None
        self.is_open = True
        self.starting = threading.Lock()
        self.stopping = threading.Event()

    def put(self, record: Record) -> None:
        """Takes the record or counts it as dropped; a child of a fork opens its file here."""
        if self.writer is None:
            self._start_late()
        if not self.is_open:
            return
        if len(self.queue) < self.limit:
            self.queue.append(record)
        else:
            ident = threading.get_ident()
            self.drops[ident] = self.drops.get(ident, 0) + 1

    def thread(self) -> int:
        """The thread's number as the operating system and other profilers know it."""
        number = threading.get_native_id()
        name = threading.current_thread().name
        if self.threads.get(number) != name:
            self.threads[number] = name
            self.put(Thread(number, name))
        return number

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = _create(self.path)
        try:
            self._write(encode(_identity(self.name)))
            self.writer = threading.Thread(target=self._run, name="cairn-events", daemon=True)
            self.writer.start()
        except (OSError, RuntimeError):  # no room on the disk, or for one more thread
            self.writer = None
            self._close_file()
            raise
        if util := sys.modules.get("multiprocessing.util"):
            # A worker of multiprocessing leaves without running atexit; this it does run.
            util.Finalize(None, self.close, exitpriority=0)

    def close(self) -> None:
        self.is_open = False
        self.stopping.set()
        if self.writer is not None:
            self.writer.join(timeout=10)  # a disk that hangs must not hold the exit for ever

    def replace_in_child(self) -> "EventSink":
        """Replace the sink in a forked child: this queue, thread and file are the parent's; a new sink is
        the child's, and makes its file with its first event, if there is one."""
        self.is_open = False  # not stopping.set(): the parent's thread may hold the lock inside it
        self.writer = None
        self._close_file()
        path = self.root.with_name(f"{self.root.stem}.{os.getpid()}{self.root.suffix}")
        child = EventSink(path, self.name, self.limit)
        child.root = self.root
        return child

    def _start_late(self) -> None:
        if not self.starting.acquire(blocking=False):
            return  # another thread is at it; the queue is there already
        try:
            if self.writer is None and self.is_open:
                self.start()
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        finally:
            self.starting.release()

    def _run(self) -> None:
        try:
            while not self.stopping.wait(PAUSE_S):
                self._write_queue()
            self._write_queue()
        except Exception as error:  # noqa: BLE001  recording must not take the program down with it
            self._give_up(error)
        self._close_file()

    def _write_queue(self) -> None:
        lines = bytearray()
        for _ in range(len(self.queue)):
            lines += encode(self.queue.popleft())
        dropped = sum(list(self.drops.values()))
        if dropped > self.reported:
            lines += encode(Dropped(time.monotonic_ns(), dropped - self.reported))
            self.reported = dropped
        if lines:
            self._write(lines)

    def _write(self, lines: bytes | bytearray) -> None:
        """Past Python's buffers, so that a fork or a crash finds no half of a line in them."""
        if self.file is None:
            return
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self.file, rest) :]
        # Writing to a file that was removed goes on without an error, into nothing.
        if os.fstat(self.file).st_nlink == 0 and not self.path.exists():
            raise FileNotFoundError("the file was removed")

    def _close_file(self) -> None:
        file, self.file = self.file, None  # in this order: a fork in between must not close twice
        if file is not None:
            os.close(file)

    def _give_up(self, error: Exception) -> None:
        self.is_open = False
        if sys.stderr is not None:
            print(
                f"warning: no more events are recorded in {self.path}: {reason(error)}",
                file=sys.stderr,
            )


def _create(path: Path) -> tuple[Path, int]:
    """A file that did not exist: no older run and no namesake on another host is overwritten."""
    for number in itertools.count():
        free = path if number == 0 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            return free, os.open(free, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            continue
    raise AssertionError("unreachable: there is always a next number")


def _identity(name: str) -> Process:
    wall_ns, monotonic_ns = _clocks()
    rank = os.environ.get("RANK", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return Process(
        version=VERSION,
        name=name,
        pid=os.getpid(),
        host=socket.gethostname(),
        boot=boot,
        rank=int(rank) if rank.isdecimal() else None,
        wall_ns=wall_ns,
        monotonic_ns=monotonic_ns,
    )


def _clocks() -> tuple[int, int]:
    """Wall and monotonic clock at one moment: of a few tries the one that took the least time."""
    tries = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, wall, (before + after) // 2))
    _, wall_ns, monotonic_ns = min(tries)
    return wall_ns, monotonic_ns


def reason(error: Exception) -> str:
    """Why the operating system refused, in its own words."""
    strerror = getattr(error, "strerror", None)
    return strerror.lower() if strerror else str(error) or type(error).__name__
