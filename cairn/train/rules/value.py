"""The loss of PPO's value head: 0.5 max((V - R)^2, (clip(V) - R)^2), where V may move by `clip` from what it was."""

import torch
from torch import Tensor


def value_loss(
    value_T: Tensor, old_T: Tensor, return_T: Tensor, clip: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Loss and slope with respect to the value of each token."""
    bound_T = old_T + (value_T - old_T).clamp(-clip, clip)
    free_T, held_T = (value_T - return_T).square(), (bound_T - return_T).square()
    inside_T = (value_T - old_T).abs() <= clip
    slope_T = torch.where(free_T >= held_T, value_T - return_T, (bound_T - return_T) * inside_T)
    return 0.5 * torch.maximum(free_T, held_T), slope_T
