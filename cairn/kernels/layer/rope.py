"""QK norm and RoPE of the fused QKV projection.

    qkv [T, (H + 2K) * C]  ->  q [T, H, C], k [T, K, C], v [T, K, C]

    per head of q and k:  x = rmsnorm(x) * weight (Qwen3, Gemma; optional), then with the angle of its position
    low' = low cos - high sin,  high' = high cos + low sin            dimension i is paired with i + C/2

The table [P, C] has a row for each position: C/2 cosines, then C/2 sines, an amplitude (YaRN) already in them;
`rope_table` makes one. Without positions its row t belongs to token t. Without a table nothing is rotated. Norms
round as the plain model rounds; the rotation is computed in float32 and rounded once. The same kernel can write k and
v into a cache of pages: kv_write offers that.

Any number of heads fits: a program takes as many as its registers hold. Bytes moved: q and k once in and once out; v
stays where it is, and the table is read from the cache of the GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.arguments import FLOATS, check, require, short
from cairn.kernels.dependent import begin, behind, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost, Variant
from cairn.kernels.layer.rope_backward import Heads, check_rope, heads_side_by_side, rope_backward
from cairn.kernels.norm.rmsnorm import FEW_ROWS, rmsnorm_reference
from cairn.kernels.norm.rows import blocks, launch, width
from cairn.kernels.quantize.quantize import fp8_scaled
from cairn.kernels.tuned import tuned

FP8 = torch.float8_e4m3fn
DEFAULT = {"heads": 16, "warps": 2}
Three = tuple[Tensor, Tensor, Tensor]


class Pages(NamedTuple):
    """Cache slots for keys and values; see kv_write."""

    slots_T: Tensor  # int: page * page_size + place, or -1
    cache_k: Tensor  # [pages, page_size, K, C]
    cache_v: Tensor
    # What a stored key is multiplied by: float32, one element or one for each head.
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def rope_table(
    frequencies: Tensor,
    length: int,
    amplitude: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Cosines and sines for positions 0..length-1 from radians per position [C/2]; `amplitude`: of all, or of each."""
    check("frequencies", frequencies, dtypes=(*FLOATS, torch.float64), shape=(None,))
    require(length >= 0, "length", "0 or more", length)
    positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies.float()
    return torch.cat((angles.cos() * amplitude, angles.sin() * amplitude), dim=-1).to(dtype)


def rope_reference(
    qkv_TE: Tensor, heads: Heads, table: Tensor | None, positions: Tensor | None
) -> Three:
    packed = qkv_TE.unflatten(-1, (heads.q + 2 * heads.kv, -1))
    q, k, v = packed.split([heads.q, heads.kv, heads.kv], dim=1)
    if heads.q_weight is not None and heads.k_weight is not None:
        q = rmsnorm_reference(q, heads.q_weight, heads.eps, heads.plus_one)
        k = rmsnorm_reference(k, heads.k_weight, heads.eps, heads.plus_one)
    if table is not None:
        rows = table[: len(q)] if positions is None else table[positions.long()]
        q, k = _rotated(q, rows), _rotated(k, rows)
    return q, k, v


def _rotated(x_THC: Tensor, rows_TC: Tensor) -> Tensor:
    wide = x_THC if x_THC.dtype == torch.float64 else x_THC.float()
    cos, sin = rows_TC[:, None].to(wide.dtype).chunk(2, dim=-1)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x_THC.dtype)


