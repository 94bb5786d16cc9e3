"""Fine-tune a model by two thin matrices beside each weight: how much of a full fine-tuning is that worth?

    y = x W.T + s x A.T B.T      A [r, in], B [out, r], B = 0 at the start

The base knows sums without a carry and shall learn those with one, by adapters of several ranks and by training all
weights. What counts is the new task, what is left of the old one, and what merging in bfloat16 loses. The adapters are
those of `cairn tune --lora`.
"""

import copy
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cairn.models.transformer import Transformer

RANKS = (1, 4, 16)
RATE, FULL_RATE = 2e-2, 2e-3  # an adapter wants about ten times the rate of all weights
ADAM_BYTES = 16  # weight, gradient and two moments, float32 each


class Tuned(NamedTuple):
    trained: int  # numbers
    losses: list[float]
    new: float  # loss on the new task
    old: float  # on the old one


@one_thread()
def run(bench: Workbench) -> Outcome:
    base = _tiny.build(_tiny.small_spec())
    easy = _tiny.sums((a, b) for a in range(10) for b in range(10) if a + b < 10)
    hard = _tiny.sums((a, b) for a in range(10) for b in range(10) if a + b >= 10)
    bench.step("the base learns sums without a carry")
    _tiny.train(base, easy, bench.pick(40, 25))
    steps = bench.setting("steps", bench.pick(36, 20))
    tuned: dict[str, Tuned] = {}
    lost = 0.0
    for rank in RANKS:
        bench.step(f"adapters of rank {rank} learn sums with one")
        model = copy.deepcopy(base)
        tuned[f"r={rank}"] = tune(model, rank, hard, easy, steps)
        lost = merge_loss(model)
    bench.step("all weights learn the same")
    tuned["all"] = tune(copy.deepcopy(base), 0, hard, easy, steps)
    before = _tiny.answer_loss(base, hard).item()
    return Outcome(
        checks=_checks(tuned, before, lost),
        plots=[_plot(tuned)],
        table=_table(tuned),
    )


def tune(model: "Transformer", rank: int, hard: "Tensor", easy: "Tensor", steps: int) -> Tuned:
    """On the new task; rank 0 trains all weights."""
    import torch

    parameters = list(adapt(model, rank) if rank else model.parameters())
    rate = RATE if rank else FULL_RATE
    losses = _tiny.train(model, hard, steps, parameters=parameters, rate=rate)
    with torch.no_grad():
        new, old = _tiny.answer_loss(model, hard).item(), _tiny.answer_loss(model, easy).item()
    return Tuned(sum(one.numel() for one in parameters), losses, new, old)


def adapt(model: "Transformer", rank: int) -> "list[nn.Parameter]":
    """The parameters of new adapters on all linear maps of a model, which is frozen otherwise."""
    import torch

    from cairn.models.adapter.attach import attach
    from cairn.models.adapter.lora import adapter_parameters
    from cairn.models.adapter.spec import AdapterSpec
    from cairn.models.build import ModelBuild

    model.requires_grad_(False)
    spec = AdapterSpec(rank=rank, alpha=2.0 * rank)
    torch.manual_seed(0)
    for lora in attach(model, model.spec, spec, ModelBuild("cpu", torch.float32)):
        for name, parameter in lora.named_parameters():
            with torch.no_grad():
                if name.startswith("a"):
                    torch.nn.init.kaiming_uniform_(parameter, a=5**0.5)
                else:
                    parameter.zero_()
    return list(adapter_parameters(model))


def merge_loss(model: "Transformer") -> float:
    """How much of the update rounding to bfloat16 loses when it is merged into weights of that type."""
    import torch

    from cairn.models.adapter.lora import LoRA, adapters

    update = rounding = 0.0
    for lora in adapters(model):
        if not isinstance(lora, LoRA):
            continue
        for part, weight_NK in lora._weights():
            if part.rank:
                stored_NK = weight_NK.to(torch.bfloat16).float()
                merged_NK = stored_NK + lora.delta(part)
                error_NK = merged_NK.to(torch.bfloat16).float() - merged_NK
                rounding += error_NK.square().sum().item()
                update += lora.delta(part).square().sum().item()
    return (rounding / update) ** 0.5


def _checks(tuned: dict[str, Tuned], before: float, lost: float) -> list[Check]:
    full, thin = tuned["all"], tuned["r=4"]
    return [
        Check(
            what=Words(
                "of what all weights learn on the new task, adapters of rank 4 learn",
                "在新任务上，秩 4 适配器学到的占全量训练的比例",
            ),
            predicted=0.8,
            measured=(before - thin.new) / (before - full.new),
            unit="share",
            kind="at_least",
        ),
        Check(
            what=Words(
                "loss on the old task after adapters of rank 1, over that after all weights",
                "旧任务损失：秩 1 适配器与全量训练之比",
            ),
            predicted=1.0,
            measured=tuned["r=1"].old / full.old,
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words(
                "of the update, what rounding loses when it is merged into bfloat16",
                "合并进 bfloat16 时舍入损失的更新比例",
            ),
            predicted=0.1,
            measured=lost,
            unit="share",
            kind="at_most",
        ),
    ]


def _plot(tuned: dict[str, Tuned]) -> Plot:
    return Plot(
        title=Words("Loss on the new task", "新任务损失"),
        x=Words("step", "步"),
        y=Words("loss", "损失"),
        lines={name: list(enumerate(one.losses)) for name, one in tuned.items()},
    )


def _table(tuned: dict[str, Tuned]) -> Table:
    return Table(
        columns=[
            Words("what trains", "训练什么"),
            Words("parameters", "参数量"),
            Words("bytes with Adam", "Adam 所需字节"),
            Words("loss on the new task", "新任务损失"),
            Words("on the old task", "旧任务损失"),
        ],
        rows=[
            [name, one.trained, one.trained * ADAM_BYTES, round(one.new, 4), round(one.old, 4)]
            for name, one in tuned.items()
        ],
    )


LAB = described(__file__, run)
