"""Why does waiting explode before a server is full?

One row, equal answers, Poisson arrivals: an M/D/1 queue, whose mean wait is known in closed form,

    wait = service * rho / (2 (1 - rho))           rho = arrivals a second * seconds of service

and the engine's real scheduler, simulated on a drawn trace, has to show the same. The tail grows faster still.
"""

import random

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Rows, Table, Words
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
    count = bench.pick(6000, 2000)
    rows, theory, mean, tail = [], [], [], []
    for rho in bench.pick(LOADS, (0.5, 0.8)):
        bench.step(f"{rho:.0%} load, {count} requests through the scheduler")
        found = waits(rho, count)
        theory.append((rho, mean_wait(rho) * 1e3))
        mean.append((rho, sum(found) / len(found) * 1e3))
        tail.append((rho, found[int(0.99 * len(found))] * 1e3))
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


LAB = Lab(
    name="queueing",
    area="serving",
    title=Words("Queueing, load and the p99", "排队、负载与 p99"),
    hypothesis=Words(
        "With one row and equal answers the engine is an M/D/1 queue: the mean wait is S rho / (2 (1 - rho)), so it "
        "quadruples from 50% to 80% load; several rows behind one line wait far less than one row at the same load.",
        "单行、等长回答时引擎就是 M/D/1 队列：平均等待 S·ρ/(2(1-ρ))，从 50% 到 80% 负载涨四倍；同样负载下，"
        "一条队列后面多行的等待远小于单行。",
    ),
    run=run,
    causes=(
        Words(
            "too few requests: the mean of a queue near its limit converges slowly",
            "请求数太少：接近饱和时均值收敛很慢",
        ),
        Words(
            "the scheduler lets somebody overtake, or a row stays idle a step",
            "调度器允许插队，或某一步有空行",
        ),
    ),
    code=(
        "cairn/serve/simulate.py:simulate",
        "cairn/serve/engine/waiting_queue.py:WaitingQueue",
        "cairn/bench/arrivals.py:poisson",
    ),
    reading=("The Tail at Scale (2013)", "Queueing Systems, Volume 1: Theory (1975)"),
    questions=(
        Question(
            Words(
                "A team wants to run its GPUs at 95% load. What do you tell them?",
                "团队想让 GPU 跑到 95% 负载，你怎么说？",
            ),
            Words(
                "Mean waiting is proportional to rho / (1 - rho): 19 at 95% against 2.3 at 70%, and p99 more. "
                "Either accept the tail, pool more replicas behind one line, or fill with work that can wait.",
                "平均等待正比于 ρ/(1-ρ)：95% 时是 19，70% 时是 2.3，p99 更糟。要么接受长尾，"
                "要么把更多副本放到同一队列后，要么用可延后的任务填满。",
            ),
        ),
        Question(
            Words("Why is a mean of latencies not enough?", "为什么只看平均延迟不够？"),
            Words(
                "A page that makes 20 calls meets the p95 of one call almost two times in three (1 - 0.95^20 = "
                "64%). Promises are therefore made about p99.",
                "一个页面发 20 次调用，遇到单次 p95 的概率约 64%（1 - 0.95^20）。所以承诺要以 p99 为准。",
            ),
        ),
        Question(
            Words("What does variance of answer lengths do?", "回答长度的方差有什么影响？"),
            Words(
                "The wait is multiplied by (1 + C^2) / 2, C the coefficient of variation of the service: equal "
                "lengths are the best case, exponential ones double it.",
                "等待要乘以 (1 + C²)/2，C 是服务时间的变异系数：等长是最好情形，指数分布翻倍。",
            ),
        ),
    ),
    seconds=4.0,
)
