"""One matrix product on several devices: cut it in two ways, put it together with a collective of ours.

    rows       [A0]       [A0 B]                     inner     [A0 A1] [B0]  =  A0 B0 + A1 B1
               [A1] B  =  [A1 B]   all-gather                          [B1]     all-reduce of whole results

Cut by rows each rank owns a part of the result, and an all-gather joins the parts; cut along the inner dimension each
has a whole but partial result, and an all-reduce adds them. Our cost model says how many bytes pass through a rank:
twice as many for the second, and the verifier counts them in the schedule that runs. Each rank computes on its own GPU
where there are some, else on a core, where its CPU time counts: other programs on the core do not make the work more.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from cairn.comm.cost import shape_of
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import verify
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

RANKS = 2


def run(bench: Workbench) -> Outcome:
    n = bench.setting("n", bench.pick(720, 360))  # no power of two: caches like those least
    if bench.on_gpu:
        n = bench.pick(4096, 2048)
    repeats = bench.pick(5, 3)
    bench.step("one device")
    ((alone, _, _),) = run_ranks(1, one_device, n, repeats, bench.on_gpu)
    bench.step("two devices, two cuts")
    found = run_ranks(RANKS, both_cuts, n, repeats, bench.on_gpu, backend="cairn", timeout_s=60)
    rows, inner = ([rank[way] for rank in found] for way in (0, 1))
    wrong = max(one[2] for one in (*rows, *inner))
    bench.step("counting what the schedules send")
    traffic = {
        "rows": verify(make("all_gather", "ring", RANKS)).traffic,
        "inner": verify(make("all_reduce", "ring", RANKS)).traffic,
    }
    closed = [shape_of(kind, "ring", RANKS).traffic for kind in ("all_gather", "all_reduce")]
    compute = max(one[0] for one in rows), max(one[0] for one in inner)
    joined = max(one[1] for one in rows), max(one[1] for one in inner)
    size = 4 * n * n
    return Outcome(
        checks=[
            Check(
                what=Words("largest error of an element", "元素的最大误差"),
                predicted=1e-4 * n**0.5,
                measured=wrong,
                unit="",
                kind="at_most",
            ),
            Check(
                what=Words(
                    "bytes of the inner cut over the cut by rows", "按内维切与按行切的通信量之比"
                ),
                predicted=closed[1] / closed[0],
                measured=traffic["inner"] / traffic["rows"],
                unit="x",
            ),
            Check(
                what=Words(
                    "compute of half the product over the whole", "半个矩阵乘与整个的计算时间比"
                ),
                predicted=0.5,
                measured=min(compute) / alone,
                unit="x",
                within=0.4,
            ),
        ],
        table=_table(alone, compute, joined, traffic, size),
    )


def _table(
    alone: float,
    compute: tuple[float, float],
    joined: tuple[float, float],
    traffic: dict[str, float],
    size: int,
) -> Table:
    return Table(
        columns=[
            Words("cut", "切法"),
            Words("product, ms", "矩阵乘毫秒"),
            Words("collective, ms", "集合通信毫秒"),
            Words("bytes through a rank, MB", "每 rank 通信 MB"),
            Words("speed-up", "加速比"),
        ],
        rows=[
            ["none", alone * 1e3, 0.0, 0.0, 1.0],
            [
                "by rows, all-gather",
                compute[0] * 1e3,
                joined[0] * 1e3,
                traffic["rows"] * size / 1e6,
                alone / (compute[0] + joined[0]),
            ],
            [
                "inner, all-reduce",
                compute[1] * 1e3,
                joined[1] * 1e3,
                traffic["inner"] * size / 1e6,
                alone / (compute[1] + joined[1]),
            ],
        ],
    )


def one_device(
    rank: int, count: int, n: int, repeats: int, on_gpu: bool
) -> tuple[float, float, float]:
    a, b, _ = _matrices(n, _device(rank, on_gpu))
    return _timed(lambda: a @ b, repeats, clock(on_gpu)), 0.0, 0.0


def both_cuts(
    rank: int, count: int, n: int, repeats: int, on_gpu: bool
) -> list[tuple[float, float, float]]:
    """Of each cut: seconds of the product, of the collective, and the largest error."""
    import torch

    from cairn.train.parallel.collectives import all_gather, all_reduce

    a, b, expected = _matrices(n, _device(rank, on_gpu))
    mine = slice(rank * n // count, (rank + 1) * n // count)
    world = torch.distributed.group.WORLD
    results = []
    for part, other, join in (
        (a[mine].contiguous(), b, lambda x: all_gather(x, world)),
        (a[:, mine].contiguous(), b[mine].contiguous(), lambda x: all_reduce(x, world)),
    ):
        local = (part @ other).cpu()  # our collectives move host memory
        whole = join(local)
        product_s = 0.0
        for turn in range(count):  # one after another: ranks may share a GPU or a core
            if turn == rank:
                product = lambda part=part, other=other: part @ other  # noqa: E731
                product_s = _timed(product, repeats, clock(on_gpu))
            torch.distributed.barrier()
        join_s = _timed(lambda join=join, local=local: join(local), repeats, time.perf_counter)
        results.append((product_s, join_s, float((whole - expected).abs().max())))
    return results


def _matrices(n: int, device: str) -> "tuple[Tensor, Tensor, Tensor]":
    """The same numbers on every rank, and their product."""
    import torch

    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, n, generator=generator).to(device) for _ in range(2))
    return a, b, (a @ b).cpu()


def _device(rank: int, on_gpu: bool) -> str:
    if not on_gpu:
        return "cpu"
    import torch

    return f"cuda:{rank % torch.cuda.device_count()}"


def clock(on_gpu: bool) -> Callable[[], float]:
    """What a product on this device is timed with: the wall, or the CPU time of the rank's one thread."""
    return time.perf_counter if on_gpu else time.thread_time


def _timed(call: Callable[[], object], repeats: int, now: Callable[[], float]) -> float:
    """Seconds of one call, the median; a GPU is waited for."""
    import torch

    seconds = []
    for _ in range(repeats + 1):
        began = now()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(now() - began)
    return median(seconds[1:])


LAB = described(__file__, run)
