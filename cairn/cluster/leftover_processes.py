"""Processes that a node of a job has left behind: found by their environment, and ended.

    agent -- rank -- program -- what the program has started       the kernel ends the first three with their parent

Only the last ones can outlive their node: a shell's background jobs, a daemon. Every process inherits the variables
of the node that it belongs to, however it was started. Same user, same machine; knows no engine. Where no process is
left to call this, `orphan_reaper` does.
"""

import contextlib
import os
import time
from collections.abc import Mapping

import psutil

OF_A_RUN = "CAIRN_JOB_FAILURES"  # a folder that no other run has
OF_A_NODE = (OF_A_RUN, "CAIRN_NODE")
PATIENCE_S = 5.0


def mark_of(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that identify the processes of one node of a run; empty if they are not set."""
    marks = {name: env[name] for name in OF_A_NODE if name in env}
    return marks if len(marks) == len(OF_A_NODE) else {}


def leftovers(mark: Mapping[str, str]) -> list[psutil.Process]:
    if not mark:
        return []
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            env = process.environ() if process.pid != os.getpid() else {}
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and all(env.get(name) == value for name, value in mark.items()):
                processes.append(process)
    return processes


def end_leftovers(mark: Mapping[str, str]) -> int:
    """SIGKILL until none is left; how many there were."""
    ended: set[int] = set()
    until = time.monotonic() + PATIENCE_S
    while (left := leftovers(mark)) and time.monotonic() < until:
        for process in left:
            ended.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.5)
    return len(ended)
