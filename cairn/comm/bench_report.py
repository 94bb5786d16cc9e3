"""Reports in the formats of nccl-tests: its table, its JSON, and a page with plots.

    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
            1024           256     float     sum      -1    61.20    0.02    0.02      0    58.11    0.02    0.02      0

Columns, keys and units are those of nccl-tests (JSON version 2), so what reads its output reads this; a row of the JSON
says its backend besides. GB/s are 1e9 bytes; time is the mean over iterations of the slowest rank. Pure.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from cairn.comm.bench_operations import REDUCING
from cairn.comm.bench_spec import BenchRow, BenchTiming, Spec
from cairn.comm.bench_sweep import bus_factor
from cairn.core.units import format_bytes
from cairn.report.page import Markup, facts, heading, join, page, paragraph, table
from cairn.report.page import element as html
from cairn.report.plot import STYLE, Series, chart

JSON_VERSION = 2
WHOSE = {
    "first": "rank 0",
    "mean": "the mean rank",
    "least": "its fastest rank",
    "most": "its slowest rank",
}
PER_ITERATION = ("i_min", "i_max", "i_p99", "i_cv%")


def figure(value: float, width: int) -> str:
    """A number of that width: as many decimals as fit, at most two."""
    digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    return f"{value:{width}.0f}" if digits < width + 1 else f"{value:{width}.1e}"


def bandwidths(spec: Spec, row: BenchRow, timing: BenchTiming, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s."""
    algorithm = row.size / (timing.mean_us * 1e3)
    return algorithm, algorithm * bus_factor(spec.operation, ranks)


def lines(
    spec: Spec,
    rows: Sequence[BenchRow],
    ranks: int,
    per_iteration: bool = False,
    stamped: bool = False,
) -> list[str]:
    """A table for each backend."""
    text = [
        f"# Collective test starting: {spec.operation}_perf",
        f"# nRanks {ranks} "
        f"warmup iters: {spec.warmup} iters: {spec.iterations} validation: {int(spec.check)}",
    ]
    for backend in spec.backends:
        mine = [row for row in rows if row.backend == backend]
        text += ["#", f"# backend: {backend}", "#", *_heads(per_iteration)]
        for row in mine:
            line = _line(spec, row, ranks, per_iteration)
            text.append(f"{line}  {row.at}" if stamped else line)
        wrong = wrong_of(mine)
        text.append(f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}")
        text.append(f"# {'Avg bus bandwidth':<20} : {average(spec, mine, ranks):g} ")
    return [*text, "#", f"# Collective test concluded: {spec.operation}_perf", "#"]


def document(
    spec: Spec,
    rows: Sequence[BenchRow],
    ranks: int,
    *,
    args: Sequence[str],
    started: str,
    ended: str,
    skipped: dict[str, str],
    devices: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    wrong = wrong_of(rows)
    return {
        "version": JSON_VERSION,
        "start_time": started,
        "args": list(args),
        "env": [],
        "nccl_version": 0,
        "config": {
            "nthreads": 1,
            "ngpus": ranks,
            "minimum_bytes": min(spec.sizes),
            "maximum_bytes": max(spec.sizes),
            "warmup_iters": spec.warmup,
            "iterations": spec.iterations,
            "aggregated_iterations": spec.together,
            "validation": int(spec.check),
            "graph": 0,
            "blocking_collectives": "true",
            "per_iter_timing": "true",
            "parallel_init": "false",
            "devices": list(devices),
            "ranks": ranks,
            "backends": spec.backends,
        },
        "results": [_result(spec, row, ranks) for row in rows],
        "out_of_bounds": {"count": wrong, "okay": "true" if wrong == 0 else "false"},
        "average_bus_bandwidth": {"bandwidth": average(spec, rows, ranks), "okay": "unchecked"},
        "per_backend": {
            name: average(spec, [row for row in rows if row.backend == name], ranks)
            for name in spec.backends
        },
        "skipped": skipped,
        "errors": [],
        "end_time": ended,
    }


def plots(spec: Spec, rows: Sequence[BenchRow], ranks: int, started: str) -> str:
    """A page of its own: time, bandwidth and the ratio to the first backend over the size."""
    types = ", ".join(dict.fromkeys(row.type for row in rows))
    about = {"started": started, "type": types, "iterations": str(spec.iterations)}
    return page(
        f"{spec.operation} on {ranks} ranks",
        facts(about),
        paragraph(f"Out of place; the time of an iteration is that of {WHOSE[spec.of_ranks]}."),
        html("div", join(_charts(spec, rows, ranks)), class_="plots"),
        heading("Every size"),
        _sizes_table(spec, rows, ranks),
        style=STYLE,
    )


def _namer(rows: Sequence[BenchRow]) -> Callable[[BenchRow], str]:
    """Label a row by its backend, and by type and reduction if there are several."""
    several = len({(row.type, row.reduction) for row in rows}) > 1
    return lambda row: f"{row.backend} {row.type} {row.reduction}" if several else row.backend


def _charts(spec: Spec, rows: Sequence[BenchRow], ranks: int) -> list[Markup]:
    label = _namer(rows)

    def series(value: Any) -> list[Series]:
        return [
            Series(name, [(math.log2(r.size), value(r)) for r in rows if label(r) == name])
            for name in dict.fromkeys(map(label, rows))
        ]

    def beside(row: BenchRow) -> float:
        base = first[row.size, row.type, row.reduction]
        return row.out_of_place.quantile(0.5) / base.out_of_place.quantile(0.5)

    x = "log2 of the bytes"
    first = {(r.size, r.type, r.reduction): r for r in rows if r.backend == spec.backends[0]}
    charts = [
        chart(
            "Bus bandwidth",
            series(lambda r: bandwidths(spec, r, r.out_of_place, ranks)[1]),
            x=x,
            y="GB/s",
        ),
        chart(
            "Time, median",
            series(lambda r: math.log10(r.out_of_place.quantile(0.5))),
            x=x,
            y="log10 of us",
        ),
        chart(
            "Time, 99th percentile over median",
            series(lambda r: r.out_of_place.quantile(0.99) / r.out_of_place.quantile(0.5)),
            x=x,
            y="times",
        ),
    ]
    if len(spec.backends) > 1:
        charts.append(
            chart(
                f"Median time over {spec.backends[0]}'s",
                series(beside),
                x=x,
                y="times",
                limit=(spec.backends[0], 1.0),
            )
        )
    return charts


def _sizes_table(spec: Spec, rows: Sequence[BenchRow], ranks: int) -> Markup:
    label = _namer(rows)
    table_rows = [
        [
            f"{label(row)}, {format_bytes(row.size)}",
            f"{row.out_of_place.quantile(0.5):,.1f}",
            f"{row.out_of_place.quantile(0.99):,.1f}",
            f"{min(row.out_of_place.times_us):,.1f}",
            f"{bandwidths(spec, row, row.out_of_place, ranks)[1]:.3f}",
            str(row.out_of_place.wrong),
        ]
        for row in rows
    ]
    headings = ["backend, size", "p50 us", "p99 us", "min us", "busbw GB/s", "#wrong"]
    return table(headings, table_rows)


def wrong_of(rows: Sequence[BenchRow]) -> int:
    every = [timing for row in rows for timing in (row.out_of_place, row.in_place) if timing]
    return sum(timing.wrong or 0 for timing in every)


def average(spec: Spec, rows: Sequence[BenchRow], ranks: int) -> float:
    """Mean bus bandwidth over all sizes, in place and out of place."""
    bandwidth = [
        bandwidths(spec, row, timing, ranks)[1]
        for row in rows
        for timing in (row.out_of_place, row.in_place)
        if timing is not None
    ]
    return sum(bandwidth) / len(bandwidth) if bandwidth else 0.0


def _heads(per_iteration: bool) -> list[str]:
    body = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    units = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
    if per_iteration:
        body += "".join(f"  {name:>7}" for name in PER_ITERATION)
        units += "".join(f"  {unit:>7}" for unit in ("(us)", "(us)", "(us)", "(%)"))
    names = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    below = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
    wide = len(body)
    over = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}{'out-of-place':^{wide}}{'in-place':^{wide}}"
    return [over.rstrip(), names + body + body, below + units + units]


