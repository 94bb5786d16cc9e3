"""Lock of a run folder, because two runs would overwrite each other's checkpoints and logs.

    runs/x/.running     held by the process that writes there, with its number and host in it

The lock is the kernel's: it goes with its process, however that ends, so there is nothing to clean up. A file system
that knows no locks (some network ones) is taken as it is.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cairn.core.errors import ConfigError

FILE = ".running"
SAME_JOB_S = 60.0  # for the process of an earlier life of the same job to end


def check_free(folder: Path) -> None:
    """Refuses if another process is inside, before this one loads a model beside that one's."""
    try:
        with (folder / FILE).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(folder, file) from None
    except OSError:  # no run was here, or `exclusive_run` will say what is wrong
        return


@contextmanager
def exclusive_run(folder: Path, job: str = "") -> Iterator[None]:
    """Refuses if another process is inside; the folder exists.

    `job`: a name that all lives of one job share. The life before may need a moment to end; it is waited for.
    """
    with (folder / FILE).open("a+", encoding="utf-8") as file:
        if not _locked(file, folder, job):
            yield
            return
        file.truncate(0)
        of = f" of job {job}" if job else ""
        file.write(f"process {os.getpid()} on {socket.gethostname()}{of}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _locked(file: TextIO, folder: Path, job: str) -> bool:
    """False where the file system knows no locks."""
    deadline = time.monotonic() + SAME_JOB_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            file.seek(0)
            same = job and file.read().strip().endswith(f" of job {job}")
            if not same or time.monotonic() > deadline:
                raise _taken(folder, file) from None
        except OSError:
            return False
        time.sleep(0.1)


def _taken(folder: Path, file: TextIO) -> ConfigError:
    file.seek(0)
    return ConfigError(
        f"another run writes to {folder}: {file.read().strip() or 'it has not said which'}",
        hint="wait for it or end it, or name another folder with --out",
    )
