"""Train where the data is: average models instead of gradients. When is that the same, and what does it save?

one local step:   averaging the models IS the average gradient (SGD)      bytes: all of it, each step
k local steps:    1/k of the bytes, and the models drift apart meanwhile
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Lines, Outcome, Plot, Question, Rows, Table, Words
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
    steps = bench.pick(48, 16)
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


LAB = Lab(
    name="federated",
    area="llm",
    title=Words("Federated and low-communication training", "联邦学习与低通信训练"),
    hypothesis=Words(
        "Averaging the models of four clients after one SGD step equals one step on "
        "all data; with k steps in between, bytes fall by exactly k and the loss pays "
        "for the drift.",
        "四个客户端各走一步 SGD 后取平均，等于在全部数据上走一步；间隔 k 步再平均，通信"
        "恰好减少 k 倍，而损失要为漂移付出代价。",
    ),
    run=run,
    causes=(
        Words("shares of unequal size averaged with equal weight", "数据量不等的客户端被等权平均"),
        Words(
            "an optimizer with state: averaging Adam's models is not averaging its gradients",
            "带状态的优化器：平均 Adam 的模型并不等于平均梯度",
        ),
    ),
    code=("cairn/labs/llm/federated.py:average", "cairn/labs/llm/federated.py:local_steps"),
    reading=(
        "Communication-Efficient Learning of Deep Networks from Decentralized Data (2017)",
        "DiLoCo: Distributed Low-Communication Training of Language Models (2023)",
    ),
    questions=(
        Question(
            Words(
                "Why does exactness end after the second local step?",
                "为什么从第二个本地步开始就不再精确相等？",
            ),
            Words(
                "The second gradient is taken at each client's own weights, not at the "
                "average; the average of gradients at different points is not the gradient at "
                "the average point.",
                "第二步的梯度是在各客户端自己的权重处计算的；不同点的梯度平均不等于平均点的梯度。",
            ),
        ),
        Question(
            Words("What does DiLoCo add?", "DiLoCo 增加了什么？"),
            Words(
                "An outer optimizer: the difference between old and averaged weights is "
                "treated as a gradient and given to SGD with momentum, with hundreds of local "
                "AdamW steps between.",
                "外层优化器：把旧权重与平均权重之差当作梯度，交给带动量的 SGD，中间隔几百个本地"
                " AdamW 步。",
            ),
        ),
        Question(
            Words("Is federated averaging private?", "联邦平均能保护隐私吗？"),
            Words(
                "Not by itself: single updates reveal data. Secure aggregation hides the "
                "individual update, differential privacy bounds what the sum can tell.",
                "本身不能：单个更新会泄露数据。安全聚合隐藏单个更新，差分隐私限制总和能透露的信息。",
            ),
        ),
    ),
    seconds=8.0,
)
