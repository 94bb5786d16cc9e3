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
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from cairn.cluster.simulate.jobs import MILLI, SimulatedCluster, SimulatedJob
from cairn.cluster.simulate.openb import is_openb_pods
from cairn.core.errors import DataError
from cairn.core.units import format_duration

LOAD = 0.9  # of a cluster that is made to measure
LONGEST = 1e9  # seconds of a job: some 30 years
Row = Mapping[str, str]


class JobTrace(msgspec.Struct, frozen=True):
    name: str
    jobs: list[SimulatedJob]


def read_trace(path: Path, overestimate: float = 1.0) -> JobTrace:
    """Jobs with limits of `overestimate` times their duration, where the trace does not say."""
    header, rows = _rows(path)
    read, name = _reader(path, header)
    jobs: list[SimulatedJob] = []
    lines: dict[int, int] = {}  # id -> line
    for number, (line, row) in enumerate(rows):
        try:
            job = read(number, row, overestimate)
            if job is not None:
                _check(job)
        except ValueError as error:
            raise DataError(
                f"{path} line {line}: {error}",
                hint="times are seconds above 0; a job takes whole GPUs, or shares one (milli 1..999)",
            ) from None
        if job is None:
            continue
        if job.id in lines:
            raise DataError(
                f"{path} line {line}: job {job.id} was in line {lines[job.id]} already",
                hint="every job has an id of its own, or leave the column out",
            )
        lines[job.id] = line
        jobs.append(job)
    if not jobs:
        raise DataError(
            f"{path} has no jobs with GPUs", hint="the file is cut off, or the wrong one"
        )
    first = min(job.submit for job in jobs)
    return JobTrace(
        name, [_shifted(job, first) for job in sorted(jobs, key=lambda job: (job.submit, job.id))]
    )


