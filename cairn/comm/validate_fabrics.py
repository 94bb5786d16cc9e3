"""Validation of cost model and simulator against published figures, with three constants for each fabric.

A fabric has three constants, whatever the number of its nodes: GB200 is one fabric with 72, 144 and
1,440 GPUs. Constants are fitted to the figures that they are compared with, so the errors say how well
three numbers describe a fabric, not how well a new one would be foretold; `validate` has held-out
errors for the sweeps. Knows no terminal.

    python -m cairn.comm.validate_fabrics        the table, as Markdown
"""

from typing import Literal

import msgspec
import numpy as np

from cairn.comm.nccl_model import NcclCalibration, NcclCluster, calibrate, choose, cluster_of
from cairn.comm.published import (
    ALL_REDUCE,
    DEEPEP,
    DEEPEP_EXPERTS,
    DEEPEP_HIDDEN,
    DEEPEP_NODES_OF_A_TOKEN,
    DEEPEP_NORMAL_TOKENS,
    DEEPEP_SOURCE,
    DEEPEP_TOKENS,
    SWITCHES,
    ExpertFigure,
    PublishedSweep,
    Switch,
)
from cairn.comm.simulate.experts import ExpertExchange, ExpertMachine, direct_us, forwarded_gb_per_s
from cairn.comm.simulate.fabrics import (
    Domain,
    Domains,
    descend,
    domains_us,
    fit_domain,
    fit_domains,
    one_domain_us,
)
from cairn.core.units import format_bytes

Model = Literal["cost", "simulator"]
GOAL = 0.10  # median relative error
FABRICS: dict[str, tuple[str, ...]] = {
    "A100, NVLink": ("8 x A100",),
    "H200, NVLink": ("8 x H200",),
    "B200, NVLink": ("8 x B200",),
    "B200, EFA": ("4 x 8 B200, EFA",),
    "H100, InfiniBand with SHARP": ("8 x 8 H100, SHARP",),
    "GB200 NVL72": ("GB200, 72 GPUs", "GB200, 2 x 72 GPUs", "GB200, 20 x 72 GPUs"),
}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    what: str
    unit: str
    published: float
    predicted: float
    how: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


