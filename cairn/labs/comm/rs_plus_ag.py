"""Is an all-reduce the same as a reduce-scatter followed by an all-gather? In bits, in bytes and in time.

    all-reduce   =   reduce-scatter   +   all-gather
    everyone has     everyone has         everyone has
    the sum          its part of it       the sum

That identity is ZeRO: whoever owns a part of the sum can update that part, and gather weights instead of gradients.
"""

from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import verify
from cairn.labs.comm._timed import slowest_us, times_us
from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

RANKS = 2


def compare(rank: int, count: int, floats: int, rounds: int) -> tuple[int, list[list[float]]]:
    """Elements that differ, and microseconds of the whole and of its two halves."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(rank)
    mine = torch.randn(floats)
    summed, part, again = mine.clone(), torch.empty(floats // count), torch.empty(floats)

    def scatter() -> None:
        dist.reduce_scatter(part, list(mine.chunk(count)))

    def gather() -> None:
        dist.all_gather(list(again.chunk(count)), part)

    dist.all_reduce(summed)
    scatter()
    gather()
    wrong = int((summed != again).sum())
    calls = (lambda: dist.all_reduce(summed), scatter, gather)
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):  # in turns, so that what else runs here meets all
        for call, found in zip(calls, times, strict=True):
            found += times_us(call, 4)
    return wrong, times


def run(bench: Workbench) -> Outcome:
    rows, worst = [], 0.0
    for ranks in (2, 4, 8, 16, 32):
        bench.step(f"bytes and waits of {ranks} ranks")
        whole = verify(make("all_reduce", "ring", ranks))
        scatter = verify(make("reduce_scatter", "ring", ranks))
        gather = verify(make("all_gather", "ring", ranks))
        worst = max(worst, abs(whole.traffic - scatter.traffic - gather.traffic))
        worst = max(worst, abs(whole.steps - scatter.steps - gather.steps))
        rows.append([ranks, whole.traffic, scatter.traffic, gather.traffic, whole.steps])
    bench.step("two real ranks, both ways")
    floats = 4 << 20
    found = run_ranks(RANKS, compare, floats, bench.pick(12, 6), backend="cairn")
    one, first, second = (min(slowest_us([times[i] for _, times in found])) for i in range(3))
    two = first + second
    return Outcome(
        checks=[
            Check(
                what=Words("elements that differ", "结果不同的元素个数"),
                predicted=0,
                measured=sum(wrong for wrong, _ in found),
                unit="elements",
            ),
            Check(
                what=Words("bytes and waits that the identity misses", "字节数与等待次数上的差额"),
                predicted=0.0,
                measured=worst,
                unit="vectors",
            ),
            Check(
                what=Words("time of the two over the one", "两步与一步的耗时比"),
                predicted=2.0,
                measured=two / one,
                unit="x",
                kind="at_most",
            ),
        ],
        table=_table(rows),
        notes=[
            Words(
                f"{floats * 4 >> 20} MiB on {RANKS} ranks: {one / 1e3:.2f} ms as one, {two / 1e3:.2f} ms as two",
                f"{RANKS} 个 rank 上 {floats * 4 >> 20} MiB：一步 {one / 1e3:.2f} ms，两步 {two / 1e3:.2f} ms",
            )
        ],
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("ranks", "rank 数"),
            Words("all-reduce, vectors", "all-reduce 数据量"),
            Words("reduce-scatter", "reduce-scatter"),
            Words("all-gather", "all-gather"),
            Words("waits", "等待次数"),
        ],
        rows=rows,
    )


LAB = Lab(
    name="rs-plus-ag",
    area="comm",
    title=Words(
        "Reduce-scatter + all-gather = all-reduce", "reduce-scatter + all-gather = all-reduce"
    ),
    hypothesis=Words(
        "A reduce-scatter followed by an all-gather gives the bits of an all-reduce, moves exactly as many "
        "bytes, waits as often, and takes at most twice as long: two starts, and copies in and out.",
        "reduce-scatter 之后接 all-gather，结果与 all-reduce 逐位相同，字节数与等待次数完全相等，"
        "耗时最多两倍（两次启动，以及进出缓冲区的拷贝）。",
    ),
    run=run,
    causes=(
        Words(
            "the library takes another schedule for the whole than for its halves, so sums are added in another order",
            "库对整体和两半采用了不同的算法，加法顺序不同",
        ),
        Words(
            "two operations pay the cost of a start twice, which shows on small vectors",
            "两次操作要付两次启动开销，小向量上明显",
        ),
    ),
    code=(
        "cairn/comm/schedule/plan.py:Plan",
        "cairn/comm/schedule/catalogue.py:make",
        "cairn/train/parallel/zero.py:Zero",
    ),
    reading=(
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020)",
        "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (2009)",
    ),
    questions=(
        Question(
            Words(
                "Why does ZeRO-1 cost no more communication than data parallel?",
                "为什么 ZeRO-1 的通信量不比数据并行多？",
            ),
            Words(
                "It reduce-scatters gradients, updates its part, and all-gathers weights: the two halves of the "
                "all-reduce that data parallel does anyway.",
                "它对梯度做 reduce-scatter，更新自己那份，再对权重做 all-gather，正好是数据并行 all-reduce 的两半。",
            ),
        ),
        Question(
            Words("And ZeRO-3?", "那 ZeRO-3 呢？"),
            Words(
                "Weights are gathered in forward and again in backward, then gradients are scattered: three half "
                "operations instead of two, 1.5 times the bytes.",
                "前向、反向各 all-gather 一次权重，再 reduce-scatter 梯度：三个半操作，通信量是 1.5 倍。",
            ),
        ),
        Question(
            Words(
                "Why can two correct all-reduces differ in the last bit?",
                "为什么两个正确的 all-reduce 末位可能不同？",
            ),
            Words(
                "Floating-point addition is not associative: another schedule, another number "
                "of ranks or another chunk "
                "size adds in another order.",
                "浮点加法不满足结合律：算法、rank 数或切块不同，加法顺序就不同。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=3.0,
)
