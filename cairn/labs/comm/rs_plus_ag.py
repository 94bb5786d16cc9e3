"""Is an all-reduce the same as a reduce-scatter followed by an all-gather? In bits, in bytes and in time.

    all-reduce   =   reduce-scatter   +   all-gather
    everyone has     everyone has         everyone has
    the sum          its part of it       the sum

That identity is ZeRO: the rank that owns a part of the sum can update that part, and gather weights in place of
gradients.
"""

from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import verify
from cairn.labs.comm._timed import slowest_us, times_us
from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
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
    by_rank = run_ranks(RANKS, compare, floats, bench.pick(12, 6), backend="cairn")
    one, first, second = (min(slowest_us([times[i] for _, times in by_rank])) for i in range(3))
    two = first + second
    return Outcome(
        checks=[
            Check(
                what=Words("elements that differ", "结果不同的元素个数"),
                predicted=0,
                measured=sum(wrong for wrong, _ in by_rank),
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


LAB = described(__file__, run)
