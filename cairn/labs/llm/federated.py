"""Train where the data is: average models instead of gradients. When is that the same, and what does it save?

one local step:   averaging the models IS the average gradient (SGD)      bytes: all of it, each step
k local steps:    1/k of the bytes, and the models drift apart meanwhile
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lines, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.transformer import Transformer

CLIENTS, RATE = 4, 0.5
Weights = dict[str, "Tensor"]


@one_thread()
def run(bench: Workbench) -> Outcome:
    rows = _tiny.all_sums()
    shares = [rows[client::CLIENTS] for client in range(CLIENTS)]
    model = _tiny.build(_tiny.small_spec(hidden=32, layers=1, heads=2, kv_heads=1))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    bench.step("one step on all data, and averaged over clients")
    together = local_steps(model, start, rows, 1)
    apart = average([local_steps(model, start, share, 1) for share in shares])
    steps = bench.setting("steps", bench.pick(32, 16))
    lines, table = {}, []
    size = sum(value.numel() * value.element_size() for value in start.values())
    for local in (1, 4, 16):
        bench.step(f"{local} local steps between two averages")
        weights, curve = start, []
        for round_ in range(steps // local):
            weights = average([local_steps(model, weights, share, local) for share in shares])
            curve.append((float((round_ + 1) * local), loss_of(model, weights, rows)))
        lines[f"{local} local"] = curve
        table.append([local, steps // local, steps // local * 2 * CLIENTS * size, curve[-1][1]])
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "largest difference of a weight after one step: averaged models against one "
                    "large batch",
                    "一步之后权重的最大差异：模型平均对比大批量",
                ),
                predicted=1e-5,
                measured=furthest(together, apart),
                unit="",
                kind="at_most",
            ),
            Check(
                what=Words(
                    "bytes moved with 16 local steps against 1", "16 个本地步与 1 个相比的通信字节"
                ),
                predicted=1 / 16,
                measured=table[2][2] / table[0][2],
                unit="x",
            ),
        ],
        plots=[_plot(lines)],
        table=_table(table),
    )


def _plot(lines: Lines) -> Plot:
    return Plot(
        title=Words("Loss on all data", "全部数据上的损失"),
        x=Words("local steps", "本地步数"),
        y=Words("loss", "损失"),
        lines=lines,
    )


def _table(table: Rows) -> Table:
    return Table(
        columns=[
            Words("local steps", "本地步数"),
            Words("rounds", "轮数"),
            Words("bytes moved", "通信字节"),
            Words("loss", "损失"),
        ],
        rows=table,
    )


def local_steps(model: "Transformer", weights: Weights, rows: "Tensor", count: int) -> Weights:
    """SGD from these weights on one client's data."""
    import torch

    _set(model, weights)
    for _ in range(count):
        loss = _tiny.answer_loss(model, rows)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def average(models: list[Weights]) -> Weights:
    return {name: sum(one[name] for one in models) / len(models) for name in models[0]}  # type: ignore[misc]


def loss_of(model: "Transformer", weights: Weights, rows: "Tensor") -> float:
    import torch

    _set(model, weights)
    with torch.no_grad():
        return _tiny.answer_loss(model, rows).item()


def furthest(one: Weights, other: Weights) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def _set(model: "Transformer", weights: Weights) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


LAB = described(__file__, run)
