"""The process that looks after a job: started in a session of its own, so that it outlives the launcher; and ended.

What it does is in `supervise`; this file only knows that it is a process of this machine, with a record.
"""

import contextlib
import os
import signal
import sys
import time

import msgspec
import psutil

from cairn.cluster import records
from cairn.cluster.elastic import inherited
from cairn.cluster.records import JobRecord, JobStatus
from cairn.core.errors import CairnError
from cairn.core.units import format_duration


def begin(record: JobRecord) -> JobRecord:
    """Starts the program that looks after a job, in a session of its own: it outlives the launcher."""
    argv = [sys.executable, "-m", "cairn.cluster.supervise", str(record.folder)]
    env = inherited({"CAIRN_JOBS": str(records.state_folder().resolve())})
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(record.folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        files = [(os.POSIX_SPAWN_DUP2, null, 0), *((os.POSIX_SPAWN_DUP2, log, n) for n in (1, 2))]
        pid = os.posix_spawn(argv[0], argv, env, file_actions=files, setsid=True)
    finally:
        os.close(null)
        os.close(log)
    record = msgspec.structs.replace(
        record, supervisor=pid, supervisor_since=records.start_s(psutil.Process(pid))
    )
    records.save(record)
    return record


def stop(record: JobRecord, patience_s: float = 60.0) -> None:
    """SIGTERM to the supervisor, and wait until it has given everything back."""
    before = records.read_status(record).state
    with contextlib.suppress(ProcessLookupError):
        if records.supervised(record):
            os.kill(record.supervisor, signal.SIGTERM)
    waits_until = time.monotonic() + patience_s
    while records.supervised(record):
        if time.monotonic() > waits_until:
            raise CairnError(
                f"job '{record.name}' did not end within {format_duration(patience_s)}",
                hint=f"look at {record.folder / 'supervisor.log'}",
            )
        with contextlib.suppress(ChildProcessError):  # where we have started it ourselves
            os.waitpid(record.supervisor, os.WNOHANG)
        time.sleep(0.05)
    if records.read_status(record).state == "lost":  # it ended without writing how
        began = before not in ("queued", "starting")
        reason = (
            "stopped; its supervisor ended without a report"
            if began
            else "stopped before it started"
        )
        records.write_status(record, JobStatus(state="stopped", reason=reason))
