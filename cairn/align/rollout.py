"""Rollouts as batches: problems -> groups of answers -> rewards -> advantages -> what a training step reads.

prompt  prompt  a     b     <end>            tokens
none    a       b     <end>  none            targets: the answer alone is learnt
        A       A     A                      advantage of the answer
        m       m     m                      log-probability when it was sampled (`old`)
        w       w     w                      weight of a token in the mean
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.align.config import Align
from cairn.align.environment import ENVIRONMENTS, Limits, run_episodes
from cairn.align.policy import Policy, Sampled
from cairn.align.shared_prompts import share_prompts
from cairn.align.tasks import Problem, make_problem, reward_of, turns_of
from cairn.core.errors import DataError
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.batch import IGNORED, Batch, Document, pack
from cairn.train.data.counter_rng import mix
from cairn.train.rules.advantages import Kind, group_advantages, informative
from cairn.train.rules.policy import weigh

PADDED = 64  # tokens of a batch are a multiple of it
ADVANTAGES: dict[str, Kind] = {
    "grpo": "grpo",
    "gspo": "grpo",
    "dapo": "grpo",
    "cispo": "grpo",
    "rloo": "rloo",
}
MEANS = {
    "grpo": "sequence",
    "rloo": "sequence",
    "gspo": "sequence",
    "dapo": "token",
    "cispo": "token",
    "ppo": "token",
}


class Trajectory(NamedTuple):
    problem: Problem
    prompt: list[int]
    sampled: Sampled
    text: str
    reward: float


def prompt_of(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Encode the prompt as a chat if the model has a template, else as text."""
    if tokenizer.templates:
        return tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])
    return tokenizer.encode(problem.prompt)


def written(tokenizer: Tokenizer, answer: str) -> tuple[list[int], list[bool]]:
    """A written answer, and its end; and which tokens are to be learnt: not what a tool says."""
    tokens: list[int] = []
    own: list[bool] = []
    for part, ours in turns_of(answer):
        encoded = tokenizer.encode(part, False)
        tokens, own = tokens + encoded, own + [ours] * len(encoded)
    end = sorted(tokenizer.eos_ids)[:1]
    return tokens + end, own + [True] * len(end)


def roll_out(policy: Policy, config: Align, first: int, groups: int) -> list[list[Trajectory]]:
    """A group of answers to each of the problems from number `first` on."""
    problems = [make_problem(config.task, config.seed, first + at) for at in range(groups)]
    prompts = [prompt_of(policy.tokenizer, problem) for problem in problems]
    check_room(prompts, config)
    group = config.rollout.group
    each = [prompt for prompt in prompts for _ in range(group)]
    seeds = [mix(config.seed, first, at) >> 1 for at in range(len(each))]
    sampled = answers_to(policy, config, each, seeds)
    return [
        [
            judged(policy.tokenizer, config, problem, prompt, one)
            for one in sampled[at * group : (at + 1) * group]
        ]
        for at, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
    ]


def answers_to(
    policy: Policy, config: Align, prompts: Sequence[list[int]], seeds: Sequence[int]
) -> list[Sampled]:
    """An answer to each prompt, with the tools of the task if it has any."""
    environment, most = ENVIRONMENTS.get(config.task.kind), config.rollout.max_tokens
    if environment is None:
        return policy.sample(prompts, most, seeds)
    return run_episodes(policy, environment, prompts, Limits(most, config.task.turns), seeds)


def judged(
    tokenizer: Tokenizer, config: Align, problem: Problem, prompt: list[int], sampled: Sampled
) -> Trajectory:
    """Add the reward to an answer; a truncated answer has none."""
    text = tokenizer.decode(sampled.tokens)
    reward = reward_of(config.task, problem, text) if sampled.stopped else 0.0
    if not math.isfinite(reward):
        raise DataError(
            f"the reward of an answer to {problem.prompt!r} is {reward}",
            hint="a reward is a finite number: one that is not would spoil its whole group",
        )
    return Trajectory(problem, prompt, sampled, text, reward)