def _rows(path: Path) -> tuple[list[str], list[tuple[int, Row]]]:
    """The header, and each row with the number of its line."""
    rows: list[tuple[int, Row]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            for values in reader:
                if values and len(values) != len(header):
                    raise DataError(
                        f"{path} line {reader.line_num} has {len(values)} values, the header {len(header)}",
                        hint="the file is damaged or cut off; a value with a comma needs quotes",
                    )
                if values:
                    rows.append((reader.line_num, dict(zip(header, values, strict=True))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read the trace {path}: {error}", hint="give a CSV file") from None
    return header, rows


Reader = Callable[[int, Row, float], SimulatedJob | None]


def _reader(path: Path, header: list[str]) -> tuple[Reader, str]:
    columns = set(header)
    if {"timestamp", "duration", "num_gpus", "cluster"} <= columns:
        return _philly, "philly"
    if is_openb_pods(header):
        return _openb, "openb"
    if {"submit", "duration", "gpus"} <= columns:
        return _generic, path.stem
    has = f"has the columns {', '.join(header[:12])}" if header else "is empty"
    raise DataError(
        f"{path} {has}: no trace known here",
        hint="name the columns submit,duration,gpus (and user,priority,limit,deadline,least,milli)",
    )


def _number(row: Row, name: str, otherwise: float | None = None) -> float:
    text = row.get(name, "").strip()
    if not text and otherwise is not None:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} is {text}")
    return value


def _whole(row: Row, name: str, otherwise: int | None = None) -> int:
    value = _number(row, name, otherwise)
    if value != int(value):
        raise ValueError(f"{name} is {value:g}, not a whole number")
    return int(value)


def _philly(number: int, row: Row, overestimate: float) -> SimulatedJob | None:
    duration = _number(row, "duration")
    try:
        when = datetime.fromisoformat(row["timestamp"])
    except ValueError:
        raise ValueError(f"timestamp is {row['timestamp']!r}, not a date and time") from None
    when = when.replace(tzinfo=when.tzinfo or UTC)  # the same on a machine of any time zone
    return SimulatedJob(
        id=number,
        submit=when.timestamp(),
        duration=duration,
        gpus=_whole(row, "num_gpus"),
        limit=duration * overestimate,
        user=row["cluster"] or "all",
    )


def _openb(number: int, row: Row, overestimate: float) -> SimulatedJob | None:
    gpus, milli = _whole(row, "num_gpu"), _whole(row, "gpu_milli")
    if gpus == 0:
        return None  # pods without a GPU do not wait for one
    begin, end = _number(row, "creation_time"), _number(row, "deletion_time")
    if end < begin:
        raise ValueError(f"deleted at {end:g}, before it was created at {begin:g}")
    duration = max(1.0, end - begin)  # times are whole seconds there, and a pod that ran had some
    return SimulatedJob(
        id=number,
        submit=begin,
        duration=duration,
        gpus=gpus,
        milli=milli,
        limit=duration * overestimate,
        user=row.get("qos") or "all",
        cpus=_number(row, "cpu_milli") / 1000,
    )


def _generic(number: int, row: Row, overestimate: float) -> SimulatedJob | None:
    duration = _number(row, "duration")
    deadline = _number(row, "deadline") if row.get("deadline") else None
    return SimulatedJob(
        id=_whole(row, "id", number),
        submit=_number(row, "submit"),
        duration=duration,
        gpus=_whole(row, "gpus"),
        milli=_whole(row, "milli", MILLI),
        limit=_number(row, "limit", duration * overestimate),
        user=row.get("user") or "all",
        priority=_whole(row, "priority", 0),
        least=_whole(row, "least", 0),
        deadline=deadline,
        cpus=_number(row, "cpus", 0.0),
        memory_gib=_number(row, "memory_gib", 0.0),
    )


def _check(job: SimulatedJob) -> None:
    """Refuses what no job can be."""
    for name, seconds in (("duration", job.duration), ("limit", job.limit)):
        if not 0 < seconds <= LONGEST:
            raise ValueError(f"{name} {seconds:g} s, not above 0 and up to {LONGEST:g}")
    if job.gpus < 1 or not 0 < job.milli <= MILLI or (job.milli < MILLI and job.gpus > 1):
        raise ValueError(f"{job.gpus} GPUs with {job.milli}/1000 of each")
    if not 0 <= job.least <= job.gpus:
        raise ValueError(f"least {job.least} of {job.gpus} GPUs")
    if job.cpus < 0 or job.memory_gib < 0:
        raise ValueError(f"{job.cpus:g} CPUs and {job.memory_gib:g} GiB")
    if job.deadline is not None and job.deadline < job.submit:
        raise ValueError(f"deadline {job.deadline:g}, before it is submitted at {job.submit:g}")


def _shifted(job: SimulatedJob, first: float) -> SimulatedJob:
    deadline = None if job.deadline is None else job.deadline - first
    return msgspec.structs.replace(job, submit=job.submit - first, deadline=deadline)


def synthetic(count: int, seed: int = 0) -> JobTrace:
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
        jobs.append(
            SimulatedJob(
                id=number,
                submit=at,
                duration=length,
                gpus=size,
                limit=limit,
                milli=int(milli[number]) if shares else MILLI,
                user=f"team-{users[number]}",
                priority=int(chance[1, number] < 0.1),
                least=size // 4 if size >= 4 and chance[2, number] < 0.5 else 0,
                deadline=at + limit * (1.2 + 4 * float(chance[3, number]))
                if chance[3, number] < 0.3
                else None,
            )
        )
    return JobTrace(f"synthetic {count:,} (seed {seed})", jobs)


def kept_busy(
    jobs: Sequence[SimulatedJob], gpus: int, rack: int, share: float = LOAD
) -> tuple[SimulatedCluster, str]:
    """A cluster of which these jobs keep `share` busy until the last one comes, if none has to wait; and why, in words.

    What is left to do when the last one comes does not count: of a short trace with long jobs that is most of it.
    """
    begin, end = min(job.submit for job in jobs), max(job.submit for job in jobs)
    seconds, when = end - begin, "until the last one comes"
    if not seconds:  # they come all at once
        seconds, when = max(_length(job) for job in jobs), "as long as the longest takes"
    done = sum(min(1.0, (begin + seconds - job.submit) / _length(job)) * job.work for job in jobs)
    largest = max(job.gpus for job in jobs)
    enough, needed = math.ceil(done / seconds / share / gpus), math.ceil(largest / gpus)
    cluster = SimulatedCluster(nodes=max(enough, needed), gpus=gpus, rack=rack)
    why = (
        f"jobs would keep {done / seconds / cluster.total:.0%} of the GPUs busy {when} "
        f"({format_duration(seconds)}) if none had to wait"
    )
    if enough < needed:
        why = f"the largest job asks for {largest} GPUs; {why}"
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    return cluster, f"{nodes} because {why}; override: --nodes"


def _length(job: SimulatedJob) -> float:
    return min(job.duration, job.limit)


def made_to_measure(
    jobs: Sequence[SimulatedJob], gpus: int, rack: int, load: float = LOAD
) -> tuple[SimulatedCluster, str]:
    """A cluster with this offered load: work that comes over what could be done meanwhile; and the reason in words.

    That is what is used in the long run. A short trace leaves much of its work for later: see `kept_busy`.
    """
    begin, end = min(job.submit for job in jobs), max(job.submit for job in jobs)
    hours = max(end - begin, max(job.duration for job in jobs) / 4, 1.0) / 3600
    work = sum(job.work for job in jobs) / 3600
    largest = max(job.gpus for job in jobs)
    nodes = max(math.ceil(work / hours / load / gpus), math.ceil(largest / gpus), 1)
    why = (
        f"{nodes} nodes because {work:,.0f} GPU-hours are asked of {hours:,.1f} h: {load:.0%} load"
    )
    return SimulatedCluster(nodes=nodes, gpus=gpus, rack=rack), f"{why}; override: --nodes"
