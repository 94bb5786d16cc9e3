"""Prefer one answer to another without a reward model: what does DPO move that imitation of good answers does not?

loss = -log sigmoid( beta [ (log p(good) - log p0(good)) - (log p(bad) - log p0(bad)) ] )      p0: where it began

Good and bad answers differ in one digit, so imitating the good ones makes the bad ones likelier, too. Both are trained
from the same base for as many steps; preferences are judged on pairs that neither has seen.
"""

import copy
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.transformer import Transformer

BETAS = (0.1, 2.0)
HELD_OUT = 5  # every so many-th pair is never trained on


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    good = _tiny.all_sums()
    bad = good.clone()
    bad[:, -1] = (bad[:, -1] + 1) % _tiny.BASE  # the same sum, off by one
    held = torch.arange(len(good)) % HELD_OUT == 0
    base = _tiny.build(_tiny.small_spec())
    bench.step("a base that knows the form, and both answers")
    _tiny.train(base, torch.cat((good, bad)), bench.pick(60, 25))
    steps = bench.pick(40, 15)
    moved = {}
    for beta in BETAS:
        bench.step(f"preferences with beta {beta}")
        moved[beta] = prefer(copy.deepcopy(base), base, good[~held], bad[~held], beta, steps)
    bench.step("imitation of the good answers for as many steps")
    imitator = copy.deepcopy(base)
    _tiny.train(imitator, good[~held], steps, rate=1e-3)
    margins = {beta: margin(model, base, good[held], bad[held]) for beta, model in moved.items()}
    drift = {beta: distance(model, base, good[~held]) for beta, model in moved.items()}
    imitated = margin(imitator, base, good[~held], bad[~held])
    preferred = margin(moved[BETAS[0]], base, good[~held], bad[~held])
    return Outcome(
        checks=_checks(margins[BETAS[0]], preferred, imitated, drift),
        plots=[_plot(drift)],
        notes=[_note(moved[BETAS[0]], base, good[~held], bad[~held])],
    )


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
        found = rule(sides[0], sides[1])
        optimizer.zero_grad()
        (found.chosen_P * here[0] + found.rejected_P * here[1]).mean().backward()
        optimizer.step()
    return model


def margin(model: "Transformer", base: "Transformer", good: "Tensor", bad: "Tensor") -> "Tensor":
    """How much each good answer has gained on its bad one."""
    import torch

    with torch.no_grad():
        gains = [answer_logprob(model, rows) - answer_logprob(base, rows) for rows in (good, bad)]
    return gains[0] - gains[1]


def distance(model: "Transformer", base: "Transformer", rows: "Tensor") -> float:
    """KL(policy || reference) of the answers' tokens, mean."""
    import torch

    with torch.no_grad():
        here, there = (
            _tiny.logits(one, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
            for one in (model, base)
        )
    return (here.exp() * (here - there)).sum(-1).mean().item()


def answer_logprob(model: "Transformer", rows: "Tensor") -> "Tensor":
    """Of each row's answer as a whole, [B]."""
    scores = _tiny.logits(model, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
    return scores.gather(-1, rows[:, _tiny.PROMPT :, None]).sum((1, 2))


def _checks(
    held: "Tensor", preferred: "Tensor", imitated: "Tensor", drift: dict[float, float]
) -> list[Check]:
    return [
        Check(
            what=Words(
                "unseen pairs in which the good answer gained on the bad one",
                "未见过的样本对中好答案相对提升的比例",
            ),
            predicted=0.8,
            measured=(held > 0).float().mean().item(),
            unit="share",
            kind="at_least",
        ),
        Check(
            what=Words(
                "margin between good and bad by DPO, over that by imitating the good ones",
                "DPO 拉开的好坏差距与模仿好答案之比",
            ),
            predicted=1.5,
            measured=preferred.mean().item() / max(imitated.mean().item(), 1e-6),
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words(
                f"distance from the reference with beta {BETAS[0]}, over that with {BETAS[1]}",
                f"beta {BETAS[0]} 与 {BETAS[1]} 时离参考模型的距离之比",
            ),
            predicted=1.2,
            measured=drift[BETAS[0]] / drift[BETAS[1]],
            unit="x",
            kind="at_least",
        ),
    ]


def _plot(drift: dict[float, float]) -> Plot:
    return Plot(
        title=Words("How far the policy went", "策略走了多远"),
        x=Words("beta", "beta"),
        y=Words("KL from the reference, nats a token", "与参考模型的 KL（nats/token）"),
        lines={"DPO": sorted(drift.items())},
        log_x=True,
    )


def _note(model: "Transformer", base: "Transformer", good: "Tensor", bad: "Tensor") -> Words:
    import torch

    with torch.no_grad():
        change = [
            (answer_logprob(model, rows) - answer_logprob(base, rows)).mean().item()
            for rows in (good, bad)
        ]
    return Words(
        f"Log-probability changed by {change[0]:+.2f} for good answers and {change[1]:+.2f} for bad ones: DPO promises "
        f"the difference of the two, not either of them.",
        f"对数概率变化：好答案 {change[0]:+.2f}，坏答案 {change[1]:+.2f}；DPO 只保证两者之差，不保证其中任何一个。",
    )


LAB = described(__file__, run)