class FabricError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one model on one fabric."""

    fabric: str
    model: Model
    source: str
    constants: dict[str, float]
    median_error: float
    worst_error: float
    figures: list[Figure]


class SwitchPoint(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    model: Model
    change: str
    how: str
    published_bytes: int
    predicted_bytes: int

    @property
    def factor(self) -> float:
        ratio = self.predicted_bytes / self.published_bytes
        return max(ratio, 1 / ratio)


class FabricReport(msgspec.Struct, frozen=True, kw_only=True):
    compared: list[FabricError]
    switches: list[SwitchPoint]
    median_error: dict[str, float]  # of each model, over all figures
    ok: bool


def report() -> FabricReport:
    sweeps = {sweep.name: sweep for sweep in ALL_REDUCE}
    compared, fits = [], {}
    for fabric, names in FABRICS.items():
        group = [sweeps[name] for name in names]
        fits[group[0].name] = _fitted(group)
        compared += [_cost(fabric, group), _simulated(fabric, group, fits[group[0].name])]
    compared.append(_experts())
    switches = [
        _switch(sweeps[one.sweep], one, model, fits[one.sweep])
        for one in SWITCHES
        for model in ("cost", "simulator")
    ]
    median = {
        model: float(
            np.median([abs(f.error) for c in compared if c.model == model for f in c.figures])
        )
        for model in ("cost", "simulator")
    }
    # What is chosen is the business of the cost model: the tuner of NCCL is its pattern.
    chosen = [point.factor for point in switches if point.model == "cost"]
    ok = all(row.median_error <= GOAL for row in compared) and max(chosen) <= 2
    return FabricReport(compared=compared, switches=switches, median_error=median, ok=ok)


def markdown(comparison: FabricReport) -> str:
    """Fabrics first, then every figure."""
    lines = _head("fabric | model | figures | median error | worst | three constants")
    for row in comparison.compared:
        constants = ", ".join(f"{name} {value:.4g}" for name, value in row.constants.items())
        lines.append(
            f"| {row.fabric} | {row.model} | {len(row.figures)} | {row.median_error:.1%} | "
            f"{row.worst_error:.1%} | {constants} |"
        )
    total = ", ".join(f"{model} {error:.1%}" for model, error in comparison.median_error.items())
    lines += ["", f"Median over all figures: {total}.", ""]
    lines += _head("cluster | change | published | model | predicted | factor | seen by")
    for point in comparison.switches:
        sizes = [format_bytes(point.published_bytes), format_bytes(point.predicted_bytes)]
        lines.append(
            f"| {point.cluster} | {point.change} | {sizes[0]} | {point.model} | {sizes[1]} | "
            f"{point.factor:.2f} | {point.how} |"
        )
    lines += ["", *_head("cluster | figure | published | cost | error | simulator | error")]
    for (cluster, what), both in _paired(comparison).items():
        one = next(iter(both.values()))
        cells = [
            f"{both[model].predicted:,.5g} | {both[model].error:+.1%}" if model in both else " | "
            for model in ("cost", "simulator")
        ]
        lines.append(
            f"| {cluster} | {what} | {one.published:,.5g} {one.unit} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _paired(comparison: FabricReport) -> dict[tuple[str, str], dict[Model, Figure]]:
    rows: dict[tuple[str, str], dict[Model, Figure]] = {}
    for row in comparison.compared:
        for figure in row.figures:
            rows.setdefault((figure.cluster, figure.what), {})[row.model] = figure
    return rows


def _head(columns: str) -> list[str]:
    return [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]


def _cluster(sweep: PublishedSweep) -> NcclCluster:
    return cluster_of(sweep.fabric, sweep.gpus, sweep.nodes, sweep.nic_gb_per_s)


def _cost(fabric: str, group: list[PublishedSweep]) -> FabricError:
    """NCCL's model; one calibration for all clusters of a fabric."""
    if len(group) == 1:
        calibration, _ = calibrate(_cluster(group[0]), group[0].points)
        constants = {
            "launch us": calibration.launch_us,
            "ramp us": calibration.ramp_us,
            "scale": calibration.scale,
        }
    else:
        calibration = _network_calibration(group)
        nic = calibration.nic_gb_per_s or 0.0
        constants = {
            "launch us": calibration.launch_us,
            "hop us": calibration.hop_us,
            "nic GB/s": nic,
        }
    figures = []
    for sweep in group:
        cluster = _cluster(sweep)
        for point in sweep.points:
            best = choose(cluster, "all_reduce", point.bytes, calibration)
            figures.append(
                _figure(sweep, point.bytes, point.us, best.us, f"{best.algorithm}/{best.protocol}")
            )
    return _compared(fabric, "cost", group[0].source, constants, figures)


def _network_calibration(group: list[PublishedSweep]) -> NcclCalibration:
    """Clusters of one, two and many domains: what differs between them is the network, so it is fitted."""
    points = [(_cluster(sweep), point) for sweep in group for point in sweep.points]

    def calibration(x: np.ndarray) -> NcclCalibration:
        return NcclCalibration(launch_us=float(x[0]), hop_us=float(x[1]), nic_gb_per_s=float(x[2]))

    def loss(x: np.ndarray) -> float:
        ratios = [choose(c, "all_reduce", p.bytes, calibration(x)).us / p.us for c, p in points]
        return float(np.mean(np.abs(np.log(ratios))))

    return calibration(descend(loss, [500.0, 200.0, 10.0]))


def _fitted(group: list[PublishedSweep]) -> Domain | Domains:
    if len(group) == 1 and group[0].nodes == 1:
        return fit_domain(_cluster(group[0]), [(p.bytes, p.us) for p in group[0].points])
    return fit_domains([(_cluster(s), p.bytes, p.us) for s in group for p in s.points])


def _simulated(fabric: str, group: list[PublishedSweep], fitted: Domain | Domains) -> FabricError:
    figures = []
    for sweep in group:
        for point in sweep.points:
            if isinstance(fitted, Domain):
                us, how = one_domain_us(_cluster(sweep), point.bytes, fitted)
            else:
                us, how = domains_us(_cluster(sweep), point.bytes, fitted)
            figures.append(_figure(sweep, point.bytes, point.us, us, how))
    constants = {
        name.replace("_gb_per_s", " GB/s").replace("_", " "): float(value)
        for name, value in msgspec.structs.asdict(fitted).items()
    }
    return _compared(fabric, "simulator", group[0].source, constants, figures)


