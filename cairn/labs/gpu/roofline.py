"""Is an operation bound by memory or by arithmetic? Predict it from two ceilings, then watch it turn.

A product of n x n matrices does 2n³ FLOP over 3n² numbers, so its intensity grows with n: small ones wait for memory,
large ones for the arithmetic. The roofline says at which intensity that turns.
"""

from typing import TYPE_CHECKING, NamedTuple

from cairn.hw.roofline import Floor, floor
from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    import torch

SIZES = (64, 128, 256, 512, 1024)
GPU_SIZES = (256, 512, 1024, 2048, 4096, 8192)


class Point(NamedTuple):
    """One operation: what it does and what it moves, and how long it took."""

    label: str
    flops: float
    moved: float  # bytes
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.moved

    @property
    def rate(self) -> float:
        return self.flops / self.seconds / 1e9


def run(bench: Workbench) -> Outcome:
    import torch

    dtype, name = (torch.bfloat16, "bf16") if bench.on_gpu else (torch.float32, "fp32")
    largest = bench.setting("n", 8192 if bench.on_gpu else 1024)
    sizes = [
        n for n in (GPU_SIZES if bench.on_gpu else bench.pick(SIZES, SIZES[2:])) if n < largest
    ]
    adding = _addition(bench, dtype)
    memory_bound = [adding, _matrix_vector(bench, dtype)]
    products = [_product(bench, n, dtype) for n in [*sizes, largest]]
    rate, copy = bench.ceilings.matmul[name].value, bench.ceilings.copy
    bandwidth = copy.value if copy else adding.moved / adding.seconds
    points = [*memory_bound, *products]
    best = [floor(one.flops, one.moved, name, bench.ceilings, in_graph=False) for one in points]
    rows = [
        [one.label, one.intensity, low.bound, one.rate, low.share(one.seconds)]
        for one, low in zip(points, best, strict=True)
    ]
    # An addition and the largest product are in no cache.
    uncached = [best[0].share(adding.seconds), best[-1].share(products[-1].seconds)]
    return Outcome(
        checks=[*_checks(rate, bandwidth, memory_bound, products), _under_the_roof(uncached)],
        plots=[_plot(points, best)],
        table=_table(rows),
    )


def _checks(rate: float, bandwidth: float, left: list[Point], products: list[Point]) -> list[Check]:
    """The ridge, and both sides of it: a product beyond the roof is as wrong as one far below it."""
    adding, vector = left
    measured_ridge = products[-1].rate * 1e9 / (adding.moved / adding.seconds)
    return [
        Check(
            what=Words("ridge point of this machine", "本机的拐点"),
            predicted=rate / bandwidth,
            measured=measured_ridge,
            unit="FLOP/byte",
            within=0.6,
        ),
        Check(
            what=Words("rate of the largest product", "最大矩阵乘的速率"),
            predicted=rate / 1e9,
            measured=products[-1].rate,
            unit="GFLOP/s",
            within=0.35,
        ),
        Check(
            what=Words("bandwidth of an addition", "加法的访存带宽"),
            predicted=bandwidth / 1e9,
            measured=adding.moved / adding.seconds / 1e9,
            unit="GB/s",
            within=0.5,
        ),
        Check(
            what=Words("product over matrix-vector, FLOP/s", "矩阵乘与矩阵乘向量的 FLOP/s 之比"),
            predicted=2.0,  # left of the ridge the arithmetic units wait
            measured=products[-1].rate / vector.rate,
            unit="x",
            kind="at_least",
        ),
    ]


def _under_the_roof(shares: list[float]) -> Check:
    """`floor` is the least time that an operation can take."""
    return Check(
        what=Words("nearest to its floor, share of the limit", "最接近下限者，达到上限的比例"),
        predicted=1.5,  # the ceilings are those of another moment
        measured=max(shares),
        unit="",
        kind="at_most",
    )


def _product(bench: Workbench, n: int, dtype: "torch.dtype") -> Point:
    import torch

    bench.step(f"matrix product {n} x {n}")
    pairs = [(torch.randn(n, n, dtype=dtype, device=bench.device),) * 2 for _ in range(4)]
    seconds = bench.time(torch.matmul, pairs).median_s
    return Point(f"{n} x {n}", 2.0 * n**3, 3.0 * n * n * dtype.itemsize, seconds)


def _matrix_vector(bench: Workbench, dtype: "torch.dtype") -> Point:
    """Each weight is read for one multiply-add, as in decoding one sequence."""
    import torch

    n = bench.pick(4096, 2048)
    matrix, vector = (
        torch.randn(*shape, dtype=dtype, device=bench.device) for shape in ((n, n), (n,))
    )
    bench.step("matrix times vector, left of the ridge")
    seconds = bench.time(lambda: torch.mv(matrix, vector)).p10_s
    return Point("matrix x vector", 2.0 * n * n, (n * n + 2 * n) * dtype.itemsize, seconds)


def _plot(points: list[Point], best: list[Floor]) -> Plot:
    roof = [(o.intensity, o.flops / low.seconds / 1e9) for o, low in zip(points, best, strict=True)]
    return Plot(
        title=Words("Roofline", "屋顶线"),
        x=Words("FLOP per byte", "每字节浮点运算数"),
        y=Words("GFLOP/s", "GFLOP/s"),
        lines={"roofline": roof, "measured": [(one.intensity, one.rate) for one in points]},
        log_x=True,
        log_y=True,
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("operation", "运算"),
            Words("FLOP/byte", "FLOP/字节"),
            Words("bound by", "受限于"),
            Words("GFLOP/s", "GFLOP/s"),
            Words("share of the limit", "达到上限的比例"),
        ],
        rows=rows,
    )


def _addition(bench: Workbench, dtype: "torch.dtype") -> Point:
    """Far left of the ridge: an addition can only be as fast as memory."""
    import torch

    count = bench.pick(1 << 25, 1 << 24)
    a, b, out = (torch.ones(count, dtype=dtype, device=bench.device) for _ in range(3))
    bench.step("addition, far left of the ridge")
    timing = bench.time(lambda: torch.add(a, b, out=out))
    # The fastest tenth: what the memory can do, not its neighbours.
    return Point("addition", count, 3.0 * count * a.element_size(), timing.p10_s)


LAB = described(__file__, run)
