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

    from cairn.compress.prune_masks import magnitude

    size = bench.setting("size", bench.pick(1024, 256))
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    x = torch.randn(256, size, generator=torch.Generator().manual_seed(1))
    bench.step("dropping weights")
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    measured = [
        (share, _output_loss(weight, magnitude(weight, share, None), x)) for share in shares
    ]
    theory = [(share, energy_below(share)) for share in shares]
    grouped = magnitude(weight, 0.5, (2, 4))
    lost = _of_a_layer(bench)
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
            *_order(lost),
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


def _of_a_layer(bench: Workbench) -> dict[str, float]:
    """Output that half of the first layer's weights take with them, by method, for the shipped model."""
    from cairn.compress.calibration import token_ids, windows
    from cairn.compress.layer_by_layer import walk
    from cairn.compress.prune import Method, Sparsity, pruned
    from cairn.models.runnable import open_model

    bench.step("pruning a layer of cairn-tiny")
    opened = open_model("cairn-tiny")
    assert opened.tokenizer is not None
    ids = token_ids(None, opened.tokenizer, opened.spec.vocab)
    model = opened.load("cpu", "float32").model
    first = next(walk(model, windows(ids, 128, "the labs")[: bench.pick(8, 4)], hessian=True))
    methods: tuple[Method, ...] = ("magnitude", "wanda", "sparsegpt")
    lost = dict.fromkeys(methods, 0.0)
    for site in first.sites:
        weight, x = site.matrix.read().float(), site.inputs.sample_MK
        for method in methods:
            lost[method] += _output_loss(weight, pruned(site, weight, Sparsity(method=method)), x)
    return {name: total / len(first.sites) for name, total in lost.items()}


def _order(lost: dict[str, float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "lost by Wanda over magnitude, a layer of cairn-tiny",
                "cairn-tiny 的一层：Wanda 与按幅度的损失之比",
            ),
            predicted=1.0,
            measured=lost["wanda"] / lost["magnitude"],
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words("lost by SparseGPT over Wanda", "SparseGPT 与 Wanda 的损失之比"),
            predicted=1.0,
            measured=lost["sparsegpt"] / lost["wanda"],
            unit="x",
            kind="at_most",
        ),
    ]


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
