"""Fine-tune a model by two thin matrices beside each weight: how many numbers train, and is the merged model the same?

    y = x W.T + x A.T B.T      A [r, in], B [out, r], B = 0 at the start

QLoRA is the same beside a base that is kept in few bits: its rounding error is the price, and it is bounded.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cairn.models.transformer import Transformer

RANK = 4
ADAM_BYTES = 16  # weight, gradient and two moments, float32 each


class Adapter:
    """Two thin matrices that are added to one weight of a model."""

    def __init__(self, weight: "nn.Parameter", rank: int) -> None:
        import torch

        self.base = weight.detach().clone()
        generator = torch.Generator().manual_seed(weight.numel())
        shape = (rank, weight.shape[1])
        self.down = torch.nn.Parameter(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
        self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], rank))

    def merged(self) -> "Tensor":
        return self.base + self.up @ self.down


@one_thread()
def run(bench: Workbench) -> Outcome:
    model = _tiny.build(_tiny.small_spec())
    easy = _tiny.sums((a, b) for a in range(10) for b in range(10) if a + b < 10)
    hard = _tiny.sums((a, b) for a in range(10) for b in range(10) if a + b >= 10)
    bench.step("the base learns sums without a carry")
    _tiny.train(model, easy, bench.pick(40, 10))
    adapters = {
        n: Adapter(p, RANK) for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n
    }
    thin = [matrix for one in adapters.values() for matrix in (one.down, one.up)]
    bench.step("the adapters learn sums with one")
    losses = _train_adapters(model, adapters, thin, hard, bench.pick(60, 12))
    counted = sum(matrix.numel() for matrix in thin)
    return Outcome(
        checks=[_count(adapters, counted), *_same_task(adapters, losses), _int8(adapters)],
        plots=[
            Plot(
                title=Words("Loss of the adapters", "适配器损失"),
                x=Words("step", "步"),
                y=Words("loss", "损失"),
                lines={"LoRA": list(enumerate(losses))},
            )
        ],
        table=_table(_tiny.small_spec().parameters(), counted),
    )


def _count(adapters: dict[str, Adapter], counted: int) -> Check:
    return Check(
        what=Words(
            "numbers that train: r (in + out) for each matrix", "可训练参数量：每个矩阵 r(in+out)"
        ),
        predicted=sum(RANK * sum(one.base.shape) for one in adapters.values()),
        measured=counted,
        unit="parameters",
    )


def _same_task(adapters: dict[str, Adapter], losses: list[float]) -> list[Check]:
    apart, together = _both_forms(adapters)
    return [
        Check(
            what=Words(
                "largest difference of merged and separate form", "合并与分离两种形式的最大差异"
            ),
            predicted=1e-5,
            measured=(apart - together).abs().max().item(),
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words("loss on the new task, last over first", "新任务损失：末值/初值"),
            predicted=0.8,
            measured=losses[-1] / losses[0],
            unit="x",
            kind="at_most",
        ),
    ]


def _int8(adapters: dict[str, Adapter]) -> Check:
    return Check(
        what=Words(
            "int8 base: relative rounding error, at most half a step",
            "int8 底座：相对舍入误差不超过半步",
        ),
        predicted=0.5 / 127,
        measured=_rounding(adapters),
        unit="of the row's largest",
        kind="at_most",
    )


def _table(total: int, counted: int) -> Table:
    return Table(
        columns=[
            Words("what trains", "训练什么"),
            Words("parameters", "参数量"),
            Words("bytes with Adam", "Adam 所需字节"),
        ],
        rows=[
            ["all / 全部", total, total * ADAM_BYTES],
            [f"LoRA r={RANK}", counted, counted * ADAM_BYTES],
        ],
    )


def _train_adapters(
    model: "Transformer", adapters: dict[str, Adapter], thin: "list[nn.Parameter]", rows: "Tensor", steps: int
) -> list[float]:  # fmt: skip
    import torch

    optimizer = torch.optim.AdamW(thin, lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        for name, one in adapters.items():  # the merged matrix takes the parameter's place
            holder, _, last = name.rpartition(".")
            module = model.get_submodule(holder)
            module._parameters.pop(last, None)
            setattr(module, last, one.merged())
        loss = _tiny.answer_loss(model, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _both_forms(adapters: dict[str, Adapter]) -> "tuple[Tensor, Tensor]":
    """One product with the thin matrices beside the weight, and with them added to it."""
    import torch

    one = next(iter(adapters.values()))
    x = torch.randn(16, one.base.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return x @ one.base.T + (x @ one.down.T) @ one.up.T, x @ one.merged().T


def _rounding(adapters: dict[str, Adapter]) -> float:
    """The worst rounding error of any weight, as a share of its row's largest."""
    worst = 0.0
    for one in adapters.values():
        largest = one.base.abs().amax(dim=1, keepdim=True)
        codes = (one.base / largest * 127).round()
        worst = max(worst, ((codes / 127 * largest - one.base).abs() / largest).max().item())
    return worst


