"""Why do people quote bus bandwidth? Because it is the one figure that does not change with the number of ranks.

    algbw = bytes / time          falls as ranks are added, though no link got slower
    busbw = algbw * 2(n-1)/n      of an all-reduce: the rate at which each link really worked

Ring all-reduces of 2 to 16 ranks run operation by operation on links of a known rate; then two real ranks show that an
all-reduce takes as long as the two all-gathers whose bytes it moves.
"""

from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import verify
from cairn.comm.simulate.collective import bus_factor
from cairn.comm.simulate.schedule_run import run_schedule
from cairn.comm.simulate.topology import topology
from cairn.labs.comm._timed import slowest_us, times_us
from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

LINK_GB_PER_S = 100.0
SIZE = 1 << 30
RANKS = (2, 4, 8, 16)


def both(rank: int, count: int, floats: int, repeats: int) -> tuple[list[float], list[float]]:
    """Times of an all-reduce and of an all-gather of the same vector."""
    import torch
    import torch.distributed as dist

    whole, mine = torch.ones(floats), torch.ones(floats // count)
    parts = list(torch.empty(floats).chunk(count))
    reduce: list[float] = []
    gather: list[float] = []
    for _ in range(3):  # in turns, so that what else runs here meets both
        reduce += times_us(lambda: dist.all_reduce(whole), repeats)
        gather += times_us(lambda: dist.all_gather(parts, mine), repeats)
    return reduce, gather


def run(bench: Workbench) -> Outcome:
    rows, alg, bus = [], [], []
    wrong_bytes = 0.0
    for ranks in RANKS:
        bench.step(f"ring all-reduce of {ranks} ranks, operation by operation")
        schedule = make("all_reduce", "ring", ranks)
        factor = bus_factor("all_reduce", ranks)
        wrong_bytes = max(wrong_bytes, abs(verify(schedule).traffic - factor))
        top = topology("nvlink", ranks, nvlink_gb_per_s=LINK_GB_PER_S)
        algbw = SIZE / (run_schedule(schedule, top, SIZE).us * 1e3)
        alg.append((float(ranks), algbw))
        bus.append((float(ranks), algbw * factor))
        rows.append([ranks, factor, algbw, algbw * factor])
    bench.step("two real ranks: all-reduce and all-gather")
    floats = bench.setting("n", bench.pick(1 << 20, 1 << 19))
    by_rank = run_ranks(2, both, floats, bench.pick(12, 4), backend="cairn")
    reduce = min(slowest_us([one[0] for one in by_rank]))
    gather = min(slowest_us([one[1] for one in by_rank]))
    return Outcome(
        checks=_checks(wrong_bytes, bus, alg, reduce, gather),
        plots=[
            Plot(
                title=Words("All-reduce of 1 GiB", "1 GiB 的 all-reduce"),
                x=Words("ranks", "rank 数"),
                y=Words("GB/s", "GB/s"),
                lines={"algbw": alg, "busbw": bus},
                log_x=True,
                limit=("link", LINK_GB_PER_S),
            )
        ],
        table=Table(
            columns=[
                Words("ranks", "rank 数"),
                Words("2(n-1)/n", "2(n-1)/n"),
                Words("algbw GB/s", "algbw GB/s"),
                Words("busbw GB/s", "busbw GB/s"),
            ],
            rows=rows,
        ),
    )


def _checks(
    wrong_bytes: float, bus: Points, alg: Points, reduce: float, gather: float
) -> list[Check]:
    return [
        Check(
            what=Words(
                "bytes of the busiest rank against 2(n-1)/n",
                "最忙 rank 的字节数与 2(n-1)/n 之差",
            ),
            predicted=0.0,
            measured=wrong_bytes,
            unit="vectors",
        ),
        Check(
            what=Words("bus bandwidth of 16 ranks", "16 个 rank 的 busbw"),
            predicted=LINK_GB_PER_S,
            measured=bus[-1][1],
            simulated=True,
            unit="GB/s",
            within=0.05,
        ),
        Check(
            what=Words("algorithm bandwidth, 16 ranks over 2", "algbw：16 rank 与 2 rank 之比"),
            predicted=bus_factor("all_reduce", 2) / bus_factor("all_reduce", 16),
            measured=alg[-1][1] / alg[0][1],
            simulated=True,
            unit="x",
            within=0.05,
        ),
        Check(
            what=Words(
                "real all-reduce over all-gather, by time",
                "真实 all-reduce 与 all-gather 的耗时比",
            ),
            predicted=2.0,
            measured=reduce / gather,
            unit="x",
            within=0.5,
        ),
    ]


LAB = described(__file__, run)
