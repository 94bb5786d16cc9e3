"""Prefer one answer to another without a reward model: DPO on a tiny model, from its loss of ln 2 at the start.

loss = -log sigmoid( beta [ (log p(good) - log p0(good)) - (log p(bad) - log p0(bad)) ] )      p0: where it began
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.transformer import Transformer

BETA = 0.5
LN_2 = 0.6931471805599453


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    good = _tiny.all_sums()
    bad = good.clone()
    bad[:, -1] = (bad[:, -1] + 1) % _tiny.BASE  # the same sum, off by one
    model = _tiny.build(_tiny.small_spec())
    bench.step("a base that knows the form but not the sums")
    _tiny.train(model, torch.cat((good, bad)), bench.pick(30, 10))
    with torch.no_grad():
        begin_good, begin_bad = answer_logprob(model, good), answer_logprob(model, bad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    losses, margins = [], []
    bench.step("learning the preference")
    for _ in range(bench.pick(50, 15)):
        margin = (answer_logprob(model, good) - begin_good) - (
            answer_logprob(model, bad) - begin_bad
        )
        loss = dpo_loss(margin)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        margins.append(margin.detach())
    better = (margins[-1] > 0).float().mean().item()
    return Outcome(
        checks=_checks(losses, better),
        plots=[
            Plot(
                title=Words("DPO loss", "DPO 损失"),
                x=Words("step", "步"),
                y=Words("nats", "nats"),
                lines={"loss": list(enumerate(losses))},
                limit=("ln 2", LN_2),
            )
        ],
        notes=[
            Words(
                f"Log-probability of the good answers: {begin_good.mean().item():.2f} at the "
                f"start, {answer_logprob(model, good).mean().item():.2f} at the end; DPO "
                f"promises the difference of the two, not either of them.",
                f"好答案的对数概率：开始 {begin_good.mean().item():.2f}，结束 "
                f"{answer_logprob(model, good).mean().item():.2f}；DPO 只保证两者之差，不保证其"
                f"中任何一个。",
            )
        ],
    )


def _checks(losses: list[float], better: float) -> list[Check]:
    return [
        Check(
            what=Words("loss before the first step: ln 2", "第一步之前的损失：ln 2"),
            predicted=LN_2,
            measured=losses[0],
            unit="nats",
            within=1e-5,
        ),
        Check(
            what=Words(
                "pairs in which the good answer gained on the bad one",
                "好答案相对提升的样本对比例",
            ),
            predicted=0.9,
            measured=better,
            unit="share",
            kind="at_least",
        ),
        Check(
            what=Words("loss at the end", "最终损失"),
            predicted=0.8 * LN_2,  # ln 2 is what a model that learnt nothing has
            measured=losses[-1],
            unit="nats",
            kind="at_most",
        ),
    ]


def answer_logprob(model: "Transformer", rows: "Tensor") -> "Tensor":
    """Of each row's answer as a whole, [B]."""
    scores = _tiny.logits(model, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
    return scores.gather(-1, rows[:, _tiny.PROMPT :, None]).sum((1, 2))


def dpo_loss(margin: "Tensor") -> "Tensor":
    import torch.nn.functional as F

    return -F.logsigmoid(BETA * margin).mean()


LAB = described(__file__, run)
