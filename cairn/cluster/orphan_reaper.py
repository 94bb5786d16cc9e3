"""Ends what a job has left behind once the process that looked after it has gone, however that went. A program.

    supervisor --pipe--> python -m cairn.cluster.orphan_reaper    the pipe has closed: all with the mark are ended
        '-- agent -- rank -- program -- what the program has started

A process that is killed cannot tidy up. The kernel ends agent, rank and program with it (`core.die_with_parent`), but
not a daemon of the program's. So this process has no parent among them: a killer that walks from parent to child does
not reach it. What counts as left behind is said by `leftover_processes`.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

import msgspec

from cairn.cluster.leftover_processes import end_leftovers


class OrphanReaper:
    """Waits for the end of this process, or for `dismiss`."""

    def __init__(self, mark: Mapping[str, str]) -> None:
        """Not on the command line: what is looked for there is the job itself."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cairn.cluster.orphan_reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(BrokenPipeError):  # the job is worth more than its reaper
            self._pipe().write(msgspec.json.encode(dict(mark)) + b"\n")
            self._pipe().flush()

    def dismiss(self) -> None:
        """Nothing should be left by now; it looks once more, and goes."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe().close()
        self.process.wait()

    def _pipe(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin


def main(pipe: IO[bytes]) -> int:
    mark = msgspec.json.decode(pipe.readline(), type=dict[str, str])
    if os.fork():
        return 0  # and the other one has no owner
    pipe.read()
    end_leftovers(mark)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer))
