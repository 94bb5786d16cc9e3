"""Finds stragglers, slow networks and small messages in the times of collectives.

Reads NCCL Inspector's JSON and sweeps of nccl-tests. Inspector writes a line for each collective of each rank.
All ranks leave a collective together, so the rank that entered last has the shortest time; if it is always the
same rank, it is the straggler. If all ranks take equally long, and longer than the same bytes take on other
communicators of the same shape, the network of these hosts is slow. Messages below the half-performance size of
the curve are too small.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cairn.comm.cost import fit
from cairn.comm.doctor.findings import CommFinding, Timed
from cairn.comm.nccl_tests import SweepPoint, read_sweeps
from cairn.core.errors import CairnError, DataError
from cairn.core.units import format_bytes

OFTEN, FEWEST = 0.75, 4
WAITED = 2.0  # times what the last one takes
SLOWER = 1.8  # times what a communicator alike takes


def looks_like_inspector(head: str) -> bool:
    return '"coll_perf"' in head or '"p2p_perf"' in head


def looks_like_sweep(text: str) -> bool:
    return "nccl-tests" in text or "#wrong" in text or '"bus_bw"' in text or "out-of-place" in text


def read_inspector(path: Path, text: str) -> list[Timed]:
    rows, bad = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            timed = _timed(msgspec.json.decode(line))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            bad += 1
            if number == 1 or bad > max(2, number // 10):  # the last line of a live file may be cut
                raise DataError(
                    f"{path}:{number}: {type(error).__name__}: {error}",
                    hint="give the JSON that NCCL's Inspector wrote (NCCL_INSPECTOR_DUMP_DIR)",
                ) from None
            continue
        rows += [timed] if timed else []
    if not rows:
        raise DataError(f"{path} has no finished collective", hint="let it run longer")
    return rows


def _timed(line: dict[str, Any]) -> Timed | None:
    performance = line.get("coll_perf")
    if not performance:
        return None
    head, about = line.get("header", line), line.get("metadata", line)
    return Timed(
        communicator=str(head["id"]),
        rank=int(head["rank"]),
        ranks=int(head["n_ranks"]),
        nodes=int(head.get("nnodes", 1)),
        host=str(about.get("hostname", "?")),
        op=str(performance["coll"]),
        sequence=int(performance["coll_sn"]),
        bytes=int(performance["coll_msg_size_bytes"]),
        us=float(performance["coll_exec_time_us"]),
        busbw_gb_per_s=float(performance["coll_busbw_gbs"]),
    )


def examine_timings(rows: list[Timed]) -> list[CommFinding]:
    groups: dict[str, list[Timed]] = defaultdict(list)
    for row in rows:
        groups[row.communicator].append(row)
    findings = []
    for group, mine in groups.items():
        findings += _straggler(group, mine)
    return findings + _slow_hosts(groups) + _small(rows)


def _table(rows: list[Timed]) -> tuple[list[int], np.ndarray]:
    """Ranks, and [collectives, ranks] of their times, where all ranks wrote a line."""
    times: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        times[row.sequence][row.rank] = row.us
    ranks = sorted({row.rank for row in rows})
    whole = [mine for mine in times.values() if len(mine) == len(ranks)]
    return ranks, np.array([[mine[rank] for rank in ranks] for mine in whole])


def _straggler(group: str, rows: list[Timed]) -> list[CommFinding]:
    ranks, times = _table(rows)
    if len(ranks) < 3 or len(times) < FEWEST:
        return []
    shortest = times.argmin(axis=1)
    rank, count = Counter(shortest.tolist()).most_common(1)[0]
    others = np.delete(times, rank, axis=1)
    ratio = float(np.median(np.median(others, axis=1) / times[:, rank]))
    if count < OFTEN * len(times) or ratio < WAITED:
        return []
    waited_us = float(np.median(np.median(others, axis=1) - times[:, rank]))
    host = next(row.host for row in rows if row.rank == ranks[rank])
    return [
        CommFinding(
            cause="straggler",
            where=f"rank {ranks[rank]} on {host}",
            evidence=[
                f"shortest in {count} of {len(times)} collectives of communicator {group}: it came last",
                f"the others spent {waited_us / 1e3:.2f} ms more in each (median), waiting for it",
            ],
            advice="its computation is slow, not the network: clocks, throttling, data loading, host load",
        )
    ]


def _slow_hosts(groups: dict[str, list[Timed]]) -> list[CommFinding]:
    """Communicators of one shape beside each other: one whose transfers all take longer."""
    shapes: dict[tuple[str, int, int, int], dict[str, list[float]]] = defaultdict(dict)
    for group, rows in groups.items():
        best: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
        by_sequence: dict[int, list[Timed]] = defaultdict(list)
        for row in rows:
            by_sequence[row.sequence].append(row)
        for same in by_sequence.values():
            one = min(same, key=lambda row: row.us)  # the last to come: nothing but transfer
            best[one.op, one.bytes, one.ranks, one.nodes].append(one.us)
        for shape, times in best.items():
            shapes[shape][group] = times
    findings = {}
    for (op, size, _, _), times in shapes.items():
        if len(times) < 3:
            continue
        usual = {group: float(np.median(mine)) for group, mine in times.items()}
        middle = float(np.median(list(usual.values())))
        for group, us in usual.items():
            if us > SLOWER * middle and group not in findings and len(times[group]) >= FEWEST:
                hosts = sorted({row.host for row in groups[group]})
                findings[group] = CommFinding(
                    cause="slow network",
                    where=", ".join(hosts[:4]),
                    evidence=[
                        f"{op} of {format_bytes(size)} takes {us:.0f} us in communicator {group}, "
                        f"{middle:.0f} us in {len(times) - 1} others alike",
                        "all its ranks take equally long: the transfer is slow, no rank is late",
                    ],
                    advice="look at the links and NICs of these hosts; "
                    "`cairn comm doctor --probe` between them finds the one",
                )
    return list(findings.values())


def _small(rows: list[Timed]) -> list[CommFinding]:
    """Most of the time goes into messages that are shorter than the latency allows."""
    best: dict[int, float] = {}
    for row in rows:
        best[row.bytes] = min(best.get(row.bytes, float("inf")), row.us)
    points = [SweepPoint(size, us) for size, us in sorted(best.items()) if size > 0 and us > 0]
    if len(points) < 4 or points[-1].bytes < 64 * points[0].bytes:
        return []
    spent = Counter[int]()
    for row in rows:
        spent[row.bytes] += row.us  # pyrefly: ignore
    return _too_small(points, dict(spent), "these collectives")


def examine_sweep(path: Path, expects: list[int] | None = None) -> list[CommFinding]:
    """`expects`: sizes of the messages that the job sends; without them only the sweep is judged."""
    findings = []
    for sweep in read_sweeps(path):
        of = f" of {sweep.label}" if sweep.label else ""
        if sweep.wrong:
            findings.append(_wrong_values(path.name + of, sweep.wrong))
        if expects and len(sweep.points) >= 4:
            whose = f"the messages asked about{of}"
            findings += _too_small(sweep.points, dict.fromkeys(expects, 1.0), whose)
        findings += _dip(sweep.least, of)  # a mean of few iterations may have one bad one
    return findings


def _too_small(points: list[SweepPoint], spent: dict[int, float], whose: str) -> list[CommFinding]:
    try:
        curve = fit(points)
    except CairnError:
        return []
    half = curve.half_bytes
    total = sum(spent.values())
    below = sum(time for size, time in spent.items() if size < half)
    if not total or below < 0.5 * total or half < 2 * min(spent):
        return []
    return [
        CommFinding(
            cause="message too small",
            where=f"{whose}: below {format_bytes(half)}",
            evidence=[
                f"latency {curve.latency_us:.1f} us, {curve.gb_per_s:.1f} GB/s for large messages: "
                f"below {format_bytes(half)} more than half of the bandwidth is lost",
                f"{below / total:.0%} of {whose} are smaller",
            ],
            advice=f"send larger messages: buckets of {format_bytes(8 * half)} or more "
            "(bucket_cap_mb of DDP, larger FSDP units), or fewer, fused collectives",
        )
    ]


def _dip(points: list[SweepPoint], of: str) -> list[CommFinding]:
    """A size that takes longer than one four times larger: congestion, or a bad choice of algorithm."""
    for small, large in zip(points, points[2:], strict=False):
        if small.us > 1.5 * large.us and small.bytes < large.bytes:
            return [
                CommFinding(
                    cause="slow network",
                    where=f"messages of {format_bytes(small.bytes)}{of}",
                    evidence=[
                        f"{format_bytes(small.bytes)} takes {small.us:.0f} us, "
                        f"{format_bytes(large.bytes)} only {large.us:.0f} us"
                    ],
                    advice="measure again; if it stays, let `cairn comm tune --measured` choose the "
                    "algorithm, and look for congestion at that time",
                )
            ]
    return []


def _wrong_values(where: str, lines: list[str]) -> CommFinding:
    return CommFinding(
        cause="wrong result",
        where=where,
        evidence=lines[:4],
        advice="data is damaged on the way: memory or link errors; take these hosts out",
    )