def _line(spec: Spec, row: BenchRow, ranks: int, per_iteration: bool) -> str:
    reduction, root = _labels(spec, row)
    text = f"{row.size:>12}  {row.count:>12}  {row.type:>8}  {reduction:>6}  {root:>6}"
    for timing in (row.out_of_place, row.in_place):
        if timing is None:
            text += f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"
            text += f"  {'N/A':>7}" * (4 if per_iteration else 0)
            continue
        algorithm, bus = bandwidths(spec, row, timing, ranks)
        wrong = "N/A" if timing.wrong is None else f"{timing.wrong:g}"
        text += (
            f"  {figure(timing.mean_us, 7)}  {figure(algorithm, 6)}  {figure(bus, 6)}  {wrong:>6}"
        )
        if per_iteration:
            stats = _statistics(timing)
            shown_statistics = (stats["min_us"], stats["max_us"], stats["p99_us"], stats["cv_pct"])
            text += "".join(f"  {figure(value, 7)}" for value in shown_statistics)
    return text


def _labels(spec: Spec, row: BenchRow) -> tuple[str, int]:
    """`none` and -1 where there is no reduction and no root, as nccl-tests has it."""
    rooted = spec.operation in ("broadcast", "reduce", "gather", "scatter")
    return row.reduction if spec.operation in REDUCING else "none", spec.root if rooted else -1


def _result(spec: Spec, row: BenchRow, ranks: int) -> dict[str, Any]:
    reduction, root = _labels(spec, row)
    fields: dict[str, Any] = {
        "backend": row.backend,
        "size": row.size,
        "count": row.count,
        "type": row.type,
        "redop": reduction,
        "root": str(root),
    }
    for key, timing in (("out_of_place", row.out_of_place), ("in_place", row.in_place)):
        if timing is None:
            fields[key] = None
            continue
        algorithm, bus = bandwidths(spec, row, timing, ranks)
        fields[key] = {
            "time": timing.mean_us,
            "alg_bw": algorithm,
            "bus_bw": bus,
            "nwrong": timing.wrong,
        }
        fields[f"{key}_per_iter"] = _statistics(timing)
    fields["actual_iterations"] = len(row.out_of_place.times_us)
    fields["end_time"] = row.at
    fields["experiment_name"] = f"{spec.operation}_perf"
    return fields


def _statistics(timing: BenchTiming) -> dict[str, Any]:
    times, mean = timing.times_us, timing.mean_us
    deviation = math.sqrt(sum((time - mean) ** 2 for time in times) / len(times))
    return {
        "min_us": min(times),
        "max_us": max(times),
        "avg_us": mean,
        "p50_us": timing.quantile(0.5),
        "p95_us": timing.quantile(0.95),
        "p99_us": timing.quantile(0.99),
        "stdev_us": deviation,
        "cv_pct": 100 * deviation / mean if mean else 0.0,
        "times_us": times,
    }
