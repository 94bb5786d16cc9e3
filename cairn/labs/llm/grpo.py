"""Reinforcement learning with a checkable reward: sample a group of answers, and push towards those above its mean.

advantage = (reward - mean of the group) / standard deviation of the group      no value network
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cairn.models.transformer import Transformer

GROUP = 16


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    generator = torch.Generator().manual_seed(0)
    right = _tiny.sums((a, b) for a in range(5) for b in range(5))
    model = _tiny.build(_tiny.small_spec())
    bench.step("a base that is right now and then")
    _tiny.train(model, right, bench.pick(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rewards, largest_mean = [], 0.0
    for step in range(bench.pick(30, 12)):
        bench.step(f"step {step + 1}: {GROUP} answers for each sum")
        prompts = right.repeat_interleave(GROUP, dim=0)
        answers = sample(model, prompts, generator)
        reward = (answers[:, _tiny.PROMPT :] == prompts[:, _tiny.PROMPT :]).all(1).float()
        advantage = group_advantage(reward)
        largest_mean = max(largest_mean, advantage.reshape(-1, GROUP).mean(1).abs().max().item())
        scores = _tiny.logits(model, answers)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
        chosen = scores.gather(-1, answers[:, _tiny.PROMPT :, None]).sum((1, 2))
        loss = -(advantage * chosen).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward.mean().item())
    before, after = (sum(part) / len(part) for part in (rewards[:3], rewards[-3:]))
    return Outcome(
        checks=[
            Check(
                what=Words("mean advantage of any group", "任意组的优势均值"),
                predicted=1e-5,
                measured=largest_mean,
                unit="",
                kind="at_most",
            ),
            Check(
                what=Words(
                    "share of right answers at the end, half as much again as at the start at least",
                    "结束时的正确率，至少是开始时的一倍半",
                ),
                predicted=1.5 * before,
                measured=after,
                unit="share",
                kind="at_least",
            ),
        ],
        plots=[_plot(rewards)],
        notes=[_note(before, after)],
    )


def _plot(rewards: list[float]) -> Plot:
    return Plot(
        title=Words("Reward", "奖励"),
        x=Words("step", "步"),
        y=Words("share of right answers", "正确率"),
        lines={"reward": list(enumerate(rewards))},
        limit=("all right", 1.0),
    )


def _note(before: float, after: float) -> Words:
    return Words(
        f"Right answers: {before:.0%} over the first three steps, {after:.0%} over the "
        f"last three; a group that is all right or all wrong teaches nothing.",
        f"正确率：前三步 {before:.0%}，后三步 {after:.0%}；全对或全错的组没有学习信号。",
    )


def sample(model: "Transformer", prompts: "Tensor", generator: "torch.Generator") -> "Tensor":
    """Answers drawn token by token at temperature 1."""
    import torch

    rows = prompts[:, : _tiny.PROMPT]
    with torch.no_grad():
        while rows.shape[1] < prompts.shape[1]:
            shares = _tiny.logits(model, rows)[:, -1].softmax(-1)
            drawn = torch.multinomial(shares, 1, generator=generator)
            rows = torch.cat((rows, drawn), dim=1)
    return rows


def group_advantage(reward_B: "Tensor") -> "Tensor":
    """How much better each answer is than its group, in standard deviations."""
    groups = reward_B.reshape(-1, GROUP)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


LAB = described(__file__, run)
