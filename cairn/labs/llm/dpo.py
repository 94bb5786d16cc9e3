"""Prefer one answer to another without a reward model: what does DPO move that imitation of good answers does not?

loss = -log sigmoid( beta [ (log p(good) - log p0(good)) - (log p(bad) - log p0(bad)) ] )      p0: where it began

Good and bad answers differ in one digit, so imitating the good ones makes the bad ones likelier, too. Both are trained
from the same base for as many steps; preferences are judged on pairs that neither has seen.
"""

import copy
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.transformer import Transformer

BETA = 0.1
HELD_OUT = 5  # every so many-th pair is never trained on


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    good = _tiny.all_sums()
    bad = good.clone()
    bad[:, -1] = (bad[:, -1] + 1) % _tiny.BASE  # the same sum, off by one
    held_out = torch.arange(len(good)) % HELD_OUT == 0
    base = _tiny.build(_tiny.small_spec())
    bench.step("a base that knows the form, and both answers")
    _tiny.train(base, torch.cat((good, bad)), bench.pick(40, 25))
    steps = bench.setting("steps", bench.pick(24, 15))
    bench.step("preferences")
    policy = prefer(copy.deepcopy(base), base, good[~held_out], bad[~held_out], BETA, steps)
    bench.step("imitation of the good answers for as many steps")
    imitator = copy.deepcopy(base)
    _tiny.train(imitator, good[~held_out], steps, rate=1e-3)
    gains = {
        name: [gain(model, base, rows[~held_out]) for rows in (good, bad)]
        for name, model in (("DPO", policy), ("imitation", imitator))
    }
    unseen = gain(policy, base, good[held_out]) - gain(policy, base, bad[held_out])
    means = {name: [one.mean().item() for one in both] for name, both in gains.items()}
    return Outcome(checks=_checks(unseen, means), table=_table(means), notes=[_note(means["DPO"])])


def prefer(
    model: "Transformer",
    base: "Transformer",
    good: "Tensor",
    bad: "Tensor",
    beta: float,
    steps: int,
) -> "Transformer":
    """By the rule that `cairn tune` trains with."""
    import torch

    from cairn.train.rules.dpo import DPO
    from cairn.train.rules.pairs import Completions

    rule, tokens = DPO(beta), torch.full((len(good),), 2.0)
    with torch.no_grad():
        there = [answer_logprob(base, rows) for rows in (good, bad)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        here = [answer_logprob(model, rows) for rows in (good, bad)]
        sides = [
            Completions(logp.detach(), tokens, first)
            for logp, first in zip(here, there, strict=True)
        ]
        losses = rule(sides[0], sides[1])
        optimizer.zero_grad()
        (losses.chosen_P * here[0] + losses.rejected_P * here[1]).mean().backward()
        optimizer.step()
    return model


def gain(model: "Transformer", base: "Transformer", rows: "Tensor") -> "Tensor":
    """How much likelier each answer has become, in nats."""
    import torch

    with torch.no_grad():
        return answer_logprob(model, rows) - answer_logprob(base, rows)


def answer_logprob(model: "Transformer", rows: "Tensor") -> "Tensor":
    """Of each row's answer as a whole, [B]."""
    scores = _tiny.logits(model, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
    return scores.gather(-1, rows[:, _tiny.PROMPT :, None]).sum((1, 2))


def _checks(unseen: "Tensor", means: dict[str, list[float]]) -> list[Check]:
    preferred, imitated = means["DPO"], means["imitation"]
    return [
        Check(
            what=Words(
                "unseen pairs in which the good answer gained on the bad one",
                "未见过的样本对中好答案相对提升的比例",
            ),
            predicted=0.8,
            measured=(unseen > 0).float().mean().item(),
            unit="share",
            kind="at_least",
        ),
        Check(
            what=Words(
                "margin between good and bad by DPO, over that by imitating the good ones",
                "DPO 拉开的好坏差距与模仿好答案之比",
            ),
            predicted=1.2,
            measured=(preferred[0] - preferred[1]) / max(imitated[0] - imitated[1], 1e-6),
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words(
                "log-probability of good answers: gained by imitation more than by DPO",
                "好答案对数概率的增量：模仿比 DPO 多出",
            ),
            predicted=0.5,
            measured=imitated[0] - preferred[0],
            unit="nats",
            kind="at_least",
        ),
    ]


def _table(means: dict[str, list[float]]) -> Table:
    return Table(
        columns=[
            Words("trained by", "训练方式"),
            Words("good answers, change in nats", "好答案变化（nats）"),
            Words("bad answers, change in nats", "坏答案变化（nats）"),
        ],
        rows=[[name, round(good, 3), round(bad, 3)] for name, (good, bad) in means.items()],
    )


def _note(change: list[float]) -> Words:
    return Words(
        f"Log-probability changed by {change[0]:+.2f} for good answers and {change[1]:+.2f} for bad ones: DPO promises "
        f"the difference of the two, not either of them.",
        f"对数概率变化：好答案 {change[0]:+.2f}，坏答案 {change[1]:+.2f}；DPO 只保证两者之差，不保证其中任何一个。",
    )


LAB = described(__file__, run)
