"""Is a message's time really a latency plus bytes over bandwidth? Two constants from two sizes, then predict the rest.

    time(n) = alpha + n / beta        half of the bandwidth is lost at n = alpha * beta

Two ranks send a message to and fro over gloo. The smallest size gives alpha, the largest beta; every size between them
was not looked at when the prediction was made.
"""

from statistics import median

from cairn.comm.cost import Link
from cairn.labs.comm._timed import times_us
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
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

    found = []
    for size in sizes:
        message = torch.ones(size // 4)
        found.append(min(times_us(lambda m=message: there_and_back(m), repeats)) / 2)
    return found


def link_of(small: tuple[int, float], large: tuple[int, float]) -> Link:
    """Alpha and beta through two points of (bytes, microseconds)."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return Link(alpha_us=small[1] - slope * small[0], gb_per_s=1e-3 / slope)


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


LAB = Lab(
    name="alpha-beta",
    area="comm",
    title=Words("What does a message cost?", "一条消息的开销是多少？"),
    hypothesis=Words(
        "Two constants, fixed by the smallest and the largest message, predict every size "
        "between them: a message costs a "
        "latency and its bytes, and nothing else.",
        "用最小和最大两条消息定出的两个常数，就能预测中间所有尺寸：一条消息的开销只有固定延迟和字节传输时间两部分。",
    ),
    run=run,
    causes=(
        Words(
            "gloo changes how it sends between small and large messages, so the middle sizes have other constants",
            "gloo 对小消息和大消息采用不同的发送方式，中间尺寸的常数不同",
        ),
        Words(
            "the machine was busy: the two ranks and the kernel's TCP work share the same cores",
            "机器繁忙：两个 rank 与内核 TCP 处理共用同样的核",
        ),
    ),
    code=("cairn/comm/cost.py:estimate", "cairn/comm/cost.py:fit", "cairn/labs/ranks.py:run_ranks"),
    reading=(
        "The communication challenge for MPP: Intel Paragon and Meiko CS-2 (1994)",
        "LogP: Towards a Realistic Model of Parallel Computation (1993)",
    ),
    questions=(
        Question(
            Words(
                "Which message size loses half of the bandwidth to latency?",
                "多大的消息会有一半带宽损失在延迟上？",
            ),
            Words(
                "n = alpha * beta: there both terms are equal. With 10 us and 50 GB/s it is 500 KB, which is why "
                "gradients are sent in buckets of tens of megabytes.",
                "n = alpha * beta，此时两项相等。10 us、50 GB/s 时为 500 KB，所以梯度要攒成几十 MB 的桶再发送。",
            ),
        ),
        Question(
            Words(
                "How do you measure alpha and beta in practice?", "实际中如何测出 alpha 和 beta？"
            ),
            Words(
                "Alpha from many tiny ping-pongs (half the round trip), beta from the slope between large messages; "
                "one size alone can give neither.",
                "alpha 取大量极小消息 ping-pong 往返时间的一半，beta 取大消息之间的斜率；只测一个尺寸两者都得不到。",
            ),
        ),
        Question(
            Words("What does the model leave out?", "这个模型忽略了什么？"),
            Words(
                "Contention, protocol switches (eager against rendezvous, LL against Simple), pipelines that fill, and "
                "topology: real curves have kinks where the library changes its algorithm.",
                "拥塞竞争、协议切换（eager 与 rendezvous，LL 与 Simple）、流水线填充以及拓扑；"
                "真实曲线在库切换算法处会有拐点。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=4.0,
)
