"""Page about a simulated collective: its time, the breakdown, and the slowest ranks.

Plots are inline; nothing is fetched. Knows results, not how they came about.
"""

import math

import numpy as np

from cairn.comm.simulate.collective import CollectiveResult, RailOutcome
from cairn.comm.simulate.topology import FabricTopology
from cairn.core.units import format_bytes, format_duration
from cairn.report.page import bars, element, facts, heading, join, notice, page, paragraph, table
from cairn.report.plot import STYLE, Series, chart


def render(
    top: FabricTopology,
    outcome: RailOutcome,
    sweep: list[CollectiveResult],
    healthy: CollectiveResult | None,
) -> str:
    """`sweep` has other sizes; `healthy` is the same without faults, where there are some."""
    result = outcome.result
    title = f"{result.collective} of {format_bytes(result.bytes)} on {top.gpus:,} GPUs"
    body = [
        paragraph(
            f"{top.name}: {top.nodes:,} nodes of {top.domain}, {top.radix}-port switches, "
            f"{top.oversubscription:g}:1, {top.balance}; simulated chunk by chunk."
        ),
        facts(
            {
                "time": format_duration(result.us / 1e6),
                "bus bandwidth": f"{result.busbw_gb_per_s:.1f} GB/s",
                "schedule": result.algorithm,
                "waits": f"{result.steps:,}",
                "chunks": f"{result.chunks} of {format_bytes(result.chunk_bytes)}",
                "rails simulated": f"{result.rails} of {top.planes}",
                "most flows on a link": str(result.largest_sharing),
            }
        ),
        heading("Where the time goes"),
        bars(
            {
                "simulated": result.us,
                "network alone": result.far_us,
                "NVLink alone": result.near_us,
                "no waits, no sharing": result.ideal_us,
            },
            " us",
        ),
    ]
    if healthy is not None:
        worse = result.us / healthy.us
        names = [*result.faults[:8], *["and more"] * (len(result.faults) > 8)]
        body.append(
            notice(
                "bad",
                f"{', '.join(names) or 'with faults'}: {worse:.2f} x as long as healthy",
            )
        )
    body += [_plots(outcome, sweep), _table(sweep)]
    return page(title, *body, style=STYLE)


def _plots(outcome: RailOutcome, sweep: list[CollectiveResult]) -> str:
    times = np.sort(outcome.finish.max(axis=0))
    shares = np.linspace(0, 100, min(len(times), 400))
    spread = [(float(np.percentile(times, share)) / 1e3, float(share)) for share in shares]
    arrived = outcome.chunk_times
    chunks = [(float(time) / 1e3, float(place + 1)) for place, time in enumerate(arrived)]
    plots = [
        chart("When nodes are done", [Series("nodes", spread)], x="ms", y="% of nodes"),
        chart("Chunks at the last node", [Series("chunks", chunks, "steps")], x="ms", y="chunks"),
    ]
    if len(sweep) > 1:
        points = [(math.log2(one.bytes / (1 << 20)), one.busbw_gb_per_s) for one in sweep]
        plots.append(
            chart("Bus bandwidth by size", [Series("simulated", points)], x="log2 MiB", y="GB/s")
        )
    return element("div", *plots, class_="plots")


def _table(sweep: list[CollectiveResult]) -> str:
    rows = [
        [format_bytes(one.bytes), one.algorithm, f"{one.us:,.1f}", f"{one.busbw_gb_per_s:.1f}"]
        for one in sweep
    ]
    return join([heading("Sizes"), table(["size", "schedule", "us", "busbw GB/s"], rows)])
