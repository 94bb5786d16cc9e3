"""Files in, findings out: which reader a file needs is seen from what is in it, not from its name.

    pickle or JSON with pg_config   flight recorder of torch, one file for each rank
    NCCL INFO / NCCL WARN           a log of NCCL
    "coll_perf"                     NCCL Inspector
    "cairn comm probe"              our own probe
    size, time, busbw               nccl-tests
    a timeout, a lost connection    what the job itself printed

A file that cannot be read is an error that says so, never an empty list of findings.
"""

from pathlib import Path
from typing import Literal

import msgspec

from cairn.comm.doctor import flight_recorder, job_log, nccl_log, timings
from cairn.comm.doctor.findings import CommFinding, PairProbe, RankTrace, Timed
from cairn.comm.doctor.pairs import examine_probe
from cairn.comm.doctor.traces import examine
from cairn.core.errors import DataError

Kind = Literal["flight recorder", "NCCL log", "Inspector", "probe", "nccl-tests", "job log"]
HEAD = 1 << 16


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[CommFinding]
    read: dict[str, Kind]  # what each file was


def diagnose(paths: list[Path], sizes: list[int] | None = None) -> Diagnosis:
    """`sizes`: bytes of the messages that the job sends, for the sweep to be judged by."""
    files = [file for path in paths for file in _expand(path)]
    read: dict[str, Kind] = {}
    traces: list[RankTrace] = []
    timed: list[Timed] = []
    findings: list[CommFinding] = []
    for path in files:
        kind, text = _kind(path)
        read[str(path)] = kind
        match kind:
            case "flight recorder":
                traces.append(flight_recorder.read_trace(path))
            case "NCCL log":
                findings += nccl_log.examine_log(nccl_log.read_log(path, text))
                findings += job_log.examine_job_log(text)  # one file may have both
            case "Inspector":
                timed += timings.read_inspector(path, text)
            case "probe":
                findings += examine_probe(_probe(path, text))
            case "job log":
                findings += job_log.examine_job_log(text)
            case "nccl-tests":
                findings += timings.examine_sweep(path, sizes)
    _one_each(traces)
    return Diagnosis(
        findings=examine(traces) + timings.examine_timings(timed) + findings, read=read
    )


def _expand(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file())
    if not files:
        raise DataError(f"{path} is an empty folder", hint="give files, or a folder of dumps")
    return files


def _kind(path: Path) -> tuple[Kind, str]:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}", hint="give a file that exists"
        ) from None
    if not head.strip():
        raise DataError(f"{path} is empty", hint="was it written before the job ended?")
    if flight_recorder.looks_like(head):
        return "flight recorder", ""
    if b"\0" in head:
        raise DataError(
            f"{path} is a binary file that is no flight-recorder dump",
            hint="give dumps of torch, logs of NCCL, Inspector JSON or output of nccl-tests",
        )
    text = path.read_text(encoding="utf-8", errors="replace")
    if '"cairn comm probe"' in text[:HEAD]:
        return "probe", text
    if timings.looks_like_inspector(text[:HEAD]):
        return "Inspector", text
    if nccl_log.looks_like(text):
        return "NCCL log", text
    if timings.looks_like_sweep(text):
        return "nccl-tests", text
    if job_log.looks_like(text):
        return "job log", text
    raise DataError(
        f"{path}: nothing in it is known: no line of NCCL, no Inspector JSON, no row of nccl-tests",
        hint="NCCL writes with NCCL_DEBUG=INFO; torch dumps with TORCH_FR_BUFFER_SIZE=2000",
    )


def _probe(path: Path, text: str) -> PairProbe:
    try:
        return msgspec.json.decode(text, type=PairProbe)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: {error}", hint="is it the whole file?") from None


def _one_each(traces: list[RankTrace]) -> None:
    """Two dumps of one rank would be two runs."""
    sources: dict[int, str] = {}
    for trace in traces:
        if trace.rank in sources:
            raise DataError(
                f"{sources[trace.rank]} and {trace.source} are both of rank {trace.rank}",
                hint="give the dumps of one run, with the rank as the last number in each name",
            )
        sources[trace.rank] = trace.source
