"""How often should a job write a checkpoint?

    too often    time goes into writing                 w / interval
    too rarely   time goes into work done twice         interval / (2 x MTTF)
    best         interval = sqrt(2 w MTTF)              Young 1974; Daly 2006 for when w is not small

Failures are drawn and the job is lived through with many intervals; the valley has to lie where the formula says.
"""

import math
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.reliability import Scheme

GPUS = 16_384


def run(bench: Workbench) -> Outcome:
    from cairn.cluster.reliability import RATES, SCHEMES, best_interval, mttf
    from cairn.cluster.reliability_monte_carlo import live

    scheme, mean = SCHEMES["sync"], mttf(GPUS, RATES["llama-3"])
    best = best_interval(scheme.write, mean)
    failures = bench.pick(200_000, 40_000)
    lived, formula, rows = [], [], []
    for factor in bench.pick((0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0), (0.5, 1.0, 2.0)):
        bench.step(f"checkpoints every {factor:g} x the best interval")
        interval = factor * best
        one = live(mean, scheme, interval, failures=failures, seed=int(factor * 100))
        exact = productive(interval, scheme, mean)
        lived.append((interval / 60, one.ettr * 100))
        formula.append((interval / 60, exact * 100))
        rows.append([interval / 60, exact * 100, one.ettr * 100, one.error * 100])
    return Outcome(
        checks=_checks(scheme, mean, best, lived),
        plots=[
            Plot(
                title=Words("Productive share by interval", "有效时间比随间隔的变化"),
                x=Words("minutes between checkpoints", "checkpoint 间隔（分钟）"),
                y=Words("% of the time", "时间占比 %"),
                lines={"formula": formula, "lived through": lived},
                log_x=True,
            )
        ],
        table=_table(rows),
        notes=[_note(scheme, mean, best)],
    )


def productive(interval: float, scheme: "Scheme", mean: float) -> float:
    """The share of the time that is training, by the exact formula."""
    from cairn.cluster.reliability import ettr

    return ettr(interval, scheme.write, scheme.outage, mean)


def _checks(scheme: "Scheme", mean: float, best: float, lived: Points) -> list[Check]:
    from cairn.cluster.reliability import daly

    return [
        Check(
            what=Words("best interval, as lived through", "模拟得到的最佳间隔"),
            predicted=best / 60,
            measured=max(lived, key=lambda point: point[1])[0],
            unit="min",
            within=0.45,  # neighbours of the valley differ by less than the noise
        ),
        Check(
            what=Words("productive share at the best interval", "最佳间隔下的有效时间比"),
            predicted=productive(best, scheme, mean) * 100,
            measured=dict(lived)[best / 60],
            unit="%",
            within=0.01,
        ),
        Check(
            what=Words("Daly's formula against the exact optimum", "Daly 公式与精确最优之比"),
            predicted=best,
            measured=daly(scheme.write, mean),
            unit="s",
            within=0.02,
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("interval, min", "间隔（分钟）"),
            Words("formula, %", "公式 %"),
            Words("lived through, %", "模拟 %"),
            Words("standard error, points", "标准误（百分点）"),
        ],
        rows=rows,
    )


def _note(scheme: "Scheme", mean: float, best: float) -> Words:
    from cairn.cluster.reliability import daly, young

    lost = productive(best, scheme, mean) - productive(2 * best, scheme, mean)
    rules = [rule(scheme.write, mean) / 60 for rule in (young, daly)]
    return Words(
        f"{GPUS:,} GPUs at Llama 3's rate fail every {mean / 3600:.1f} h; with {scheme.write:.0f} s a "
        f"checkpoint Young says {rules[0]:.0f} min, Daly {rules[1]:.0f}. Twice the best "
        f"interval costs only {lost * 100:.1f} points: the valley is flat, sqrt makes it forgiving "
        f"({math.sqrt(2):.2f}x for twice the MTTF).",
        f"{GPUS:,} 卡按 Llama 3 的故障率每 {mean / 3600:.1f} 小时坏一次；每次写 {scheme.write:.0f} 秒，Young "
        f"给出 {rules[0]:.0f} 分钟，Daly {rules[1]:.0f} 分钟。间隔加倍只损失 "
        f"{lost * 100:.1f} 个百分点：谷底很平。",
    )


LAB = Lab(
    name="young-daly",
    area="cluster",
    title=Words("How often to write a checkpoint", "多久写一次 checkpoint"),
    hypothesis=Words(
        "The productive share is largest at an interval of sqrt(2 x write x MTTF), and flat around it: missing it "
        "by a factor of two costs little.",
        "有效时间比在间隔 √(2×写入时间×MTTF) 处最大，且附近很平：偏差两倍损失也很小。",
    ),
    run=run,
    causes=(
        Words(
            "failures in bursts (Weibull below 1) favour other intervals",
            "故障成簇（Weibull 形状小于 1）时最优间隔不同",
        ),
        Words(
            "too few failures drawn: the valley is flatter than the noise",
            "抽样太少：谷底比噪声还平",
        ),
    ),
    code=(
        "cairn/cluster/reliability.py:young",
        "cairn/cluster/reliability.py:best_interval",
        "cairn/cluster/reliability_monte_carlo.py:live",
    ),
    reading=(
        "A First Order Approximation to the Optimum Checkpoint Interval (1974)",
        "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps (2006)",
    ),
    questions=(
        Question(
            Words(
                "A checkpoint becomes ten times cheaper. What changes?",
                "checkpoint 便宜十倍，会怎样？",
            ),
            Words(
                "The interval shrinks by sqrt(10), about three, and so does the lost work: both terms of the "
                "overhead fall to a third. The outage of detecting and restarting then dominates.",
                "间隔缩小 √10≈3 倍，重做的工作也缩小到三分之一；之后检测和重启的停机成为主导。",
            ),
        ),
        Question(
            Words(
                "What counts as the cost w when checkpoints are asynchronous?",
                "异步 checkpoint 时 w 是什么？",
            ),
            Words(
                "Only the time that training stands still: the copy to host memory, plus any slowdown while "
                "writing. But a checkpoint protects only once it is complete, so the write time adds to lost work.",
                "只算训练停顿的时间：拷到主机内存，加写入期间的减速。但 checkpoint 写完才生效，"
                "写入时间要算进丢失的工作里。",
            ),
        ),
        Question(
            Words("From which job size on does disk alone not do?", "多大规模后只靠磁盘不够？"),
            Words(
                "When write and restart near the MTTF. At 100k GPUs and 0.23 h between failures a minute of writing "
                "and ten of outage leave a third of the time: copies in peers' memory and hot spares are needed.",
                "当写入与重启时间接近 MTTF 时。10 万卡每 0.23 小时坏一次，写一分钟、停十分钟，只剩三分之一时间可用："
                "需要邻居内存副本和热备。",
            ),
        ),
    ),
    seconds=2.0,
)