@triton.jit
def _halves(row, i, inside, C: tl.constexpr):
    """Of weights or angles."""
    low = tl.load(row + i, mask=inside, other=0.0, eviction_policy="evict_last")
    high = tl.load(row + C // 2 + i, mask=inside, other=0.0, eviction_policy="evict_last")
    return low, high


@triton.jit
def _position(positions, token):
    if positions is not None:
        return tl.load(positions + token).to(tl.int64)
    else:
        return token


@triton.jit
def _normed_and_rotated(
    low, high, w_low, w_high, cos, sin, eps, C: tl.constexpr, PLUS_ONE: tl.constexpr
):  # fmt: skip
    """Both halves of some heads, normed and rotated, rounded as the plain model rounds.

    What the plain model multiplies in 16 bits is multiplied in 16 bits: two products are one instruction then, and
    to round on the way takes no conversion of single numbers, which would be as slow as exponentials.
    """
    dtype = low.dtype
    if w_low is not None:
        low, high = low.to(tl.float32), high.to(tl.float32)
        r = tl.rsqrt(tl.sum(low * low + high * high, axis=1)[:, None] / C + eps)
        low, high = low * r, high * r
        if PLUS_ONE:
            w_low, w_high = w_low.to(tl.float32) + 1.0, w_high.to(tl.float32) + 1.0
        else:
            low, high = low.to(dtype), high.to(dtype)
        low, high = (low * w_low).to(dtype), (high * w_high).to(dtype)
    if cos is not None:
        cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        low, high = low.to(tl.float32), high.to(tl.float32)
        low, high = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
    return low, high


@triton.jit
def _put(at, low, high, scale, head, mask, C: tl.constexpr, SCALES: tl.constexpr):
    """Both halves of some heads. SCALES: 0 none, 1 one for all heads, 2 one for each."""
    if at.dtype.scalar.element_ty == tl.float8e4nv:
        factor = 1.0
        if SCALES == 1:
            factor = tl.div_rn(1.0, tl.load(scale))
        elif SCALES == 2:
            factor = tl.div_rn(1.0, tl.load(scale + head, mask=mask, other=1.0))
        low, high = fp8_scaled(low.to(tl.float32), factor), fp8_scaled(high.to(tl.float32), factor)
    tl.store(at, low.to(at.dtype.scalar.element_ty), mask=mask)
    tl.store(at + C // 2, high.to(at.dtype.scalar.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    qkv, table, positions, q_weight, k_weight, q_out, k_out, slots, cache_k, cache_v,
    k_scale, v_scale, eps, qkv_token, table_row, q_token, k_token, page, place, head_stride,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, Q: tl.constexpr,
    KV: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, SCALES: tl.constexpr,
    PLUS_ONE: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has one token, or one of PARTS of its heads: Q of q and KV of k and v.

    So what depends on the token (angles, weights, addresses) is found once for many heads. All heads are on their
    way before the first is looked at. With EARLY what depends on the token alone is read before the predecessor ends.
    """
    begin(OVERLAP, EARLY)
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    i = tl.arange(0, HALF)[None, :]
    inside = i < C // 2
    slot, cos, sin = token, None, None
    q_w_low, q_w_high, k_w_low, k_w_high = None, None, None, None
    if EARLY:
        if slots is not None:
            slot = tl.load(slots + token).to(tl.int64)
        if table is not None:
            cos, sin = _halves(table + _position(positions, token) * table_row, i, inside, C)
        if q_weight is not None:
            q_w_low, q_w_high = _halves(q_weight, i, inside, C)
            k_w_low, k_w_high = _halves(k_weight, i, inside, C)
        behind(OVERLAP, EARLY)
    q, kv = part * Q + tl.arange(0, Q)[:, None], part * KV + tl.arange(0, KV)[:, None]
    q_mask, kv_mask = inside & (q < H), inside & (kv < K)
    of_q = qkv + token * qkv_token + q * C + i
    of_k = qkv + token * qkv_token + (H + kv) * C + i
    q_low = tl.load(of_q, mask=q_mask, other=0.0)
    q_high = tl.load(of_q + C // 2, mask=q_mask, other=0.0)
    k_low = tl.load(of_k, mask=kv_mask, other=0.0)
    k_high = tl.load(of_k + C // 2, mask=kv_mask, other=0.0)
    v_low, v_high = k_low, k_high
    if slots is not None:
        v_low = tl.load(of_k + K * C, mask=kv_mask, other=0.0)
        v_high = tl.load(of_k + K * C + C // 2, mask=kv_mask, other=0.0)
    if not EARLY:
        if slots is not None:
            slot = tl.load(slots + token).to(tl.int64)
        if table is not None:
            cos, sin = _halves(table + _position(positions, token) * table_row, i, inside, C)
        if q_weight is not None:
            q_w_low, q_w_high = _halves(q_weight, i, inside, C)
            k_w_low, k_w_high = _halves(k_weight, i, inside, C)
    q_low, q_high = _normed_and_rotated(
        q_low, q_high, q_w_low, q_w_high, cos, sin, eps, C, PLUS_ONE
    )
    _put(q_out + token * q_token + q * C + i, q_low, q_high, None, q, q_mask, C, 0)
    k_low, k_high = _normed_and_rotated(
        k_low, k_high, k_w_low, k_w_high, cos, sin, eps, C, PLUS_ONE
    )
    if k_out is not None:
        _put(k_out + token * k_token + kv * C + i, k_low, k_high, None, kv, kv_mask, C, 0)
    if slots is not None:
        kept = kv_mask & (slot >= 0)
        at = slot // PAGE * page + slot % PAGE * place + kv * head_stride + i
        _put(cache_k + at, k_low, k_high, k_scale, kv, kept, C, SCALES)
        _put(cache_v + at, v_low, v_high, v_scale, kv, kept, C, SCALES)


def rope(
    qkv: Tensor,
    heads: Heads,
    table: Tensor | None,
    positions: Tensor | None = None,
    impl: Impl = "auto",
    gradients_in_place: bool = False,
) -> Three:
    """q [T, H, C] and k [T, K, C], normed and rotated; v is a view of qkv. Differentiable.

    `gradients_in_place`: nobody else looks at the gradients that come back, so they may be overwritten.
    """
    check_rope(qkv, heads, table, positions)
    chosen = choose("rope", impl, {"triton": needs_cuda(qkv), "reference": None})
    if chosen.impl == "reference":
        return rope_reference(qkv, heads, table, positions)
    weights = (heads.q_weight, heads.k_weight)
    return _Rope.apply(qkv, *weights, heads, table, positions, gradients_in_place)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        heads: Heads,
        table: Tensor | None,
        positions: Tensor | None,
        in_place: bool,
    ) -> Three:
        packed = qkv.unflatten(-1, (heads.q + 2 * heads.kv, -1))
        tokens, _, size = packed.shape
        q = torch.empty(tokens, heads.q, size, dtype=qkv.dtype, device=qkv.device)
        k = torch.empty(tokens, heads.kv, size, dtype=qkv.dtype, device=qkv.device)
        how = tuned("rope", key(size, qkv.dtype), DEFAULT)
        launch_rope(how, qkv, heads, table, positions, q, k, None)
        ctx.heads, ctx.in_place = heads._replace(q_weight=None, k_weight=None), in_place
        ctx.save_for_backward(qkv, q_weight, k_weight, table, positions)
        return q, k, packed[:, heads.q + heads.kv :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        qkv, q_weight, k_weight, table, positions = ctx.saved_tensors
        heads = ctx.heads._replace(q_weight=q_weight, k_weight=k_weight)
        dq, dk, dv = (heads_side_by_side(grad) for grad in grad_outputs)
        found = rope_backward(
            dq, dk, dv, qkv, heads, table, positions, impl="triton", in_place=ctx.in_place
        )
        return *found, None, None, None, None


def key(size: int, dtype: torch.dtype) -> str:
    return f"size={size},{short(dtype)}"


def launch_rope(
    how: Mapping[str, int],
    qkv: Tensor,
    heads: Heads,
    table: Tensor | None,
    positions: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    pages: Pages | None,
    prefetch: bool = False,
) -> None:
    tokens, size = qkv.shape[0], q.shape[2]
    shares = _shares(how["heads"], heads.q, heads.kv)
    require(tokens * shares["PARTS"] < 2**31, "qkv", "fewer than 2**31 parts of tokens", tokens)
    if not tokens:
        return
    to = pages or (None,) * 5
    page, place, head = (0, 0, 0) if pages is None else pages.cache_k.stride()[:3]
    scales = 0 if pages is None or pages.k_scale is None else 1 + (pages.k_scale.numel() > 1)
    launch(
        _rope_kernel, tokens * shares["PARTS"],
        qkv, table, positions, heads.q_weight, heads.k_weight, q, k, *to, heads.eps, qkv.stride(0),
        0 if table is None else table.stride(0), q.stride(0), 0 if k is None else k.stride(0),
        page, place, head, H=heads.q, K=heads.kv, C=size, HALF=width(size // 2), **shares,
        PAGE=1 if pages is None else pages.cache_k.shape[1], SCALES=scales,
        PLUS_ONE=heads.plus_one, EARLY=prefetch and tokens <= FEW_ROWS, num_warps=how["warps"], **pdl(qkv.device),
    )  # fmt: skip


def _shares(most: int, q: int, kv: int) -> dict[str, int]:
    """Division of a token's heads among programs with at most `most` query heads."""
    parts = blocks(q, min(most, width(q)))
    return {"Q": min(most, width(q)), "KV": width(blocks(kv, parts)), "PARTS": parts}


def cost(tokens: int, heads: Heads, size: int, element_bytes: int = 2) -> Cost:
    elements = tokens * (heads.q + heads.kv) * size
    return Cost(9 * elements, 2 * elements * element_bytes)


def variant(size: int, q: int, kv: int, how: dict[str, int], normed: bool, cache: str) -> Variant:
    pointers = {"qkv": "*bf16", "table": "*fp32", "positions": "*i64", "q_out": "*bf16"}
    pointers |= dict.fromkeys(("q_weight", "k_weight"), "*bf16") if normed else {}
    if cache:
        pointers |= {"slots": "*i64", "cache_k": f"*{cache}", "cache_v": f"*{cache}"}
    else:
        pointers |= {"k_out": "*bf16"}
    scaled = cache == "fp8e4nv"
    pointers |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") if scaled else {}
    strides = ("qkv_token", "table_row", "q_token", "k_token", "page", "place", "head_stride")
    optional = {
        "q_weight",
        "k_weight",
        "k_out",
        "slots",
        "cache_k",
        "cache_v",
        "k_scale",
        "v_scale",
    }
    return Variant(
        f"rope {q}/{kv} x {size}{' + norms' * normed}{f' + {cache} cache' * bool(cache)}, {how}",
        _rope_kernel,
        pointers | dict.fromkeys(strides, "i32") | {"eps": "fp32"},
        {"H": q, "K": kv, "C": size, "HALF": width(size // 2), "PAGE": 64}
        | _shares(how["heads"], q, kv)
        | {
            "SCALES": int(scaled),
            "PLUS_ONE": False,
            "EARLY": bool(cache),
            "OVERLAP": True,
            **dict.fromkeys(optional - set(pointers)),
        },
        {"num_warps": how["warps"]},
        [*pointers, *strides],
    )


CANDIDATES = [{"heads": h, "warps": w} for h, w in ((16, 2), (32, 4), (32, 2), (16, 4), (32, 8))]


class Inputs(NamedTuple):
    qkv: Tensor
    heads: Heads
    table: Tensor
    positions: Tensor


def random_inputs(tokens: int, q: int, kv: int, normed: bool) -> Inputs:
    """Random inputs on the GPU with heads of 128, in sequences of 4096."""
    qkv = torch.randn(tokens, (q + 2 * kv) * 128, device="cuda").bfloat16()
    weights = torch.randn(2, 128, device="cuda").bfloat16()
    heads = Heads(q, kv, weights[0], weights[1]) if normed else Heads(q, kv)
    frequencies = 1e6 ** -(torch.arange(64, device="cuda") / 64)
    positions = torch.arange(tokens, device="cuda") % 4096
    return Inputs(qkv, heads, rope_table(frequencies, 4096), positions)
