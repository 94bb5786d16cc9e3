"""The gated delta rule (arXiv:2412.06464) and the convolution before it, as torch computes them; what the kernels take.

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   y = S^T q          S [K, V] of each head, float32

The state is a matrix that maps keys to values. A token first lets all of it fade by exp(g), then replaces what the
state has for its key by a mixture with its own value, beta of it. Of several tokens, what one writes depends on what
those before it have written, which is a triangular system for each chunk of them:

    (I + A) U = beta V,   (I + A) W = beta exp(G) K        A = strictly lower part of beta exp(G_i - G_j) k_i k_j
    new = U - W S                                          what the tokens write, S: the state before the chunk
    Y = exp(G) Q S + lower(exp(G_i - G_j) q_i k_j) new     G: running sum of g within the chunk
    S <- exp(G_last) S + (exp(G_last - G) K)^T new

So a chunk is a few products of matrices instead of 64 steps, each of which would read the state. Without Triton: models
on a CPU run these. `delta_step`, `delta_chunk` and `short_conv` are the kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require

CHUNK = 64
NORM_EPS = 1e-6  # of the length of q and k


class Sequences(NamedTuple):
    """Sequences of a step: their state slots and token ranges."""

    slots_B: Tensor  # int32; -1: padding
    starts_B1: Tensor | None  # int32; None: one token each
    tokens: int

    def check(self, beside: Tensor) -> None:
        count = len(self.slots_B)
        whole = (torch.int32,)
        check("slots_B", self.slots_B, dtypes=whole, shape=(None,), beside=beside, packed=True)
        if self.starts_B1 is None:
            require(self.tokens == count, "starts_B1", f"bounds of {count} sequences", None)
        else:
            size = (count + 1,)
            check("starts_B1", self.starts_B1, dtypes=whole, shape=size, beside=beside, packed=True)

    @property
    def bounds(self) -> Tensor:
        """Bounds argument of a kernel; a placeholder that is never read if there are none."""
        return self.slots_B if self.starts_B1 is None else self.starts_B1


class DeltaCall(NamedTuple):
    """Arguments of both kernels of the rule: tokens of several sequences, and the states in slots."""

    mixed_TE: Tensor  # q, k and v of all heads side by side
    g_TH: Tensor  # float32
    beta_TH: Tensor  # float32
    state_NRV: Tensor  # float32 [slots, heads of values * K, V]
    sequences: Sequences
    key_heads: int
    key_width: int

    @property
    def heads(self) -> int:
        return self.g_TH.shape[1]

    @property
    def value_width(self) -> int:
        return self.state_NRV.shape[2]

    def check(self) -> None:
        tokens, heads, mixed = self.sequences.tokens, self.heads, self.mixed_TE
        width = 2 * self.key_heads * self.key_width + heads * self.value_width
        check("mixed_TE", mixed, dtypes=FLOATS, shape=(tokens, width), packed=True)
        for name, given in (("g_TH", self.g_TH), ("beta_TH", self.beta_TH)):
            shape, wide = (tokens, heads), (torch.float32,)
            check(name, given, dtypes=wide, shape=shape, beside=mixed, packed=True)
        shape = (None, heads * self.key_width, self.value_width)
        wide = (torch.float32,)
        check("state_NRV", self.state_NRV, dtypes=wide, shape=shape, beside=mixed, packed=True)
        why_not = obstacle(self.key_heads, heads, self.key_width, self.value_width)
        require(why_not is None, "state_NRV", "sizes that the kernels have", why_not)
        self.sequences.check(mixed)

    def constants(self) -> dict[str, int | bool]:
        return dict(
            KEY_HEADS=self.key_heads,
            HEADS=self.heads,
            K=self.key_width,
            V=self.value_width,
            STARTS=self.sequences.starts_B1 is not None,
        )


def obstacle(key_heads: int, heads: int, key_width: int, value_width: int) -> str | None:
    """Why the kernels cannot run these sizes, or None."""
    if heads % key_heads:
        return f"{key_heads} heads of keys do not divide {heads} of values"
    if key_width < 16 or key_width > 256 or key_width & (key_width - 1):
        return f"keys have {key_width} columns, not a power of 2 from 16 to 256"
    if value_width % 16:
        return f"values have {value_width} columns, not a multiple of 16"
    return None


def short_conv_reference(
    x_SE: Tensor, before_WE: Tensor, weight_EW: Tensor
) -> tuple[Tensor, Tensor]:
    """Short convolution of a sequence [S, E], and its last W inputs. More leading dimensions are allowed."""
    joined = torch.cat((before_WE.to(x_SE.dtype), x_SE), dim=-2)
    tokens = x_SE.shape[-2]
    y_SE = joined[..., :tokens, :] * weight_EW[:, 0]
    for tap in range(1, weight_EW.shape[1]):
        y_SE = y_SE + joined[..., tap : tap + tokens, :] * weight_EW[:, tap]
    return y_SE, joined[..., tokens:, :]


def unit_length(x: Tensor) -> Tensor:
    """Rows of length one, in float32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
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


def delta_chunk_reference(
    q_SHK: Tensor, k_SHK: Tensor, v_SHV: Tensor, g_SH: Tensor, beta_SH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k of unit length, float32 -> y [S, H, V] and the state behind the last token."""
    outputs = []
    by_head = [x.transpose(0, 1) for x in (q_SHK, k_SHK, v_SHV, g_SH, beta_SH)]
    for start in range(0, len(q_SHK), CHUNK):
        q, k, v, g, beta = (x[:, start : start + CHUNK] for x in by_head)
        y_HNV, state_HKV = _chunk(q, k, v, g, beta, state_HKV)
        outputs.append(y_HNV)
    return torch.cat(outputs, dim=1).transpose(0, 1), state_HKV


def _chunk(
    q_HNK: Tensor, k_HNK: Tensor, v_HNV: Tensor, g_HN: Tensor, beta_HN: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    sums_HN = g_HN.cumsum(-1)
    # Of later tokens the difference is positive and may overflow: it is cut off before it is raised.
    fades_HNN = (sums_HN[..., :, None] - sums_HN[..., None, :]).tril().exp().tril()
    beta_HN1, grown_HN1 = beta_HN[..., None], sums_HN.exp()[..., None]
    system_HNN = beta_HN1 * (k_HNK @ k_HNK.transpose(-1, -2)) * fades_HNN
    right = torch.cat((beta_HN1 * v_HNV, beta_HN1 * grown_HN1 * k_HNK), dim=-1)
    solved = torch.linalg.solve_triangular(system_HNN, right, upper=False, unitriangular=True)
    u_HNV, w_HNK = solved.split((v_HNV.shape[-1], k_HNK.shape[-1]), dim=-1)
    new_HNV = u_HNV - w_HNK @ state_HKV
    scores_HNN = (q_HNK @ k_HNK.transpose(-1, -2)) * fades_HNN
    y_HNV = (grown_HN1 * q_HNK) @ state_HKV + scores_HNN @ new_HNV
    last_H1 = sums_HN[..., -1:]
    left_HNK = (last_H1 - sums_HN).exp()[..., None] * k_HNK
    state_HKV = state_HKV * last_H1.exp()[..., None] + left_HNK.transpose(-1, -2) @ new_HNV
    return y_HNV, state_HKV
