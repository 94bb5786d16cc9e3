"""How often should a job write a checkpoint?

    too often    time goes into writing                 w / interval
    too rarely   time goes into work done twice         interval / (2 x MTTF)
    best         interval = sqrt(2 w MTTF)              Young 1974; Daly 2006 for when w is not small

Failures are drawn and the job is lived through with many intervals; the valley has to lie where the formula says.
"""

import math
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.reliability import RecoveryScheme

GPUS = 16_384


def run(bench: Workbench) -> Outcome:
    from cairn.cluster.reliability import RATES, SCHEMES, best_interval, mttf
    from cairn.cluster.reliability_monte_carlo import live

    scheme, mean = SCHEMES["sync"], mttf(GPUS, RATES["llama-3"])
    best = best_interval(scheme.write, mean)
    failures = bench.setting("failures", bench.pick(200_000, 40_000))
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


def productive(interval: float, scheme: "RecoveryScheme", mean: float) -> float:
    """The share of the time that is training, by the exact formula."""
    from cairn.cluster.reliability import ettr

    return ettr(interval, scheme.write, scheme.outage, mean)


def _checks(scheme: "RecoveryScheme", mean: float, best: float, lived: Points) -> list[Check]:
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


def _note(scheme: "RecoveryScheme", mean: float, best: float) -> Words:
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


LAB = described(__file__, run)
