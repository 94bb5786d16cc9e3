"""What does a format forget? Rounding errors of 16, 8 and 4 bits beside the bounds that their bits imply.

    float with p bits of significand     |error| <= 2^-p of the value    (half a step), down to its smallest normal
    int with b bits and one scale        |error| <= scale / 2            everywhere, large or small

Numbers are rounded by our quantisers or by a cast, and compared in float32: no 16-bit arithmetic is needed.
"""

from typing import Any, NamedTuple

from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
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
        # Points that no format holds exactly: multiples of 1/64 are free of error in 16 bits.
        x = low * torch.linspace(1, 2, 4099)
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


LAB = described(__file__, run)
