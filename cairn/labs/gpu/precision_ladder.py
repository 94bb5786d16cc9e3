"""What does each step down in precision buy, and what does it cost?

    speed   GPU: the matmul rates of this machine beside the datasheet's ratios; CPU: float32 has twice float64's lanes
    error   operands rounded to p bits: the product is wrong by 0.555 x 2^-p of its size, whatever the size

The error is that of a uniform rounding inside an octave (2^-p / sqrt(3) of its lower end), averaged over mantissas that
are spread evenly in the logarithm (sqrt(2.164)), for two operands (sqrt(2)).
"""

import math
from typing import Any

from cairn.labs.interleaved_timing import fastest_in_turn
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

BITS = {"tf32": 11, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
MEAN_SQUARE = 3 / (2 * math.log(2))  # of a mantissa in [1, 2), even in the logarithm: 2.164


def predicted_error(bits: int) -> float:
    """Relative error of a product of two random matrices, of which each number was rounded to so many bits."""
    return math.sqrt(2) * 2.0**-bits / math.sqrt(3 * MEAN_SQUARE)


def run(bench: Workbench) -> Outcome:
    checks, rows, points, line = [], [], [], []
    for name, bits in BITS.items():
        bench.step(f"a product in {name}")
        error = _product_error(name, bench.setting("k", bench.pick(512, 256)))
        rows.append([name, bits, predicted_error(bits), error])
        points.append((float(bits), error))
        line.append((float(bits), predicted_error(bits)))
        checks.append(
            Check(
                what=Words(f"error of a product of {name}", f"{name} 乘积的误差"),
                predicted=predicted_error(bits),
                measured=error,
                unit="",
                within=0.15,
            )
        )
    checks += _rates(bench)
    return Outcome(
        checks=checks,
        plots=[
            Plot(
                title=Words("Bits against error", "有效位与误差"),
                x=Words("significand bits", "有效位数"),
                y=Words("relative error of a product", "乘积的相对误差"),
                lines={"0.555 x 2^-p": sorted(line), "measured": sorted(points)},
                log_y=True,
            )
        ],
        table=Table(
            columns=[
                Words("operands", "操作数"),
                Words("bits", "有效位"),
                Words("predicted", "预测"),
                Words("measured", "实测"),
            ],
            rows=rows,
        ),
    )


def _product_error(name: str, size: int) -> float:
    """Against float64; sums are float32, so that only the rounding of the operands counts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    rough = _rounded(a, name) @ _rounded(b, name)
    return float((rough.double() - exact).norm() / exact.norm())


def _rounded(x: Any, name: str) -> Any:
    """To the format and back to float32; tf32 by rounding away the last 13 bits, to nearest even."""
    import torch

    if name != "tf32":
        return x.to(getattr(torch, name)).float()
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def _rates(bench: Workbench) -> list[Check]:
    if bench.on_gpu:
        return _rates_of_gpu(bench)
    import torch

    bench.step("float32 against float64")
    size = bench.pick(
        224, 160
    )  # short calls: a long one is interrupted more often on a busy machine
    shapes = ((torch.float64, size), (torch.float32, 2 * size))  # twice the work in half the bits
    pairs = [
        (torch.randn(size, inner, dtype=dtype), torch.randn(inner, size, dtype=dtype))
        for dtype, inner in shapes
    ]
    calls = [lambda a=a, b=b: torch.mm(a, b) for a, b in pairs]
    with one_thread():
        double_s, single_s = fastest_in_turn(bench.pick(200, 50), *calls)
    return [
        Check(
            what=Words("float32 products over float64", "float32 与 float64 矩阵乘速率之比"),
            predicted=2.0,
            measured=2 * double_s / single_s,
            unit="x",
            within=0.4,
        )
    ]


def _rates_of_gpu(bench: Workbench) -> list[Check]:
    """This machine's rates now, in units of bf16, beside the ratios of the datasheet."""
    from cairn.hw.datasheet import find_chip
    from cairn.hw.measure_device import matmul_rate

    chip, _ = find_chip(bench.ceilings.device_name)
    if chip is None:
        return []
    now = {}
    for dtype in ("tf32", "bf16", "fp8"):
        if dtype in bench.ceilings.matmul and "bf16" in bench.ceilings.matmul:
            bench.step(f"rate of {dtype}")
            now[dtype] = matmul_rate(bench.device, dtype, 200).value
    return [
        Check(
            what=Words(f"rate of {dtype} in units of bf16", f"{dtype} 相对 bf16 的速率"),
            predicted=chip.flops_per_s[dtype] / chip.flops_per_s["bf16"],
            measured=rate / now["bf16"],
            unit="x",
            within=0.3,
        )
        for dtype, rate in now.items()
        if dtype != "bf16"
    ]


LAB = described(__file__, run)