def check_room(prompts: Sequence[list[int]], config: Align) -> None:
    longest = max(map(len, prompts)) + config.rollout.max_tokens
    if longest > config.data.sequence:
        raise DataError(
            f"a prompt with an answer has up to {longest} tokens, and data.sequence is {config.data.sequence}",
            hint=f"use --data.sequence {-(-longest // 16) * 16}",
        )


def documents_of(groups: Sequence[Sequence[Trajectory]], config: Align) -> list[Document]:
    """The answers that one step learns from, with their advantages and weights.

    The mean is over all answers, also over those of groups whose rewards are all equal, as in the papers. Where these
    have no gradient, they are not computed, and the others' weights make up for it: the step divides by the answers
    that it computes. Only DAPO leaves such groups out of the mean (arXiv:2503.14476, dynamic sampling).
    """
    kind = config.algorithm.kind
    if kind == "dapo":
        groups = [group for group in groups if len({one.reward for one in group}) > 1]
    if not groups:
        return []
    rewards_GN = torch.tensor([[one.reward for one in group] for group in groups])
    answers = [one for group in groups for one in group]
    differs_S = informative(rewards_GN).repeat_interleave(rewards_GN.shape[1])
    advantages_S = group_advantages(rewards_GN, ADVANTAGES.get(kind, "dr_grpo")).flatten()
    advantages_S = advantages_S.where(differs_S, 0.0)  # not what rounding leaves of a difference
    lengths_S = torch.tensor([one.sampled.written for one in answers])
    weights_S = weigh(MEANS.get(kind, "constant"), lengths_S, config.rollout.max_tokens)
    has_gradient_S = differs_S | bool(config.algorithm.kl) | (kind == "ppo")
    weights_S = weights_S * has_gradient_S.float().mean()
    return [
        document(
            one.prompt,
            one.sampled.tokens,
            one.sampled.logp,
            float(advantage),
            float(weight),
            one.sampled.own,
        )
        for one, advantage, weight, has_gradient in zip(
            answers, advantages_S, weights_S, has_gradient_S, strict=True
        )
        if has_gradient
    ]


def document(
    prompt: list[int],
    answer: list[int],
    logp: list[float],
    advantage: float,
    weight: float,
    own: Sequence[bool] = (),
) -> Document:
    """`own`: the tokens of the answer that are learnt; empty: all."""
    tokens_T = torch.tensor([*prompt, *answer])
    begin, end = len(prompt) - 1, len(prompt) + len(answer) - 1
    targets_T = torch.full_like(tokens_T, IGNORED)
    targets_T[begin:end] = tokens_T[begin + 1 :]
    if own:
        targets_T[begin:end][~torch.tensor(own)] = IGNORED

    def stream(values: float | list[float]) -> Tensor:
        made_T = torch.zeros(len(tokens_T))
        made_T[begin:end] = torch.tensor(values)
        return made_T.where(targets_T != IGNORED, 0.0)

    streams = {"advantage": stream(advantage), "old": stream(logp), "weight": stream(weight)}
    return Document(tokens_T, targets_T, streams)


def batches_of(
    documents: Sequence[Document], size: int, pad_id: int, first: int, shared: bool = False
) -> list[Batch]:
    """`size` answers in each microbatch. Their numbers begin at `first`. `shared`: a prompt is there once."""
    batches = []
    for begin in range(0, len(documents), size):
        part = documents[begin : begin + size]
        ids = range(first + begin, first + begin + len(part))
        parts, prefixes = share_prompts(part) if shared else (part, ())
        tokens = sum(len(one.tokens_T) for one in parts)
        batches.append(pack(parts, -(-tokens // PADDED) * PADDED, pad_id, list(ids), prefixes))
    return batches


def shares_prompts(config: Align, spec: ModelSpec) -> bool:
    """Return whether answers are computed behind one copy of their prompt.

    A state of a recurrent layer is not handed on to several documents, dynamic rotations of a prompt depend on how long
    its answer is, and values of PPO are read document by document.
    """
    layers = range(spec.layers)
    covered = {spec.mixer_of(layer) for layer in layers} == {"attention"}
    covered = covered and all(rope.kind != "dynamic" for rope in spec.ropes(layers))
    return config.rollout.shared_prompts and covered and config.algorithm.kind != "ppo"
