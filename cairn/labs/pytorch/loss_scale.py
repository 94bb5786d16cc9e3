"""What happens to a gradient of 1e-8 in float16? It becomes zero, unless the loss was multiplied before.

    float16 rounds to zero below 2^-25 (3e-8); its largest number is 65504
    loss x 65536  ->  gradients x 65536  ->  computed in float16  ->  divided again in float32

How many gradients are lost follows from their distribution; how the factor moves follows from a rule: halve when
something overflowed, double after a thousand good steps.
"""

import math

from cairn.labs.lab import Check, Outcome, Plot, Words, described
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


LAB = described(__file__, run)
