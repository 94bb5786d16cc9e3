"""One run at a time in a folder: two would write over each other's checkpoints and log.

    runs/x/.running     held by the process that writes there, with its number and host in it

The lock is the kernel's: it goes with its process, however that ends, so there is nothing to clean up. A file system
that knows no locks (some network ones) is taken as it is.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cairn.core.errors import ConfigError

FILE = ".running"


def check_free(folder: Path) -> None:
    """Refuses if another process is inside, before this one loads a model beside that one's."""
    try:
        with (folder / FILE).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(folder, file) from None
    except OSError:  # nobody has been here, or `only_here` will say what is wrong
        return


@contextmanager
def only_here(folder: Path) -> Iterator[None]:
    """Refuses if another process is inside; the folder exists."""
    with (folder / FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(folder, file) from None
        except OSError:  # no locks here
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
        file.truncate(0)


def _taken(folder: Path, file: TextIO) -> ConfigError:
    file.seek(0)
    return ConfigError(
        f"another run writes to {folder}: {file.read().strip() or 'it has not said which'}",
        hint="wait for it or end it, or name another folder with --out",
    )
