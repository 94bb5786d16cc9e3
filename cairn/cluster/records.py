"""Records of the jobs launched from this machine: one folder for each run.

    STATE/train-tiny/3/job.toml        what was asked
                       record.json     engine, id, who supervises it
                       status.json     state and reason, written anew at every change
                       logs/*.log      what its nodes wrote

    STATE/cordons.json                 nodes that are left out, and why

STATE is $CAIRN_JOBS, or cairn/jobs in the user's state folder. Only its owner may read a run's folder: the job's
environment may hold secrets. Knows no engine.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from cairn.cluster.job_file import job_toml, read_job
from cairn.cluster.secret_env import write_private
from cairn.cluster.spec import Job
from cairn.core.errors import CairnError, ConfigError, UsageError, did_you_mean

State = Literal[
    "queued",
    "starting",
    "running",
    "restarting",
    "done",
    "failed",
    "stopped",
    "lost",
    "unknown",
]
ENDED: tuple[State, ...] = ("done", "failed", "stopped", "lost")
OWNER = ".cairn-job"  # in a checkpoint folder: whose it is


class NameTaken(CairnError):
    """A job of that name has not ended yet."""


class ForeignCheckpoints(CairnError):
    """The folder holds a run that this job did not write."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job, with its reason in one line."""

    state: State
    reason: str = ""
    nodes: int = 0  # that run now
    restarts: int = 0
    since: float = 0.0
    failure: str = ""  # what the first failing rank said, with its host and collective


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A launched job and its engine."""

    name: str
    number: int
    engine: str
    created: float
    id: str = ""  # the engine's own name for it
    target: str = ""  # of several forms on one engine: jobset, volcano, rayjob
    supervisor: int = 0  # process that looks after it here; 0: the engine does
    supervisor_since: float = 0.0  # its start (`start_s`), because numbers of processes come again
    address: str = ""  # of the engine

    @property
    def folder(self) -> Path:
        return state_folder() / self.name / str(self.number)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def job(self) -> Job:
        return read_job(self.folder / "job.toml")


def state_folder() -> Path:
    if folder := os.environ.get("CAIRN_JOBS"):
        return Path(folder)
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "cairn" / "jobs"


def create(job: Job, engine: str, target: str = "", address: str = "") -> JobRecord:
    """A new run; the folder is made in one step, so of two launches at once only one gets it."""
    number = max((record.number for record in runs(job.name)), default=0) + 1
    record = JobRecord(
        name=job.name,
        number=number,
        engine=engine,
        created=time.time(),
        target=target,
        address=address,
    )
    try:
        record.folder.parent.mkdir(parents=True, exist_ok=True)
        record.folder.mkdir(mode=0o700)
        _begin(record, job)
    except FileExistsError:
        raise NameTaken(
            f"a job '{job.name}' is being launched at this moment", hint="give one another name"
        ) from None
    except OSError as error:
        raise CairnError(
            f"records of jobs cannot be kept in {state_folder()}: {(error.strerror or str(error)).lower()}",
            hint="CAIRN_JOBS=FOLDER names another place",
        ) from None
    return record


def _begin(record: JobRecord, job: Job) -> None:
    """The files of a new run, or none: a folder without a record would hold the name for ever."""
    try:
        record.logs.mkdir()
        write_private(record.folder / "job.toml", job_toml(job).encode())
        save(record)
        write_status(record, JobStatus(state="queued", reason="submitted", since=time.time()))
    except BaseException:
        shutil.rmtree(record.folder, ignore_errors=True)
        raise


def save(record: JobRecord) -> None:
    _write(record.folder / "record.json", msgspec.json.encode(record))


def write_status(record: JobRecord, status: JobStatus) -> None:
    _write(record.folder / "status.json", msgspec.json.encode(status))


def read_status(record: JobRecord) -> JobStatus:
    """The last status that the supervisor wrote; `lost` if the supervisor ended without one."""
    # Asked before the file is read: a supervisor that ends in between has written its last word.
    is_there = supervised(record)
    try:
        status = msgspec.json.decode((record.folder / "status.json").read_bytes(), type=JobStatus)
    except (OSError, msgspec.DecodeError):
        return JobStatus(
            state="lost", reason="its record was never finished: the launch was killed"
        )
    if status.state in ENDED or not record.supervisor or is_there:
        return status
    return msgspec.structs.replace(
        status,
        state="lost",
        nodes=0,
        reason=f"its supervisor (process {record.supervisor}) was killed; its ranks ended with it",
    )


def supervised(record: JobRecord) -> bool:
    try:
        process = psutil.Process(record.supervisor)
        alive = process.status() != psutil.STATUS_ZOMBIE
        # The kernel counts in hundredths of a second.
        return alive and abs(start_s(process) - record.supervisor_since) < 0.005
    except psutil.Error:
        return False


def start_s(process: psutil.Process) -> float:
    """Seconds from the boot of this machine to the start of a process: the time of day may be set in between."""
    return process.create_time() - psutil.boot_time()


def runs(name: str) -> list[JobRecord]:
    """Every run of a name, oldest first."""
    folder = state_folder() / name
    if not folder.is_dir():
        return []
    records = []
    for path in folder.iterdir():
        try:
            records.append(msgspec.json.decode((path / "record.json").read_bytes(), type=JobRecord))
        except (OSError, msgspec.DecodeError):
            continue  # being made, or not ours
    return sorted(records, key=lambda record: record.number)


def latest() -> Iterator[JobRecord]:
    """The newest run of every name."""
    folder = state_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if records := runs(path.name):
            yield records[-1]


def find(name: str) -> JobRecord:
    records = runs(name)
    if not records:
        names = [record.name for record in latest()]
        raise UsageError(
            f"no job '{name}'",
            hint=did_you_mean(
                name, names, otherwise="`cairn jobs list` has the jobs launched here"
            ),
        )
    return records[-1]


def claim_checkpoints(job: Job, adopt: bool = False) -> None:
    """Refuses a checkpoint folder that holds another job's run; writes this job's name into its own."""
    if job.checkpoint.folder is None or "://" in job.checkpoint.folder:
        return
    folder = Path(job.checkpoint.folder)
    try:
        _claim(job, folder, adopt)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder {folder} cannot be used: {(error.strerror or str(error)).lower()}",
            hint="a folder that this user may write, and that all nodes see",
        ) from None


def _claim(job: Job, folder: Path, adopt: bool) -> None:
    mark = folder / OWNER
    owner = mark.read_text(encoding="utf-8").strip() if mark.is_file() else ""
    foreign = owner != job.name and (bool(owner) or (folder.is_dir() and any(folder.iterdir())))
    if foreign and not adopt:
        whose = f"the run of job '{owner}'" if owner else "files that no job of Cairn wrote"
        raise ForeignCheckpoints(
            f"checkpoint.folder {folder} holds {whose}, not of '{job.name}'",
            hint="choose another folder; or go on from what is there: cairn launch ... --adopt",
        )
    folder.mkdir(parents=True, exist_ok=True)
    _write(mark, job.name.encode() + b"\n")


def _write(path: Path, data: bytes) -> None:
    """All or nothing: a reader never sees half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)
