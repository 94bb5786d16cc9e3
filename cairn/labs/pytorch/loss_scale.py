"""What happens to a gradient of 1e-8 in float16? It becomes zero, unless the loss was multiplied before.

    float16 rounds to zero below 2^-25 (3e-8); its largest number is 65504
    loss x 65536  ->  gradients x 65536  ->  computed in float16  ->  divided again in float32

How many gradients are lost follows from their distribution; how the factor moves follows from a rule: halve when
something overflowed, double after a thousand good steps.
"""

import math

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
from cairn.labs.workbench import Workbench

LOST_BELOW = 2.0**-25  # half of the smallest subnormal number
SPREAD = 2e-8  # of the gradients: many below what float16 can hold


def lost_share(spread: float, scale: float) -> float:
    """Of normal gradients, those that float16 rounds to zero."""
    return math.erf(LOST_BELOW / scale / (spread * math.sqrt(2)))


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.precision import FIRST_SCALE, GROWTH_INTERVAL, LossScale

    bench.step("gradients that vanish")
    count = bench.pick(1 << 21, 1 << 18)
    gradients = torch.randn(count, generator=torch.Generator().manual_seed(0)) * SPREAD
    measured = {}
    for power in (0, 2, 4, 8, 16):
        kept = (gradients * 2.0**power).half().float() / 2.0**power
        measured[power] = float((kept == 0).float().mean())
    bench.step("how the factor moves")
    scale = LossScale(active=True, device="cpu")
    overflows, steps = {100, 101, 1500}, 3200
    trace = []
    for step in range(steps):
        scale.update(torch.tensor(step in overflows))
        trace.append((float(step), float(scale.scale)))
    # Two halvings, then one doubling for each whole thousand of good steps after the last change.
    streaks = (1500 - 102) // GROWTH_INTERVAL, (steps - 1501) // GROWTH_INTERVAL
    expected = FIRST_SCALE / 2 / 2 * 2 ** streaks[0] / 2 * 2 ** streaks[1]
    rounded = (gradients * FIRST_SCALE).half().float() / FIRST_SCALE
    error = float((rounded - gradients).norm() / gradients.norm())
    return Outcome(
        checks=_checks(measured, error, expected, trace[-1][1]),
        plots=[
            Plot(
                title=Words("Gradients lost", "丢失的梯度"),
                x=Words("factor", "缩放因子"),
                y=Words("share", "比例"),
                lines={
                    "from the distribution": [
                        (2.0**p, lost_share(SPREAD, 2.0**p)) for p in measured
                    ],
                    "measured": [(2.0**p, share) for p, share in measured.items()],
                },
                log_x=True,
            ),
            Plot(
                title=Words("The factor over the steps", "缩放因子随步数的变化"),
                x=Words("step", "步"),
                y=Words("factor", "缩放因子"),
                lines={"loss scale": trace[::20]},
                log_y=True,
            ),
        ],
    )


def _checks(
    measured: dict[int, float], error: float, expected: float, factor: float
) -> list[Check]:
    return [
        Check(
            what=Words("share of gradients lost without a factor", "不放大时丢失的梯度比例"),
            predicted=lost_share(SPREAD, 1.0),
            measured=measured[0],
            unit="",
            within=0.02,
        ),
        Check(
            what=Words("share lost with 65536", "放大 65536 倍后丢失的比例"),
            predicted=lost_share(SPREAD, 2.0**16),
            measured=measured[16],
            unit="",
            within=0.5,  # a few dozen of two million
        ),
        Check(
            what=Words(
                "relative error of the gradient with 65536", "放大 65536 倍后梯度的相对误差"
            ),
            predicted=2.0**-11,
            measured=error,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "the factor after 3200 steps with three overflows",
                "3200 步、三次溢出之后的缩放因子",
            ),
            predicted=expected,
            measured=factor,
            unit="",
        ),
    ]


LAB = Lab(
    name="loss-scale",
    area="pytorch",
    title=Words("Mixed precision and the loss scale", "混合精度与 loss scale"),
    hypothesis=Words(
        "float16 loses exactly the gradients below 3e-8; multiplying the loss by 65536 saves all but a few "
        "in a million, and the factor finds its own size by halving at overflows and doubling after 1000 "
        "good steps.",
        "float16 丢掉的恰好是小于 3e-8 的梯度；loss 乘 65536 几乎全部保住；缩放因子溢出减半、连续 1000 "
        "步正常则加倍，自己找到合适的大小。",
    ),
    run=run,
    causes=(
        Words(
            "hardware that flushes subnormal float16 numbers to zero (then 2^-14 is the limit)",
            "硬件把 float16 次正规数清零（此时界限是 2^-14）",
        ),
        Words(
            "a growth interval or first factor other than the default",
            "增长间隔或初始因子不是默认值",
        ),
    ),
    code=(
        "cairn/train/precision.py:LossScale",
        "cairn/train/step.py:train_step",
        "cairn/kernels/optim/adamw.py:adamw",
    ),
    reading=("Mixed Precision Training (2018)",),
    questions=(
        Question(
            Words("Why does bf16 need no loss scale?", "为什么 bf16 不需要 loss scale？"),
            Words(
                "Its exponent has 8 bits as in float32: the smallest normal number is 1e-38, so gradients do "
                "not vanish. fp16's 5 bits end at 6e-5 (6e-8 with subnormals).",
                "它的指数与 float32 一样是 8 位，最小正规数 1e-38，梯度不会消失；fp16 的 5 位指数到 6e-5 "
                "为止（含次正规数 6e-8）。",
            ),
        ),
        Question(
            Words(
                "What does GradScaler do in a step that overflowed?",
                "GradScaler 在溢出的一步里做什么？",
            ),
            Words(
                "It skips the update, halves the factor and goes on: the batch is lost, the weights are not. "
                "A few skips at the start are normal, steady ones mean NaN from elsewhere.",
                "跳过更新、因子减半、继续：丢一个 batch，不伤权重。开头跳几次正常，持续跳过说明 NaN 另有来源。",
            ),
        ),
        Question(
            Words("Why must gradients be unscaled before clipping?", "为什么裁剪前要先 unscale？"),
            Words(
                "The norm is compared with an absolute limit: with gradients 65536 times too long everything "
                "would be clipped to almost nothing.",
                "裁剪用的是绝对阈值：梯度放大了 65536 倍，不先除回去就会被裁到几乎为零。",
            ),
        ),
    ),
    seconds=1.0,
)
