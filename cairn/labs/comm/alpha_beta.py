"""Is a message's time really a latency plus bytes over bandwidth? Two constants from two sizes, then predict the rest.

    time(n) = alpha + n / beta        half of the bandwidth is lost at n = alpha * beta

Two ranks send a message to and fro over gloo. The smallest size gives alpha, the largest beta; every size between them
was not looked at when the prediction was made.
"""

from statistics import median

from cairn.comm.cost import LinkCost, fit
from cairn.comm.nccl_tests import SweepPoint
from cairn.labs.comm._timed import times_us
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

SIZES = (1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20)
QUICK_SIZES = (1 << 10, 64 << 10, 1 << 20, 8 << 20)


def ping_pong(rank: int, count: int, sizes: tuple[int, ...], repeats: int) -> list[float]:
    """Microseconds of one way, the best of several, for each size."""
    import torch
    import torch.distributed as dist

    def there_and_back(message: torch.Tensor) -> None:
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)

    times = []
    for size in sizes:
        message = torch.ones(size // 4)
        times.append(min(times_us(lambda m=message: there_and_back(m), repeats)) / 2)
    return times


def link_of(small: tuple[int, float], large: tuple[int, float]) -> LinkCost:
    """Alpha and beta through two points of (bytes, microseconds)."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return LinkCost(alpha_us=small[1] - slope * small[0], gb_per_s=1e-3 / slope)


def run(bench: Workbench) -> Outcome:
    sizes = bench.pick(SIZES, QUICK_SIZES)
    bench.step("two ranks, a message to and fro")
    best = run_ranks(2, ping_pong, sizes, bench.pick(40, 10))[0]
    link = link_of((sizes[0], best[0]), (sizes[-1], best[-1]))
    half = link.alpha_us * 1e3 * link.gb_per_s
    model = [link.alpha_us + size / (1e3 * link.gb_per_s) for size in sizes]
    middle = range(1, len(sizes) - 1)
    errors = [abs(best[i] / model[i] - 1) for i in middle]
    rates = [size / us / 1e3 for size, us in zip(sizes, best, strict=True)]
    planned = fit([SweepPoint(size, us) for size, us in zip(sizes, best, strict=True)])
    return Outcome(
        checks=[
            Check(
                what=Words("median error of the sizes between", "中间各尺寸的预测误差中位数"),
                predicted=0.35,
                measured=median(errors),
                unit="share",
                kind="at_most",
            ),
            Check(
                what=Words("large message over small, by rate", "大消息与最小消息的速率之比"),
                predicted=(sizes[-1] / model[-1]) / (sizes[1] / model[1]),
                measured=rates[-1] / rates[1],
                unit="x",
                within=0.4,
            ),
            Check(
                what=Words(
                    "median error of the planner's fit, all sizes",
                    "规划器拟合的误差中位数（所有尺寸）",
                ),
                predicted=0.35,
                measured=planned.median_error,
                unit="share",
                kind="at_most",
            ),
        ],
        plots=[_plot(sizes, model, best)],
        table=Table(
            columns=[
                Words("bytes", "字节"),
                Words("predicted us", "预测 us"),
                Words("measured us", "实测 us"),
                Words("GB/s", "GB/s"),
            ],
            rows=[list(row) for row in zip(sizes, model, best, rates, strict=True)],
        ),
        notes=[
            Words(
                f"alpha {link.alpha_us:.0f} us, beta {link.gb_per_s:.2f} GB/s: below {half / 1024:.0f} KiB "
                "more than half of the time is latency",
                f"alpha {link.alpha_us:.0f} us，beta {link.gb_per_s:.2f} GB/s：小于 {half / 1024:.0f} KiB 的消息，"
                "一半以上时间是延迟",
            )
        ],
    )


def _plot(sizes: tuple[int, ...], model: list[float], best: list[float]) -> Plot:
    return Plot(
        title=Words("Time of a message", "消息耗时"),
        x=Words("bytes", "字节"),
        y=Words("us", "微秒"),
        lines={
            "alpha + n/beta": list(zip(sizes, model, strict=True)),
            "measured": list(zip(sizes, best, strict=True)),
        },
        log_x=True,
        log_y=True,
    )


LAB = described(__file__, run)