LAB = Lab(
    name="lora",
    area="llm",
    title=Words(
        "LoRA: train two thin matrices instead of a thick one",
        "LoRA：用两个瘦矩阵代替一个大矩阵来训练",
    ),
    hypothesis=Words(
        "Rank-4 adapters train r (in + out) numbers per matrix, a few percent of the "
        "model, still lower the loss on a "
        "new task, and can be merged into the weights without changing the output.",
        "秩为 4 的适配器每个矩阵只训练 r(in+out) 个数，约占模型的百分之几，却仍能降低新"
        "任务的损失，并且可以无损地合并进权重。",
    ),
    run=run,
    causes=(
        Words(
            "too few steps, or a rank too small for the new task", "步数太少，或秩对新任务来说太小"
        ),
        Words("a learning rate that the thin matrices do not stand", "学习率对瘦矩阵来说过大"),
    ),
    code=(
        "cairn/labs/llm/lora.py:Adapter",
        "cairn/models/transformer.py:Transformer",
        "cairn/train/objective.py:token_losses",
    ),
    reading=(
        "LoRA: Low-Rank Adaptation of Large Language Models (2021)",
        "QLoRA: Efficient Finetuning of Quantized LLMs (2023)",
    ),
    questions=(
        Question(
            Words("Why does B begin with zeros and A does not?", "为什么 B 初始化为零而 A 不是？"),
            Words(
                "So that the model begins unchanged (BA = 0) and still gets a gradient: dB "
                "needs A x, which is not zero. With both zero nothing would ever move.",
                "这样模型一开始不变（BA = 0），又能得到梯度：dB 依赖 A x，不为零。若两者都为"
                "零，就永远不会更新。",
            ),
        ),
        Question(
            Words("Where does LoRA save memory, and where not?", "LoRA 在哪里省内存，哪里不省？"),
            Words(
                "Gradients and optimizer states exist for the thin matrices only (16 bytes "
                "each instead of for every weight). The weights themselves and the activations "
                "stay; QLoRA shrinks the weights to 4 bits.",
                "梯度与优化器状态只为瘦矩阵存在（每个数 16 字节）。权重本身和激活不变；QLoRA 再"
                "把权重压到 4 bit。",
            ),
        ),
        Question(
            Words(
                "What does serving many adapters at once cost?", "同时服务许多适配器的代价是什么？"
            ),
            Words(
                "Unmerged, each row adds two thin products with its own A and B: r (in + out) "
                "multiply-adds against in x out, about 2r/hidden of the work, but gathered by "
                "adapter; merged it costs nothing and serves one adapter.",
                "不合并时，每一行多做两个瘦矩阵乘（各自的 A、B）：r(in+out) 对比 in×out，约 "
                "2r/hidden 的计算量，但要按适配器分组；合并后没有额外成本，但只能服务一个适配"
                "器。",
            ),
        ),
    ),
    seconds=6.0,
)
