import random

from cairn.labs.exercises.grading import Attempt, Figure, case, close, require

YEAR = 365 * 86400.0


@case(
    "16,384 GPUs of 5 years each fail every 2.7 hours",
    "16,384 张、单卡 5 年 MTBF 的作业约每 2.7 小时故障一次",
)
def mtbf(attempt: Attempt) -> None:
    close(attempt.job_mtbf(5 * YEAR, 16384) / 3600, 5 * YEAR / 16384 / 3600)


@case("the best interval is the bottom of the curve", "最优间隔位于曲线最低点")
def bottom(attempt: Attempt) -> None:
    best = attempt.best_interval(30.0, 10_000.0)
    at = attempt.lost_share(best, 30.0, 120.0, 10_000.0)
    for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
        other = attempt.lost_share(best * factor, 30.0, 120.0, 10_000.0)
        require(other > at, f"{factor}x the interval loses less", f"{factor} 倍间隔损失更小")


@case("a worked number", "一个算例")
def number(attempt: Attempt) -> None:
    close(attempt.best_interval(60.0, 10_800.0), 1138.4199, 1e-4)
    close(attempt.lost_share(1138.42, 60.0, 300.0, 10_800.0), 0.13319, 1e-3)


@case("the formula against a simulated year", "公式与模拟一年的结果")
def simulated(attempt: Attempt) -> Figure:
    dice, write, restart, mtbf = random.Random(0), 20.0, 60.0, 20_000.0
    interval = attempt.best_interval(write, mtbf)
    clock = useful = 0.0
    fails = dice.expovariate(1 / mtbf)
    while clock < YEAR:
        if clock + interval + write > fails:
            clock = fails + restart
            fails = clock + dice.expovariate(1 / mtbf)
            continue
        clock, useful = clock + interval + write, useful + interval
    lost = 1 - useful / clock
    gap = abs(lost - attempt.lost_share(interval, write, restart, mtbf))
    return Figure(gap, 0.005, "of the time")
