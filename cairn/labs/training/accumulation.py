"""Does cutting a batch into microbatches change the gradient, and what does it save? Nothing, and all but one part.

    8 samples at once      activations of 8           8 x 1 sample      activations of 1, gradients added up

Bytes that autograd keeps for backward are counted as they are kept; the gradient is compared element by element.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.training._spread import SEED, Setting, batches, tiny
from cairn.labs.workbench import Workbench

SAMPLES = 8


def kept_bytes(call: Any, weights: set[int]) -> int:
    """The most bytes that were saved for backward at any one time in `call`; weights are there anyway."""
    import torch

    alive, most = 0, 0
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal alive, most
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            seen[place] = seen.get(place, 0) + 1
            if seen[place] == 1:
                alive += tensor.untyped_storage().nbytes()
                most = max(most, alive)
        return _Kept(tensor, place, forget)

    def forget(place: int, size: int) -> None:
        nonlocal alive
        if place in seen:
            seen[place] -= 1
            if not seen[place]:
                del seen[place]
                alive -= size

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        call()
    return most


class _Kept:
    """A saved tensor that says when autograd lets go of it."""

    def __init__(self, tensor: Any, place: int, forget: Any) -> None:
        self.tensor, self.place, self.forget = tensor, place, forget

    def __del__(self) -> None:
        self.forget(self.place, self.tensor.untyped_storage().nbytes())


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.models.build import Build
    from cairn.models.weights import random_model
    from cairn.train.data.batch import join
    from cairn.train.loss import NextToken
    from cairn.train.parallel.alone import Alone

    setting = Setting(tiny(), per_step=SAMPLES, tokens=bench.pick(64, 32))
    every, loss = batches(setting, 0), NextToken(setting.spec)
    valid = torch.tensor(float(sum(one.valid() for one in every)))
    gradients: dict[int, dict[str, torch.Tensor]] = {}
    measured, predicted, rows = [], [], []
    for size in (8, 4, 2, 1):
        bench.step(f"{SAMPLES // size} microbatches of {size}")
        parts = [join(every[at : at + size]) for at in range(0, SAMPLES, size)]
        parallel = Alone(random_model(setting.spec, Build("cpu", torch.float32), SEED))
        weights = {p.untyped_storage().data_ptr() for p in parallel.parameters().values()}
        most = kept_bytes(lambda a=parallel, b=parts: a.forward_backward(b, loss, valid), weights)
        gradients[size] = {name: g.clone() for name, g in parallel.gradients().items()}
        measured.append((float(size), most / 1024))
        predicted.append((float(size), measured[0][1] * size / 8))
        apart = max(float((gradients[8][n] - g).abs().max()) for n, g in gradients[size].items())
        rows.append([size, SAMPLES // size, most / 1024, measured[0][1] * size / 8, apart])
    return Outcome(
        checks=_checks(rows, measured),
        plots=[
            Plot(
                title=Words("Kept for backward", "为反向保存的字节"),
                x=Words("samples of a microbatch", "每个 microbatch 的样本数"),
                y=Words("KiB", "KiB"),
                lines={"in proportion": predicted, "counted": measured},
                log_x=True,
                log_y=True,
            )
        ],
        table=Table(
            columns=[
                Words("microbatch", "microbatch"),
                Words("how many", "个数"),
                Words("KiB kept", "保存 KiB"),
                Words("predicted", "预测"),
                Words("difference of gradients", "梯度差异"),
            ],
            rows=rows,
        ),
    )


def _checks(rows: list[list[float]], measured: Points) -> list[Check]:
    return [
        Check(
            what=Words("largest difference of any gradient", "梯度的最大差异"),
            predicted=1e-5,
            measured=max(row[4] for row in rows),
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "bytes kept by microbatches of 1, of those of 8",
                "microbatch 为 1 与 8 时保存激活之比",
            ),
            predicted=1 / 8,
            measured=measured[-1][1] / measured[0][1],
            unit="x",
            within=0.25,
        ),
    ]


LAB = Lab(
    name="accumulation",
    area="training",
    title=Words("Gradient accumulation", "梯度累积"),
    hypothesis=Words(
        "Eight microbatches of one sample give the gradient of one of eight, within rounding, "
        "and keep an eighth of the "
        "activations.",
        "8 个单样本 microbatch 与一次 8 样本得到相同梯度（仅舍入差异），而保存的激活只有八分之一。",
    ),
    run=run,
    causes=(
        Words(
            "tables that are kept whatever the batch: masks, rotations, the loss of a chunk",
            "与 batch 无关的部分：掩码、旋转位置表、分块 loss",
        ),
        Words(
            "sums in 16 bits would lose small addends; here they are float32",
            "若用 16 位累加会丢失小量；这里是 float32",
        ),
    ),
    code=(
        "cairn/train/parallel/alone.py:Alone",
        "cairn/train/data/batch.py:join",
        "cairn/train/memory.py:layer_bytes",
    ),
    reading=(
        "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism (2019)",
        "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (2017)",
    ),
    questions=(
        Question(
            Words(
                "Which mistake makes accumulation differ from a large batch?",
                "梯度累积常见的哪种错误会使结果与大 batch 不同？",
            ),
            Words(
                "Dividing each microbatch's loss by its own tokens and then by the number of microbatches: with uneven "
                "lengths the weights of tokens change. Divide by the tokens of the whole step.",
                "每个 microbatch 各自按自己的 token 数平均，再除以 microbatch 数：长度不等时 "
                "token 权重就变了。应除以整步的 token 数。",
            ),
        ),
        Question(
            Words("What does accumulation cost?", "梯度累积的代价是什么？"),
            Words(
                "Smaller products run at a lower rate, and with FSDP every microbatch gathers "
                "the weights again; it saves "
                "communication of gradients, which leave once a step.",
                "矩阵变小导致效率下降，FSDP 下每个 microbatch 都要重新聚合权重；好处是梯度通信每步只需一次。",
            ),
        ),
        Question(
            Words("In which type should gradients be summed?", "梯度应该用什么精度累加？"),
            Words(
                "float32: bf16 has 8 bits of mantissa, so after 256 equal addends the next one is rounded away.",
                "float32：bf16 只有 8 位尾数，累加 256 个相同的数之后，下一个就会被舍掉。",
            ),
        ),
    ),
    seconds=4.0,
)
