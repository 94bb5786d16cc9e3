"""One token of the gated delta rule (arXiv:2412.06464) for each of several sequences.

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   y = S^T q          S [K, V] of each head, float32

The state is a matrix that maps keys to values. A token first lets all of it fade by exp(g), then replaces what the
state has for its key by a mixture with its own value, beta of it. Bytes moved: the state twice, B * H * K * V * 8.
"""

import torch
from torch import Tensor

NORM_EPS = 1e-6  # of the length of q and k


def unit_length(x: Tensor) -> Tensor:
    """Rows of length one, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def delta_step_reference(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, g_BH: Tensor, beta_BH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k of unit length, float32 -> y [B, H, V] and the states behind the tokens."""
    state_BHKV = state_BHKV * g_BH.exp()[..., None, None]
    kept_BHV = (state_BHKV * k_BHK[..., None]).sum(-2)
    change_BHV = (v_BHV - kept_BHV) * beta_BH[..., None]
    state_BHKV = state_BHKV + k_BHK[..., None] * change_BHV[..., None, :]
    return (state_BHKV * q_BHK[..., None]).sum(-2), state_BHKV
