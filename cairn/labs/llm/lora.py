"""Fine-tune a model by two thin matrices beside each weight: how many numbers train, and is the merged model the same?

    y = x W.T + x A.T B.T      A [r, in], B [out, r], B = 0 at the start

QLoRA is the same beside a base that is kept in few bits: its rounding error is the price, and it is bounded.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
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
    model: "Transformer",
    adapters: dict[str, Adapter],
    thin: "list[nn.Parameter]",
    rows: "Tensor",
    steps: int,
) -> list[float]:
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


LAB = described(__file__, run)
