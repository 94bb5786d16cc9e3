"""Is an operation bound by memory or by arithmetic? Predict it from two ceilings, then watch it turn.

A product of n x n matrices does 2n³ FLOP over 3n² numbers, so its intensity grows with n: small ones wait for memory,
large ones for the arithmetic. The roofline says at which intensity that turns.
"""

from typing import TYPE_CHECKING

from cairn.hw.ceilings import rate as rate_of
from cairn.hw.roofline import floor
from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    import torch

    from cairn.hw.ceilings import Measured

SIZES = (64, 128, 256, 512, 1024)
GPU_SIZES = (256, 512, 1024, 2048, 4096, 8192)


def run(bench: Workbench) -> Outcome:
    import torch

    dtype, name = (torch.bfloat16, "bf16") if bench.on_gpu else (torch.float32, "fp32")
    sizes = GPU_SIZES if bench.on_gpu else bench.pick(SIZES, SIZES[1:4])
    rate = bench.ceilings.matmul[name].value
    measured, limit, rows, found = [], [], [], []
    for n in sizes:
        bench.step(f"matrix product {n} x {n}")
        pairs = [(torch.randn(n, n, dtype=dtype, device=bench.device),) * 2 for _ in range(4)]
        timing = bench.time(torch.matmul, pairs)
        seconds = timing.median_s
        flops, moved = 2.0 * n**3, 3.0 * n * n * dtype.itemsize
        found.append(rate_of(flops, "FLOP/s", timing, f"lab roofline, {n} x {n}"))
        best = floor(flops, moved, name, bench.ceilings, in_graph=False)
        measured.append((flops / moved, flops / seconds / 1e9))
        limit.append((flops / moved, flops / best.seconds / 1e9))
        rows.append([n, flops / moved, best.bound, flops / seconds / 1e9, best.share(seconds)])
    adding, bandwidth = _addition(bench, dtype, name)
    return Outcome(
        checks=[
            Check(
                what=Words("rate of the largest product", "最大矩阵乘的速率"),
                predicted=rate / 1e9,
                measured=measured[-1][1],
                unit="GFLOP/s",
                within=0.35,
            ),
            adding,
        ],
        plots=[
            Plot(
                title=Words("Roofline", "屋顶线"),
                x=Words("FLOP per byte", "每字节浮点运算数"),
                y=Words("GFLOP/s", "GFLOP/s"),
                lines={"roofline": limit, "measured": measured},
                log_x=True,
                log_y=True,
            )
        ],
        table=_table(rows),
        # The best of them is a rate that this machine reaches: a better ceiling than a busy moment's.
        calibrates={f"matmul.{name}": max(found, key=lambda one: one.value), "copy": bandwidth},
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("n", "n"),
            Words("FLOP/byte", "FLOP/字节"),
            Words("bound by", "受限于"),
            Words("GFLOP/s", "GFLOP/s"),
            Words("share of the limit", "达到上限的比例"),
        ],
        rows=rows,
    )


def _addition(bench: Workbench, dtype: "torch.dtype", name: str) -> "tuple[Check, Measured]":
    """The other side of the ridge: an addition can only be as fast as memory."""
    import torch

    count = bench.pick(1 << 25, 1 << 24)
    a, b, out = (torch.ones(count, dtype=dtype, device=bench.device) for _ in range(3))
    bench.step("addition, far left of the ridge")
    timing = bench.time(lambda: torch.add(a, b, out=out))
    moved = 3.0 * count * a.element_size()
    best = floor(count, moved, name, bench.ceilings, in_graph=False)
    check = Check(
        what=Words("bandwidth of an addition", "加法的访存带宽"),
        predicted=moved / best.seconds / 1e9,
        measured=moved / timing.p10_s / 1e9,  # what the memory can do, not its neighbours
        unit="GB/s",
        within=0.5,
    )
    return check, rate_of(moved, "B/s", timing, f"lab roofline, additions of {count:,} numbers")


LAB = described(__file__, run)
