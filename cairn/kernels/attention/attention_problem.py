"""Attention problem over packed sequences: lengths, mask, and cost.

    sequence s owns query rows cu_q[s] .. cu_q[s+1] and key rows cu_k[s] .. cu_k[s+1] of the packed tensors; without
    cu_seqlens every sequence has the same length. Query i stands at position p = i + len_k - len_q and sees

        keys j <= p          causal (the ends of queries and keys are aligned)
        keys j > p - window  where there is a window

Nothing here runs a kernel or reads a length from the GPU.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require
from cairn.kernels.kernel import Cost

WIDTHS = (64, 96, 128, 256)  # of a head


class Problem(NamedTuple):
    """A call of attention without its value tensors."""

    cu_q: Tensor | None  # int32 [n + 1] on the device; None: n sequences of exactly max_q tokens
    cu_k: Tensor | None  # None: as cu_q
    sequences: int
    max_q: int  # no sequence has more queries
    max_k: int
    causal: bool
    window: int  # 0: none
    softcap: float  # 0: none
    scale: float

    @property
    def dense(self) -> bool:
        return self.cu_q is None

    @property
    def square(self) -> bool:
        """Each sequence has as many queries as keys."""
        return self.cu_k is None and self.max_q == self.max_k


def checked_problem(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_length: int,
    max_length_k: int | None,
    causal: bool,
    window: int,
    softcap: float,
    scale: float | None,
) -> Problem:
    """Everything that can be wrong without looking at values on the GPU is a ValueError here."""
    _check_tensors(q_THC, k_TKC, v_TKC)
    require(max_length >= 1, "max_length", "at least 1", max_length)
    max_k = max_length if max_length_k is None else max_length_k
    require(max_k >= 0, "max_length_k", "0 or more", max_k)
    if cu_seqlens is None:
        sequences = _equal_lengths(q_THC, k_TKC, cu_seqlens_k, max_length, max_k)
    else:
        sequences = _ragged_lengths(q_THC, k_TKC, cu_seqlens, cu_seqlens_k)
    require(window >= 0, "window", "0 (none) or more", window)
    require(causal or not window, "window", "0 where attention is not causal", window)
    require(0 <= softcap < math.inf, "softcap", "0 (none) or more", softcap)
    if scale is None:
        scale = q_THC.shape[-1] ** -0.5
    require(0 < scale < math.inf, "scale", "above 0", scale)
    if window >= max_k:
        window = 0  # it hides nothing
    return Problem(
        cu_seqlens, cu_seqlens_k, sequences, max_length, max_k, causal, window, softcap, scale
    )


def _check_tensors(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
    check("q", q_THC, dtypes=(*FLOATS, torch.float64), shape=(None, None, None))
    require(q_THC.shape[-1] in WIDTHS, "q", f"heads of {WIDTHS} columns", q_THC.shape[-1])
    check("k", k_TKC, dtypes=(q_THC.dtype,), shape=(None, None, q_THC.shape[2]), beside=q_THC)
    check("v", v_TKC, dtypes=(q_THC.dtype,), shape=k_TKC.shape, beside=q_THC)
    heads, kv_heads = q_THC.shape[1], k_TKC.shape[1]
    divides = kv_heads > 0 and heads % kv_heads == 0
    require(divides, "k", f"heads that divide the {heads} of q", kv_heads)
    for name, tensor in (("q", q_THC), ("k", k_TKC), ("v", v_TKC)):
        side_by_side = tensor.stride(2) == 1
        require(side_by_side, name, "stride 1 in the last dimension", tensor.stride())


def _equal_lengths(
    q_THC: Tensor, k_TKC: Tensor, cu_seqlens_k: Tensor | None, max_q: int, max_k: int
) -> int:
    require(cu_seqlens_k is None, "cu_seqlens_k", "None where cu_seqlens is None", "a tensor")
    sequences, rest = divmod(q_THC.shape[0], max_q)
    require(rest == 0, "q", f"a multiple of {max_q} rows without cu_seqlens", q_THC.shape[0])
    require(k_TKC.shape[0] == sequences * max_k, "k", f"{sequences} x {max_k} rows", k_TKC.shape[0])
    return sequences


def _ragged_lengths(
    q_THC: Tensor, k_TKC: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None
) -> int:
    check("cu_seqlens", cu_seqlens, dtypes=(torch.int32,), shape=(None,), beside=q_THC, packed=True)
    bounds = cu_seqlens.shape[0]
    require(bounds >= 2, "cu_seqlens", "at least 2 bounds", bounds)
    if cu_seqlens_k is None:
        same = k_TKC.shape[0] == q_THC.shape[0]
        require(same, "k", f"{q_THC.shape[0]} rows without cu_seqlens_k", k_TKC.shape[0])
    else:
        check("cu_seqlens_k", cu_seqlens_k, dtypes=(torch.int32,), shape=(bounds,), beside=q_THC,
              packed=True)  # fmt: skip
    return bounds - 1


def pairs(queries: int, keys: int, causal: bool = True, window: int = 0) -> int:
    """Number of (query, key) pairs of a sequence under the mask."""
    if not causal:
        return queries * keys
    first, last = keys - queries + 1, keys  # how many keys the first and the last query see
    seen = _sum_clamped(first, last)
    return seen - _sum_clamped(first - window, last - window) if window else seen


def _sum_clamped(first: int, last: int) -> int:
    """first + ... + last, without what is negative."""
    first = max(first, 1)
    return (first + last) * (last - first + 1) // 2 if last >= first else 0


def cost(
    lengths: Iterable[int] | Iterable[tuple[int, int]],
    heads: int,
    kv_heads: int,
    width: int,
    *,
    causal: bool = True,
    window: int = 0,
    backward: bool = False,
    element_bytes: int = 2,
) -> Cost:
    """`lengths`: of each sequence, or (queries, keys) of each. Two products of pairs x width forward, five backward."""
    both = [(n, n) if isinstance(n, int) else n for n in lengths]
    queries, keys = sum(q for q, _ in both), sum(k for _, k in both)
    visible = sum(pairs(q, k, causal, window) for q, k in both)
    products = 5 if backward else 2
    q_bytes = queries * heads * width * element_bytes
    kv_bytes = 2 * keys * kv_heads * width * element_bytes
    lse_bytes = 4 * queries * heads
    moved = (4 * q_bytes + 2 * kv_bytes) if backward else (2 * q_bytes + kv_bytes)
    return Cost(flops=2.0 * products * visible * heads * width, bytes=float(moved + lse_bytes))
