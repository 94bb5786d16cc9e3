"""Traces of real clusters, and made-up ones, as jobs.

    philly    timestamp,duration,num_gpus,gpu_time,cluster          Microsoft's Philly, cleaned by the authors of Sia
    openb     ...,num_gpu,gpu_milli,...,creation_time,deletion_time  Alibaba 2023, pods that share GPUs
    generic   submit,duration,gpus and any of                        your own, seconds since any moment
              user,priority,limit,deadline,least,milli,cpus,memory_gib,id

The header tells which it is. A file that cannot be read is refused with its line, never read in part.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from cairn.cluster.simulate.jobs import MILLI, Cluster, Job
from cairn.cluster.simulate.openb import is_openb_pods
from cairn.core.errors import DataError

LOAD = 0.9  # of a cluster that is made to measure
Row = Mapping[str, str | None]


class Trace(msgspec.Struct, frozen=True):
    name: str
    jobs: list[Job]


def read_trace(path: Path, overestimate: float = 1.0) -> Trace:
    """Jobs with limits of `overestimate` times their duration, where the trace does not say."""
    header, rows = _rows(path)
    read, name = _reader(path, header)
    jobs = []
    for number, row in enumerate(rows):
        try:
            job = read(number, row, overestimate)
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} line {number + 2}: {dict(row)} is no job ({error})",
                hint="every line needs numbers in the columns that the header names",
            ) from None
        if job is not None:
            jobs.append(_checked(path, number, job))
    if not jobs:
        raise DataError(
            f"{path} has no jobs with GPUs", hint="the file is cut off, or the wrong one"
        )
    first = min(job.submit for job in jobs)
    return Trace(
        name, [_shifted(job, first) for job in sorted(jobs, key=lambda job: (job.submit, job.id))]
    )


def header_of(path: Path) -> list[str]:
    return _rows(path, only_header=True)[0]


def _rows(path: Path, only_header: bool = False) -> tuple[list[str], list[Row]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or [])
            return header, [] if only_header else list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read the trace {path}: {error}", hint="give a CSV file") from None


Reader = Callable[[int, Row, float], Job | None]


def _reader(path: Path, header: list[str]) -> tuple[Reader, str]:
    columns = set(header)
    if {"timestamp", "duration", "num_gpus", "cluster"} <= columns:
        return _philly, "philly"
    if is_openb_pods(header):
        return _openb, "openb"
    if {"submit", "duration", "gpus"} <= columns:
        return _generic, path.stem
    raise DataError(
        f"{path} has the columns {', '.join(header[:12]) or 'none'}, which is no trace known here",
        hint="name the columns submit,duration,gpus (and user,priority,limit,deadline,least,milli)",
    )


def _philly(number: int, row: Row, overestimate: float) -> Job | None:
    duration = max(1.0, float(row["duration"] or 0))
    return Job(
        id=number, submit=datetime.fromisoformat(row["timestamp"] or "").timestamp(), duration=duration,
        gpus=int(row["num_gpus"] or 0), limit=duration * overestimate, user=row["cluster"] or "",
    )  # fmt: skip


def _openb(number: int, row: Row, overestimate: float) -> Job | None:
    gpus, milli = int(row["num_gpu"] or 0), int(row["gpu_milli"] or 0)
    if gpus == 0:
        return None  # pods without a GPU do not wait for one
    begin, end = float(row["creation_time"] or 0), float(row["deletion_time"] or 0)
    duration = max(1.0, end - begin)
    return Job(
        id=number, submit=begin, duration=duration, gpus=gpus, milli=milli, limit=duration * overestimate,
        user=row.get("qos") or "all", cpus=float(row["cpu_milli"] or 0) / 1000,
    )  # fmt: skip


def _generic(number: int, row: Row, overestimate: float) -> Job | None:
    duration = float(row["duration"] or 0)

    def of(name: str, otherwise: float) -> float:
        text = row.get(name)
        return float(text) if text not in (None, "") else otherwise

    deadline = of("deadline", math.inf)
    return Job(
        id=int(of("id", number)), submit=float(row["submit"] or 0), duration=duration,
        gpus=int(row["gpus"] or 0), milli=int(of("milli", MILLI)), limit=of("limit", duration * overestimate),
        user=row.get("user") or "all", priority=int(of("priority", 0)), least=int(of("least", 0)),
        deadline=deadline if math.isfinite(deadline) else None, cpus=of("cpus", 0.0),
        memory_gib=of("memory_gib", 0.0),
    )  # fmt: skip


def _checked(path: Path, number: int, job: Job) -> Job:
    wrong = None
    if not (math.isfinite(job.submit) and 0 < job.duration < math.inf and 0 < job.limit < math.inf):
        wrong = f"submit {job.submit}, duration {job.duration}, limit {job.limit}"
    elif job.gpus < 1 or not 0 < job.milli <= MILLI or (job.milli < MILLI and job.gpus > 1):
        wrong = f"{job.gpus} GPUs with {job.milli}/1000 of each"
    elif not 0 <= job.least <= job.gpus:
        wrong = f"least {job.least} of {job.gpus} GPUs"
    if wrong is not None:
        raise DataError(
            f"{path} line {number + 2}: {wrong}",
            hint="times are above 0; a job takes whole GPUs, or shares one (milli 1..999)",
        )
    return job


def _shifted(job: Job, first: float) -> Job:
    deadline = None if job.deadline is None else job.deadline - first
    return msgspec.structs.replace(job, submit=job.submit - first, deadline=deadline)


def synthetic(count: int, seed: int = 0) -> Trace:
    """Jobs as in the published traces: most small and short, most GPU time in few large ones.

    Sizes and the long tail of durations after Philly and Acme's Kalos; arrivals in waves of a day; a tenth of the
    jobs share a GPU, some are elastic, important or have a deadline.
    """
    draw = np.random.default_rng(seed)
    sizes = np.array([1, 2, 4, 8, 16, 32, 64, 128])
    gpus = draw.choice(sizes, size=count, p=[0.52, 0.13, 0.13, 0.13, 0.05, 0.025, 0.01, 0.005])
    duration = np.clip(draw.lognormal(math.log(900), 1.9, count) * gpus**0.25, 30, 43_200)
    gaps = draw.exponential(30.0, count)
    submit = np.cumsum(gaps * (1 + 0.7 * np.sin(np.cumsum(gaps) / 86_400 * 2 * np.pi)))
    users = draw.zipf(1.6, count) % 24
    chance = draw.random((4, count))
    milli = draw.choice([250, 330, 500, 800], size=count)
    over = draw.uniform(1.0, 3.0, count)
    jobs = []
    for number in range(count):
        size, length, at = int(gpus[number]), float(duration[number]), float(submit[number])
        shares = size == 1 and chance[0, number] < 0.2
        limit = length * float(over[number])
        jobs.append(Job(
            id=number, submit=at, duration=length, gpus=size, limit=limit,
            milli=int(milli[number]) if shares else MILLI, user=f"team-{users[number]}",
            priority=int(chance[1, number] < 0.1), least=size // 4 if size >= 4 and chance[2, number] < 0.5 else 0,
            deadline=at + limit * (1.2 + 4 * float(chance[3, number])) if chance[3, number] < 0.3 else None,
        ))  # fmt: skip
    return Trace(f"synthetic {count:,} (seed {seed})", jobs)


def made_to_measure(
    jobs: Sequence[Job], gpus: int, rack: int, load: float = LOAD
) -> tuple[Cluster, str]:
    """A cluster that this trace keeps `load` busy while jobs arrive, and the reason in words."""
    begin, end = min(job.submit for job in jobs), max(job.submit for job in jobs)
    hours = max(end - begin, max(job.duration for job in jobs) / 4, 1.0) / 3600
    work = sum(job.work for job in jobs) / 3600
    largest = max(job.gpus for job in jobs)
    nodes = max(math.ceil(work / hours / load / gpus), math.ceil(largest / gpus), 1)
    why = f"{nodes} nodes because {work:,.0f} GPU-hours arrive in {hours:,.0f} h: {load:.0%} load"
    return Cluster(nodes=nodes, gpus=gpus, rack=rack), f"{why}; override: --nodes"
