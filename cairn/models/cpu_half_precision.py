"""Products of bfloat16 and float16 tensors on a CPU that has no instruction for them.

torch multiplies those one number after the other: on a Neoverse N1 a hundred times as slowly as float32. Here they are
computed in float32 and rounded once, which is what the instructions do, too. Everything else goes to torch as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.hw.cpu_types import multiplies

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ w.T + bias"""
    if not _in_float32(x_MK):
        return F.linear(x_MK, w_NK, bias_N)
    bias = None if bias_N is None else bias_N.float()
    return F.linear(x_MK.float(), w_NK.float(), bias).to(x_MK.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in as many batches as they have."""
    if not _in_float32(a):
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """torch's `einsum` of two tensors."""
    if not _in_float32(a):
        return torch.einsum(equation, a, b)
    return torch.einsum(equation, a.float(), b.float()).to(a.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's `scaled_dot_product_attention`."""
    dtype, widened = q.dtype, _in_float32(q)
    if widened:
        q, k, v = q.float(), k.float(), v.float()
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.float()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.to(dtype) if widened else out


class HalfPrecisionLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Conv1d(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        if not _in_float32(input):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return self._conv_forward(input.float(), self.weight.float(), bias).to(input.dtype)


def _in_float32(x: Tensor) -> bool:
    return x.dtype in NAMES and x.device.type == "cpu" and not multiplies(NAMES[x.dtype])
