"""Advantages: of groups of answers to one prompt, and GAE.

    grpo       (R - mean) / (std + eps)     unbiased std of the group      (arXiv:2402.03300)
    dr_grpo    R - mean                     easy and hard prompts alike    (arXiv:2503.20783)
    rloo       G / (G - 1) (R - mean)       the others' mean as baseline   (arXiv:2402.14740)

Rewards that could not be scored are NaN: they leave the group, and their answer has the advantage 0.
"""

from typing import Literal

from torch import Tensor

from cairn.core.errors import DataError

Kind = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(rewards_GN: Tensor, kind: Kind = "dr_grpo", eps: float = 1e-4) -> Tensor:
    """Advantages of G prompts with N answers each."""
    if rewards_GN.dim() != 2 or not rewards_GN.shape[1]:
        raise DataError(
            f"rewards of shape {list(rewards_GN.shape)}", hint="give [prompts, answers], 1 or more"
        )
    if rewards_GN.isinf().any():
        raise DataError("a reward is infinite", hint="rewards are finite, or NaN if there is none")
    scored_GN = ~rewards_GN.isnan()
    count_G1 = scored_GN.sum(1, keepdim=True)
    mean_G1 = rewards_GN.nansum(1, keepdim=True) / count_G1.clamp(min=1)
    centred_GN = (rewards_GN - mean_G1).where(scored_GN, 0.0)
    if kind == "rloo":
        centred_GN = centred_GN * count_G1 / (count_G1 - 1).clamp(min=1)
    if kind == "grpo":
        variance_G1 = centred_GN.square().sum(1, keepdim=True) / (count_G1 - 1).clamp(min=1)
        centred_GN = centred_GN / (variance_G1.sqrt() + eps)
    return centred_GN


def informative(rewards_GN: Tensor) -> Tensor:
    """Groups whose rewards are not all equal: the others teach nothing (DAPO's dynamic sampling)."""
    low_G = rewards_GN.nan_to_num(float("inf")).amin(1)
    high_G = rewards_GN.nan_to_num(float("-inf")).amax(1)
    return high_G > low_G


def gae(
    rewards_T: Tensor, values_T: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one finished sequence (arXiv:1506.02438)."""
    advantages: list[float] = []
    following, running = 0.0, 0.0
    for reward, value in zip(
        reversed(rewards_T.tolist()), reversed(values_T.tolist()), strict=True
    ):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        advantages.append(running)
    advantages_T = values_T.new_tensor(advantages[::-1])
    return advantages_T, advantages_T + values_T


def whitened(x_T: Tensor) -> Tensor:
    """Mean 0 and variance 1, as PPO takes its advantages; of one token 0, because it has no variance."""
    variance = x_T.var(correction=int(len(x_T) > 1))
    return (x_T - x_T.mean()) * (variance + 1e-8).rsqrt()