def _experts() -> FabricError:
    def machine(x: np.ndarray) -> ExpertMachine:
        return ExpertMachine(
            launch_us=float(x[0]), nic_gb_per_s=float(x[1]), nvlink_gb_per_s=float(x[2])
        )

    def loss(x: np.ndarray) -> float:
        candidate = machine(x)
        return float(np.mean([abs(np.log(_expert(one, candidate) / one.value)) for one in DEEPEP]))

    fitted = machine(descend(loss, [20.0, 45.0, 150.0]))
    figures = [
        Figure(
            cluster=f"EP{one.ranks}",
            what=f"{one.kernel} {one.way}",
            unit="GB/s" if one.kernel == "normal" else "us",
            published=one.value,
            predicted=_expert(one, fitted),
            how="all-to-all",
        )
        for one in DEEPEP
    ]
    constants = {
        "launch us": fitted.launch_us,
        "nic GB/s": fitted.nic_gb_per_s,
        "nvlink GB/s": fitted.nvlink_gb_per_s,
    }
    return _compared("H800, DeepEP", "simulator", DEEPEP_SOURCE, constants, figures)


def _expert(one: ExpertFigure, machine: ExpertMachine) -> float:
    normal = one.kernel == "normal"
    # FP8 with a scale of four bytes for each 128 values on the way there, bfloat16 on the way back.
    width = 1 + 4 / 128 if one.way == "dispatch" else 2.0
    exchange = ExpertExchange(
        ranks=one.ranks,
        tokens=DEEPEP_NORMAL_TOKENS if normal else DEEPEP_TOKENS,
        hidden=DEEPEP_HIDDEN,
        experts_per_token=DEEPEP_EXPERTS,
        bytes_per_value=width,
        groups=DEEPEP_NODES_OF_A_TOKEN,
    )
    return forwarded_gb_per_s(exchange, machine) if normal else direct_us(exchange, machine)


def _switch(
    sweep: PublishedSweep, switch: Switch, model: Model, domain: Domain | Domains
) -> SwitchPoint:
    """The first size, four for each power of two, for which the model takes the later one."""
    assert isinstance(domain, Domain), "switches are those of one domain"
    cluster = _cluster(sweep)
    sizes = [int(2 ** (power / 4)) for power in range(4 * 12, 4 * 34)]
    if model == "cost":
        calibration, _ = calibrate(cluster, sweep.points)
        best = (choose(cluster, "all_reduce", size, calibration) for size in sizes)
        names = [f"{one.algorithm}/{one.protocol}" for one in best]
    else:
        names = [one_domain_us(cluster, size, domain)[1] for size in sizes]
    later = (s for s, name in zip(sizes, names, strict=True) if _is(name, switch.after))
    return SwitchPoint(
        cluster=sweep.name,
        model=model,
        change=f"{switch.before} -> {switch.after}",
        how=switch.how,
        published_bytes=switch.bytes,
        predicted_bytes=next(later, sizes[-1]),
    )


def _is(name: str, algorithm: str) -> bool:
    """ring/ll is not ring/ll128."""
    return name == algorithm or (name.startswith(algorithm) and "/" not in algorithm)


def _figure(
    sweep: PublishedSweep, size: int, published: float, predicted: float, how: str
) -> Figure:
    return Figure(
        cluster=sweep.name,
        what=f"all_reduce {format_bytes(size)}",
        unit="us",
        published=published,
        predicted=predicted,
        how=how,
    )


def _compared(
    fabric: str, model: Model, source: str, constants: dict[str, float], figures: list[Figure]
) -> FabricError:
    errors = [abs(figure.error) for figure in figures]
    return FabricError(
        fabric=fabric,
        model=model,
        source=source,
        constants=constants,
        figures=figures,
        median_error=float(np.median(errors)),
        worst_error=max(errors),
    )


if __name__ == "__main__":
    print(markdown(report()), end="")
