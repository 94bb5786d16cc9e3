"""What does each step down in precision buy, and what does it cost?

    speed   GPU: the matmul rates of this machine beside the datasheet's ratios; CPU: float32 has twice float64's lanes
    error   operands rounded to p bits: the product is wrong by 0.555 x 2^-p of its size, whatever the size

The error is that of a uniform rounding inside an octave (2^-p / sqrt(3) of its lower end), averaged over mantissas that
are spread evenly in the logarithm (sqrt(2.164)), for two operands (sqrt(2)).
"""

import math
from typing import Any

from cairn.labs.gpu._in_turn import fastest_in_turn
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
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
        error = _product_error(name, bench.pick(512, 256))
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


LAB = Lab(
    name="precision-ladder",
    area="gpu",
    title=Words("The precision ladder: speed bought with bits", "精度阶梯：用比特换速度"),
    hypothesis=Words(
        "Each halving of the bits doubles the rate, and a product of numbers with p significand bits is "
        "wrong by 0.555 x 2^-p of its size.",
        "位数每减半，速率翻倍；而 p 位有效位的数相乘，乘积的相对误差为 0.555 × 2^-p。",
    ),
    run=run,
    causes=(
        Words(
            "power: lower precision reaches the power limit before its peak rate",
            "功耗：低精度先碰到功耗上限而达不到峰值",
        ),
        Words(
            "a library without a good kernel for one of the types",
            "数学库对其中一种类型没有好的内核",
        ),
    ),
    code=(
        "cairn/hw/measure_device.py:matmul_rate",
        "cairn/hw/datasheet.py:CHIPS",
        "cairn/kernels/matmul/matmul_fp8.py",
        "cairn/train/products.py:make_products",
    ),
    reading=("Mixed Precision Training (2018)", "FP8 Formats for Deep Learning (2022)"),
    questions=(
        Question(
            Words(
                "Why does the error of a product not grow with its size K?",
                "为什么乘积的相对误差不随 K 增大？",
            ),
            Words(
                "Errors of the terms are independent: their sum grows with sqrt(K), like the sum of random "
                "terms itself. Only rounding the running sum would grow, which is why it is kept in float32.",
                "各项误差相互独立，其和按 √K 增长，而随机项之和也按 √K 增长，比值不变。"
                "会增长的是累加时的舍入，所以累加器用 float32。",
            ),
        ),
        Question(
            Words("What does fp8 training keep in higher precision?", "fp8 训练中哪些保留高精度？"),
            Words(
                "Accumulators, norms, softmax, the residual stream, optimizer states and master weights; "
                "only operands of the large products are fp8, each with a scale per tensor or row.",
                "累加器、norm、softmax、残差流、优化器状态和主权重；只有大矩阵乘的操作数是 fp8，"
                "并按张量或按行带 scale。",
            ),
        ),
        Question(
            Words(
                "A step got only 1.3x faster with fp8. Why not 2x?",
                "换 fp8 后一步只快 1.3 倍，为什么不是 2 倍？",
            ),
            Words(
                "Amdahl: attention, norms, communication and quantisation itself stay; with products at 60% "
                "of the step, halving them gives 1 / 0.7 = 1.43 at best, less the time to quantise.",
                "Amdahl：注意力、norm、通信和量化本身不变；矩阵乘占 60% 时减半最多 1/0.7 = 1.43 倍，"
                "还要扣掉量化时间。",
            ),
        ),
    ),
    seconds=2.0,
)
