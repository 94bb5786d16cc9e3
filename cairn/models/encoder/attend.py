"""Attention to both sides: every token of a text sees every other one, or those within a window around it.

    plain      one call of torch's attention for each text                    the reference
    grouped    one call for each run of texts of equal length                 a CPU, or float32
    variable   one call for all texts, by torch's kernel for packed tokens    a GPU, in 16 bits, lengths that differ

Texts lie side by side, [T, H, C]; there is no padding and no cache. `Rule.window` counts the token itself and one side.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from cairn.models.attend import AttentionRule
from cairn.models.cpu_half_precision import attention

VARIABLE_DTYPES = (torch.bfloat16, torch.float16)


class Bidirectional:
    """Texts of the given lengths; each sees itself alone. An `Attend` for encoders."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str = "cpu", plain: bool = False
    ) -> None:
        self.lengths, self.device = list(lengths), torch.device(device)
        self.plain = plain
        self.differ = len(set(self.lengths)) > 1
        self._bounds_B: Tensor | None = None

    def positions_T(self) -> Tensor:
        lengths = np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        return sent(np.arange(lengths.sum()) - np.repeat(starts, lengths), self.device)

    def lengths_T(self) -> Tensor:
        counts = torch.tensor(self.lengths, device=self.device)
        return counts.repeat_interleave(counts)

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        if self._has_variable(q_THC, rule):
            return self._variable(q_THC, k_TKC, v_TKC, rule)
        outputs, start = [], 0
        for length, same in groupby(self.lengths):
            count = sum(1 for _ in same)
            for texts in [1] * count if self.plain else [count]:
                span = slice(start, start + texts * length)
                q, k, v = (x[span].unflatten(0, (texts, length)) for x in (q_THC, k_TKC, v_TKC))
                outputs.append(_attention(q, k, v, rule))
                start += texts * length
        return torch.cat(outputs)

    def _has_variable(self, q_THC: Tensor, rule: AttentionRule) -> bool:
        whole = not rule.window or rule.window >= max(self.lengths)
        return (
            not self.plain
            and self.differ  # for equal lengths torch has faster kernels
            and q_THC.is_cuda
            and q_THC.dtype in VARIABLE_DTYPES
            and q_THC.shape[-1] % 8 == 0  # what the kernel reads at once
            and whole
            and not rule.softcap
        )

    def _variable(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self._bounds_B is None:
            bounds = np.cumsum([0, *self.lengths], dtype=np.int32)
            self._bounds_B = sent(bounds, self.device)
        groups, width = q_THC.shape[1] // k_TKC.shape[1], q_THC.shape[2]
        if groups > 1:
            k_TKC, v_TKC = (x.repeat_interleave(groups, 1) for x in (k_TKC, v_TKC))
        if rule.scale != width**-0.5:  # the kernel's own; not every version takes another
            q_THC = q_THC * (rule.scale * width**0.5)
        longest, bounds_B = max(self.lengths), self._bounds_B
        return varlen_attn(q_THC, k_TKC, v_TKC, bounds_B, bounds_B, longest, longest)  # type: ignore[return-value]


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without synchronising, so that the next batch can be prepared meanwhile."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _attention(q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, rule: AttentionRule) -> Tensor:
    """Attention over texts of equal length; returns [B * S, H, C]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BSKC, v_BSKC))
    length = q.shape[2]
    mask_SS = None
    if rule.window and rule.window < length:
        place_S = torch.arange(length, device=q.device)
        mask_SS = (place_S[:, None] - place_S).abs() < rule.window
    y = attention(q, k, v, attn_mask=mask_SS, scale=rule.scale, enable_gqa=k.shape[1] != q.shape[1])
    return y.transpose(1, 2).flatten(0, 1)
