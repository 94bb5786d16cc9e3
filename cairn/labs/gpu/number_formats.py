"""What does a format forget? Rounding errors of 16, 8 and 4 bits beside the bounds that their bits imply.

    float with p bits of significand     |error| <= 2^-p of the value    (half a step), down to its smallest normal
    int with b bits and one scale        |error| <= scale / 2            everywhere, large or small

Numbers are rounded by our quantisers or by a cast, and compared in float32: no 16-bit arithmetic is needed.
"""

from typing import Any, NamedTuple

from cairn.labs.lab import Check, Lab, Lines, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench


class Format(NamedTuple):
    name: str
    significand: int  # bits, the hidden one included
    smallest: float  # normal
    largest: float


FLOATS = (
    Format("bfloat16", 8, 2.0**-126, 3.3895313892515355e38),
    Format("float16", 11, 2.0**-14, 65504.0),
    Format("float8_e4m3fn", 4, 2.0**-6, 448.0),
    Format("float8_e5m2", 3, 2.0**-14, 57344.0),
)


def run(bench: Workbench) -> Outcome:
    import torch

    count = bench.pick(1 << 21, 1 << 18)
    generator = torch.Generator().manual_seed(0)
    checks, rows, curve = [], [], {}
    for form in FLOATS:
        bench.step(form.name)
        # Two octaves somewhere in the middle of the format, every mantissa equally likely.
        x = (1 + 3 * torch.rand(count, generator=generator)) * 2.0
        back = x.to(getattr(torch, form.name)).float()
        worst = float(((back - x).abs() / x).max())
        bound = 2.0**-form.significand
        info = torch.finfo(getattr(torch, form.name))
        rows.append([form.name, form.significand, bound, worst, form.smallest, info.max])
        checks.append(
            Check(
                what=Words(f"largest relative error of {form.name}", f"{form.name} 的最大相对误差"),
                # x / (1 + half a step): the bound itself is never quite reached.
                predicted=bound / (1 + bound),
                measured=worst,
                unit="",
                within=0.03,
            )
        )
        curve[form.name] = _error_curve(form)
    checks += _integers(bench, count, rows)
    return Outcome(
        checks=checks,
        plots=[_plot(curve)],
        table=Table(
            columns=[
                Words("format", "格式"),
                Words("significand bits", "有效位数"),
                Words("bound", "理论上界"),
                Words("measured", "实测"),
                Words("smallest normal or step", "最小正规数或步长"),
                Words("largest", "最大值"),
            ],
            rows=rows,
        ),
    )


def _plot(curve: Lines) -> Plot:
    return Plot(
        title=Words("Relative error by magnitude", "不同量级的相对误差"),
        x=Words("magnitude", "量级"),
        y=Words("largest relative error", "最大相对误差"),
        lines=curve,
        log_x=True,
        log_y=True,
    )


def _error_curve(form: Format) -> list[tuple[float, float]]:
    """Largest relative error in each octave: flat inside the format, 100% where values vanish."""
    import torch

    points = []
    for power in range(-20, 18):
        low = 2.0**power
        x = low * (1 + torch.arange(1, 64) / 64)
        x = x[x <= form.largest]
        if len(x):
            back = x.to(getattr(torch, form.name)).float()
            points.append((low, max(float(((back - x).abs() / x).max()), 1e-6)))
    return points


def _integers(bench: Workbench, count: int, rows: list[list[Any]]) -> list[Check]:
    """int8 by our quantiser with a scale for each row; int4 by the same rule with 7 steps."""
    import torch

    from cairn.kernels.quantize.quantize import quantize_reference

    bench.step("int8 and int4")
    x = torch.randn(count // 256, 256, generator=torch.Generator().manual_seed(1))
    eight = quantize_reference(x, torch.int8)
    four_scale = x.abs().amax(-1, keepdim=True) / 7
    four = (x / four_scale).round().clamp(-7, 7)
    checks = []
    for name, values, scale in (
        ("int8", eight.values.float(), eight.scale),
        ("int4", four, four_scale),
    ):
        steps = (values * scale - x) / scale  # errors in steps
        rms = float(steps.square().mean().sqrt())
        rows.append([name, "-", 0.5, float(steps.abs().max()), float(scale.mean()), float(x.max())])
        checks += [
            Check(
                what=Words(f"largest error of {name}, in steps", f"{name} 的最大误差（以步长计）"),
                predicted=0.5,
                measured=float(steps.abs().max()),
                unit="steps",
                within=0.01,
            ),
            Check(
                what=Words(
                    f"typical error of {name}: step / sqrt(12)", f"{name} 的均方根误差：步长 / √12"
                ),
                predicted=12**-0.5,
                measured=rms,
                unit="steps",
                within=0.02,
            ),
        ]
    return checks


LAB = Lab(
    name="number-formats",
    area="gpu",
    title=Words(
        "What bf16, fp16, fp8, int8 and int4 forget", "bf16、fp16、fp8、int8、int4 各丢掉了什么"
    ),
    hypothesis=Words(
        "A float with p significand bits is wrong by at most 2^-p of the value whatever its size; an integer "
        "with a scale is wrong by at most half a step, and by step/sqrt(12) typically.",
        "有 p 位有效位的浮点数，相对误差不超过 2^-p，与大小无关；带 scale 的整数，绝对误差不超过半个步长，"
        "均方根为步长/√12。",
    ),
    run=run,
    causes=(
        Words(
            "values fell below the smallest normal number of the format",
            "数值落到了该格式最小正规数以下",
        ),
        Words(
            "a cast that truncates instead of rounding to nearest even",
            "类型转换用了截断而不是就近取偶",
        ),
    ),
    code=(
        "cairn/kernels/quantize/quantize.py:quantize_reference",
        "cairn/train/products.py:Fp8ByRow",
        "cairn/train/optim/int8_states.py:pack",
    ),
    reading=(
        "What Every Computer Scientist Should Know About Floating-Point Arithmetic (1991)",
        "FP8 Formats for Deep Learning (2022)",
    ),
    questions=(
        Question(
            Words(
                "Why is bf16 easier to train with than fp16?", "为什么用 bf16 训练比 fp16 省心？"
            ),
            Words(
                "It has float32's 8 exponent bits, so gradients of 1e-8 survive without a loss scale; it "
                "pays with 8 significand bits instead of 11, which float32 masters make up for.",
                "它有与 float32 相同的 8 位指数，1e-8 的梯度不用 loss scale 也能保留；代价是有效位从 11 降到 "
                "8，由 float32 主权重弥补。",
            ),
        ),
        Question(
            Words("When is e5m2 chosen over e4m3?", "什么时候用 e5m2 而不是 e4m3？"),
            Words(
                "For gradients scaled by tensor: e5m2 reaches from 57344 down to 6e-5, e4m3 only from 448 to "
                "0.016, but has one bit more of precision, good for weights and activations.",
                "用于按张量缩放的梯度：e5m2 覆盖 57344 到 6e-5；e4m3 只有 448 到 0.016，但精度多一位，"
                "适合权重和激活。",
            ),
        ),
        Question(
            Words(
                "Why do integers need finer scales than floats?",
                "为什么整数量化比浮点更需要细粒度的 scale？",
            ),
            Words(
                "Their error is absolute: one outlier of 100 in a row makes the int8 step 0.8 and erases "
                "everything near 0. A float's error is relative, so small values keep their digits.",
                "整数的误差是绝对的：一行里有个 100 的离群值，int8 步长就是 0.8，接近 0 的值全被抹掉；"
                "浮点误差是相对的，小值仍有精度。",
            ),
        ),
    ),
    seconds=1.0,
)
