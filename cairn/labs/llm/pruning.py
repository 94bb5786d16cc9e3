"""Drop half of a matrix: how much of its output goes with it? Predicted from the bell curve, also for 2:4.

energy lost = sum of the squares that were dropped / sum of all squares
any half:   P(|x| < t) - 2 t pdf(t) at the median t of |x|      2:4: the two smallest of each four
"""

import math
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor


def run(bench: Workbench) -> Outcome:
    import torch

    size = bench.pick(1024, 256)
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    x = torch.randn(256, size, generator=torch.Generator().manual_seed(1))
    bench.step("dropping weights")
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    measured = [(share, _output_loss(weight, loose(weight, share), x)) for share in shares]
    theory = [(share, energy_below(share)) for share in shares]
    grouped = two_of_four(weight)
    groups = (grouped != 0).reshape(-1, 4).sum(dim=1)
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "energy of the output lost, half dropped anywhere",
                    "任意去掉一半权重：输出能量损失",
                ),
                predicted=energy_below(0.5),
                measured=measured[2][1],
                unit="",
                within=0.1,
            ),
            Check(
                what=Words("the same for 2:4", "2:4 稀疏：输出能量损失"),
                predicted=energy_of_smallest_two(),
                measured=_output_loss(weight, grouped, x),
                unit="",
                within=0.1,
            ),
            Check(
                what=Words("groups of four with exactly two left", "恰好留两个的四元组比例"),
                predicted=1.0,
                measured=(groups == 2).float().mean().item(),
                unit="share",
            ),
        ],
        plots=[_plot(measured, theory)],
        table=_table(size),
        notes=[
            Words(
                "2:4 keeps 2 bits of position per kept weight, a loose zero needs a whole "
                "index: only the former runs faster on tensor cores.",
                "2:4 每个保留权重只需 2 bit 位置，任意稀疏需要完整下标：只有前者能在 tensor "
                "core 上加速。",
            )
        ],
    )


def _plot(measured: Points, theory: Points) -> Plot:
    return Plot(
        title=Words("Energy lost by dropping the smallest weights", "去掉最小权重损失的能量"),
        x=Words("share dropped", "去掉比例"),
        y=Words("energy lost", "能量损失"),
        lines={"measured": measured, "theory": theory},
    )


def _table(size: int) -> Table:
    return Table(
        columns=[
            Words("form", "形式"),
            Words("bytes, bf16 and positions", "字节（bf16 加位置）"),
        ],
        rows=[
            ["dense", size * size * 2],
            ["2:4", size * size + size * size // 4],
            ["50% CSR", size * size + size * size * 2],
        ],
    )


def loose(weight: "Tensor", share: float) -> "Tensor":
    """The smallest `share` of all weights become zero."""
    limit = weight.abs().flatten().kthvalue(max(int(weight.numel() * share), 1)).values
    return weight * (weight.abs() > limit)


def two_of_four(weight: "Tensor") -> "Tensor":
    """Of each four neighbours the two largest stay."""
    import torch

    fours = weight.reshape(-1, 4)
    keep = torch.zeros_like(fours).scatter_(1, fours.abs().topk(2, dim=1).indices, 1.0)
    return (fours * keep).reshape(weight.shape)


def energy_below(share: float) -> float:
    """Share of a normal variable's energy in the smallest `share` of its values."""
    low, high = 0.0, 10.0
    for _ in range(60):  # the quantile of |x|, by halving
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle / math.sqrt(2)) < share else (low, middle)
    density = math.exp(-low * low / 2) / math.sqrt(2 * math.pi)
    return share - 2 * low * density


def energy_of_smallest_two(steps: int = 4000) -> float:
    """E[two smallest squares of four] / 4, from the density of order statistics of |x|."""
    total = 0.0
    for i in range(steps):
        t = 8.0 * (i + 0.5) / steps
        below = math.erf(t / math.sqrt(2))
        density = 2 * math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
        first = 4 * (1 - below) ** 3 * density
        second = 12 * below * (1 - below) ** 2 * density
        total += t * t * (first + second) * 8.0 / steps
    return total / 4


def _output_loss(weight: "Tensor", pruned: "Tensor", x: "Tensor") -> float:
    gone = x @ (weight - pruned).T
    return ((gone.norm() / (x @ weight.T).norm()) ** 2).item()


LAB = described(__file__, run)
