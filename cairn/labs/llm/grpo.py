"""Reinforcement learning with a checkable reward: is the mean of a group a baseline that is good enough?

    advantage = reward - mean of the group        push = advantage x d log p(answer)        no value network

A sum has 144 possible answers, so the gradient of the expected reward can be computed exactly, answer by answer. What
groups of samples estimate is held against it. Then the policy learns by the rules of `cairn align`: ratio, clip,
several updates from one round of samples.
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

GROUP, UPDATES, DRAWS = 16, 2, 8
BASE_STEPS, RATE = 14, 1e-3


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    generator = torch.Generator().manual_seed(0)
    sums = _tiny.sums((a, b) for a in range(7) for b in range(7))
    model = _tiny.build(_tiny.small_spec())
    bench.step("a base that is right now and then")
    _tiny.train(model, sums, BASE_STEPS)
    bench.step("the gradient of the expected reward, exactly and by samples")
    cosine, noise = compare_estimates(model, sums[:8], generator)
    steps = bench.setting("steps", 10)
    rewards = [expected_reward(model, sums).mean().item()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(steps):
        bench.step(f"round {step + 1} of {steps}: {GROUP} answers for each sum")
        learn(model, optimizer, sums, generator)
        rewards.append(expected_reward(model, sums).mean().item())
    return Outcome(
        checks=_checks(cosine, noise, rewards), plots=[_plot(rewards)], notes=[_note(rewards)]
    )


def compare_estimates(
    model: "Transformer", prompts: "Tensor", generator: "torch.Generator"
) -> tuple[float, float]:
    """Cosine of the samples' gradient with the exact one, and how much larger its error is with a quarter of them."""
    import torch

    exact = flat_gradient(model, -expected_reward(model, prompts).mean())
    errors: dict[int, list[float]] = {GROUP: [], 4 * GROUP: []}
    mean = torch.zeros_like(exact)
    for group, samples in errors.items():
        for _ in range(DRAWS):
            answers, reward = roll_out(model, prompts, generator, group)
            loss = -(group_advantage(reward, group) * answer_logprob(model, answers)).mean()
            estimate = flat_gradient(model, loss) * group / (group - 1)
            samples.append((estimate - exact).square().sum().item())
            mean += estimate
    cosine = torch.nn.functional.cosine_similarity(mean, exact, 0)
    few, many = (sum(samples) for samples in errors.values())
    return cosine.item(), (few / many) ** 0.5


def flat_gradient(model: "Transformer", loss: "Tensor") -> "Tensor":
    import torch

    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([one.flatten() for one in found])


def expected_reward(model: "Transformer", rows: "Tensor") -> "Tensor":
    """The probability of the right answer of each row: the mean reward of infinitely many samples."""
    return answer_logprob(model, rows).exp()


def answer_logprob(model: "Transformer", rows: "Tensor") -> "Tensor":
    """Of each row's answer as a whole, [B]."""
    return token_logprobs(model, rows).sum(1)


def token_logprobs(model: "Transformer", rows: "Tensor") -> "Tensor":
    scores = _tiny.logits(model, rows)[:, _tiny.PROMPT - 1 : -1].log_softmax(-1)
    return scores.gather(-1, rows[:, _tiny.PROMPT :, None])[..., 0]


def roll_out(
    model: "Transformer", prompts: "Tensor", generator: "torch.Generator", group: int = GROUP
) -> "tuple[Tensor, Tensor]":
    """A group of answers to each prompt, and 1 for those that are right."""
    repeated = prompts.repeat_interleave(group, dim=0)
    answers = sample(model, repeated, generator)
    right = (answers[:, _tiny.PROMPT :] == repeated[:, _tiny.PROMPT :]).all(1)
    return answers, right.float()


def learn(
    model: "Transformer",
    optimizer: "torch.optim.Optimizer",
    prompts: "Tensor",
    generator: "torch.Generator",
) -> None:
    """One round: sample, then several clipped updates, of which the later ones are off policy."""
    from cairn.train.rules.policy import PolicyGradient

    answers, reward = roll_out(model, prompts, generator)
    advantage_BT = group_advantage(reward)[:, None].expand(-1, answers.shape[1] - _tiny.PROMPT)
    old_BT = token_logprobs(model, answers).detach()
    for _ in range(UPDATES):
        logp_BT = token_logprobs(model, answers)
        streams = {"old": old_BT, "advantage": advantage_BT}
        _, slope_BT = PolicyGradient()(logp_BT.detach(), streams)
        optimizer.zero_grad()
        (slope_BT * logp_BT).mean().backward()
        optimizer.step()


def group_advantage(reward_B: "Tensor", group: int = GROUP) -> "Tensor":
    """How much better each answer is than its group."""
    from cairn.train.rules.advantages import group_advantages

    return group_advantages(reward_B.reshape(-1, group), "dr_grpo").flatten()


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


def _checks(cosine: float, noise: float, rewards: list[float]) -> list[Check]:
    return [
        Check(
            what=Words("expected reward at the end over the start", "期望奖励：结束与开始之比"),
            predicted=1.5,
            measured=rewards[-1] / rewards[0],
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words(
                "cosine of the samples' gradient with that of the expected reward",
                "采样梯度与期望奖励精确梯度的余弦",
            ),
            predicted=0.9,
            measured=cosine,
            unit="",
            kind="at_least",
        ),
        Check(
            what=Words(
                "error of the gradient with a quarter of the samples, over that with all",
                "样本减为四分之一时梯度误差的倍数",
            ),
            predicted=2.0,
            measured=noise,
            unit="x",
            within=0.4,
        ),
    ]


def _plot(rewards: list[float]) -> Plot:
    return Plot(
        title=Words("Reward", "奖励"),
        x=Words("round", "轮"),
        y=Words("expected reward", "期望奖励"),
        lines={"reward": list(enumerate(rewards))},
        limit=("all right", 1.0),
    )


def _note(rewards: list[float]) -> Words:
    before, after = rewards[0], rewards[-1]
    return Words(
        f"Expected reward: {before:.0%} before, {after:.0%} after; a group that is all right or all wrong teaches "
        f"nothing.",
        f"期望奖励：之前 {before:.0%}，之后 {after:.0%}；全对或全错的组没有学习信号。",
    )


LAB = described(__file__, run)
