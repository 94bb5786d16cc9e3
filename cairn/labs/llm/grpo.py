"""Reinforcement learning with a checkable reward: sample a group of answers, and push towards those above its mean.

advantage = (reward - mean of the group) / standard deviation of the group      no value network
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
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


LAB = Lab(
    name="grpo",
    area="llm",
    title=Words(
        "Reinforcement learning with checkable rewards: GRPO", "可验证奖励的强化学习：GRPO"
    ),
    hypothesis=Words(
        "Comparing each sampled answer with the mean of its own group is enough of a "
        "baseline: advantages of a group sum to zero, and the share of right answers "
        "rises without a value network.",
        "把每个采样答案与同组均值比较就足以作为基线：组内优势之和为零，且无需价值网络正"
        "确率就会上升。",
    ),
    run=run,
    causes=(
        Words(
            "few right answers at the start: groups without any reward carry no signal",
            "开始时几乎没有正确答案：没有奖励的组不提供信号",
        ),
        Words("chance: a few hundred samples per step are noisy", "随机性：每步几百个样本噪声较大"),
    ),
    code=(
        "cairn/labs/llm/grpo.py:group_advantage",
        "cairn/labs/llm/grpo.py:sample",
        "cairn/train/data/arithmetic.py:is_right",
    ),
    reading=(
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models (2024)",
        "Proximal Policy Optimization Algorithms (2017)",
    ),
    questions=(
        Question(
            Words("What does GRPO save against PPO?", "GRPO 相比 PPO 省了什么？"),
            Words(
                "The value network: its memory (another model), its training and its errors. "
                "The price is several samples per prompt.",
                "省掉价值网络：它的显存（另一个模型）、训练和误差；代价是每个提示要采样多个答案。",
            ),
        ),
        Question(
            Words(
                "Where does the time of such a step go in production?",
                "生产中这样一步的时间花在哪里？",
            ),
            Words(
                "Into generation: hundreds of decode steps against one forward and backward "
                "pass, so the inference engine decides; then into moving new weights to it.",
                "花在生成上：几百步 decode 对比一次前向反向，因此由推理引擎决定；其次是把新权重"
                "搬过去。",
            ),
        ),
        Question(
            Words("Why keep a KL term or clip the ratio?", "为什么要保留 KL 项或裁剪比率？"),
            Words(
                "The samples came from an older policy; far from it the estimate is wrong, and "
                "the policy finds answers that please the checker but are no language any more.",
                "样本来自旧策略，离得太远估计就不准，而且策略会找到能骗过检查器却不再像语言的答案。",
            ),
        ),
    ),
    seconds=8.0,
)
