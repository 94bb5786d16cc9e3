"""Why does waiting explode before a server is full?

One row, equal answers, Poisson arrivals: an M/D/1 queue, whose mean wait is known in closed form,

    wait = service * rho / (2 (1 - rho))           rho = arrivals a second * seconds of service

and the engine's real scheduler, simulated on a drawn trace, has to show the same. The tail grows faster still.
"""

import random

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

STEP_S, OUTPUTS = 0.01, 8
SERVICE_S = STEP_S * OUTPUTS
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)


def mean_wait(rho: float) -> float:
    """Pollaczek and Khinchine, for services that do not vary."""
    return SERVICE_S * rho / (2 * (1 - rho))


def waits(rho: float, count: int, rows: int = 1, seed: int = 1) -> list[float]:
    """Seconds in line, sorted, as the engine's scheduler makes them."""
    from cairn.bench.arrivals import times
    from cairn.labs.serving._engine import ask
    from cairn.serve.engine.request import Limits
    from cairn.serve.simulate import Arrival, simulate

    limits = Limits(
        rows=rows, step_tokens=256, context=256, pages=1024, page_size=16, vocabulary=64
    )
    moments = times("poisson", rho * rows / SERVICE_S, random.Random(seed), count=count)
    trace = [Arrival(at, ask(number, [1], OUTPUTS)) for number, at in enumerate(moments)]
    result = simulate(trace, limits, lambda step: STEP_S, prefix_caching=False)
    return sorted(outcome.queue or 0.0 for outcome in result.outcomes)


def run(bench: Workbench) -> Outcome:
    count = bench.setting("requests", bench.pick(3000, 2000))
    rows, theory, mean, tail = [], [], [], []
    for rho in bench.pick(LOADS, (0.5, 0.8)):
        bench.step(f"{rho:.0%} load, {count} requests through the scheduler")
        waits_s = waits(rho, count)
        theory.append((rho, mean_wait(rho) * 1e3))
        mean.append((rho, sum(waits_s) / len(waits_s) * 1e3))
        tail.append((rho, waits_s[int(0.99 * len(waits_s))] * 1e3))
        rows.append([rho, theory[-1][1], mean[-1][1], tail[-1][1]])
    bench.step("the same load on four rows")
    pooled = waits(0.8, count, rows=4)
    return Outcome(
        checks=[
            Check(
                what=Words("mean wait at 50% load", "50% 负载的平均等待"),
                predicted=dict(theory)[0.5],
                measured=dict(mean)[0.5],
                unit="ms",
                within=0.15,
            ),
            Check(
                what=Words("mean wait at 80% load", "80% 负载的平均等待"),
                predicted=dict(theory)[0.8],
                measured=dict(mean)[0.8],
                unit="ms",
                within=0.15,
            ),
            Check(
                what=Words(
                    "wait with four rows over one, at 80%", "80% 负载下四行与一行的等待之比"
                ),
                predicted=0.5,
                measured=sum(pooled) / len(pooled) * 1e3 / dict(mean)[0.8],
                unit="x",
                kind="at_most",
            ),
        ],
        plots=[
            Plot(
                title=Words("Waiting by load", "等待随负载的变化"),
                x=Words("load", "负载"),
                y=Words("milliseconds in line", "排队毫秒数"),
                lines={"theory, mean": theory, "scheduler, mean": mean, "scheduler, p99": tail},
                log_y=True,
            )
        ],
        table=_table(rows),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("load", "负载"),
            Words("M/D/1 mean, ms", "M/D/1 平均（毫秒）"),
            Words("scheduler mean, ms", "调度器平均（毫秒）"),
            Words("scheduler p99, ms", "调度器 p99（毫秒）"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
