"""Keys and values into the pages of the cache, straight from the fused projection, normed and rotated on the way.

    qkv [T, (H + 2K) * C]  ->  q [T, H, C], and k and v at slot = page * page_size + place in the page

Slot -1 writes nothing, so the padding of a CUDA graph is free. A cache of fp8 gets value / scale, saturated; the
scale is one number or one for each head. q stays in place, in the projection, or goes to a tensor of its own. The
kernel is that of `rope`, which says how heads are normed and rotated. Bytes moved: each head of q, k and v once in
and once out. Knows nothing about who owns which page.
"""

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, INTEGERS, apart, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.layer.rope import (
    DEFAULT,
    Heads,
    Pages,
    key,
    launch_rope,
    rope_reference,
)
from cairn.kernels.layer.rope_backward import check_rope
from cairn.kernels.quantize.quantize import rounded
from cairn.kernels.tuned import tuned

FP8 = torch.float8_e4m3fn


def write_reference(k_TKC: Tensor, v_TKC: Tensor, pages: Pages) -> None:
    kept = pages.slots_T >= 0
    slots, size = pages.slots_T[kept].long(), pages.cache_k.shape[1]
    caches = ((k_TKC, pages.cache_k, pages.k_scale), (v_TKC, pages.cache_v, pages.v_scale))
    for new, cache, scale in caches:
        stored = new[kept]
        if cache.dtype == FP8:
            scale = torch.ones(1, device=new.device) if scale is None else scale
            stored = rounded(stored.float() * scale.reciprocal().view(-1, 1), FP8)
        cache[slots // size, slots % size] = stored.to(cache.dtype)


def rope_write(
    qkv: Tensor,
    heads: Heads,
    table: Tensor | None,
    positions: Tensor | None,
    pages: Pages,
    *,
    out: Tensor | None = None,
    in_place: bool = False,
    k_out: Tensor | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """q [T, H, C]: in `out`, in a new tensor, or `in_place` in qkv; k and v go into the pages.

    `k_out` [T, K, C] gets the rotated keys as well, for attention that needs no pages. `prefetch`: nothing that
    is still running writes weights, table, positions or slots. No gradients.
    """
    size = check_rope(qkv, heads, table, positions)
    _check_pages(qkv, heads, size, pages)
    tokens = qkv.shape[0]
    require(out is None or not in_place, "out", "none with in_place", "one")
    q = qkv[:, : heads.q * size].unflatten(-1, (heads.q, size)) if in_place else out
    if q is None:
        q = torch.empty(tokens, heads.q, size, dtype=qkv.dtype, device=qkv.device)
    _check_packed("out", q, qkv, (tokens, heads.q, size))
    if k_out is not None:
        _check_packed("k_out", k_out, qkv, (tokens, heads.kv, size))
    chosen = choose("kv_write", impl, {"triton": needs_cuda(qkv), "reference": None})
    if chosen.impl == "reference":
        new_q, k, v = rope_reference(qkv, heads, table, positions)
        write_reference(k, v, pages)
        if k_out is not None:
            k_out.copy_(k)
        return q.copy_(new_q)
    how = tuned("kv_write", key(size, qkv.dtype), DEFAULT)
    launch_rope(how, qkv, heads, table, positions, q, k_out, pages, prefetch)
    return q


def _check_packed(name: str, buffer: Tensor, qkv: Tensor, shape: tuple[int, int, int]) -> None:
    check(name, buffer, dtypes=(qkv.dtype,), shape=shape, beside=qkv)
    packed = not buffer.numel() or buffer.stride()[1:] == (shape[2], 1)
    require(packed, name, "heads side by side", f"strides {buffer.stride()}")
    apart(name, buffer)


def _check_pages(qkv: Tensor, heads: Heads, size: int, pages: Pages) -> None:
    slots, cache_k, cache_v, k_scale, v_scale = pages
    shape = (qkv.shape[0],)
    check("slots", slots, dtypes=INTEGERS, shape=shape, beside=qkv, packed=True)
    check("cache_k", cache_k, dtypes=(*FLOATS, FP8), shape=(None, None, heads.kv, size), beside=qkv)
    check("cache_v", cache_v, dtypes=(cache_k.dtype,), shape=cache_k.shape, beside=qkv)
    same = cache_k.stride() == cache_v.stride()
    require(same, "cache_v", f"the strides {cache_k.stride()} of cache_k", cache_v.stride())
    require(cache_k.stride(3) == 1, "cache_k", "stride 1 in the last dimension", cache_k.stride())
    require((k_scale is None) == (v_scale is None), "v_scale", "one with k_scale", v_scale)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check(name, scale, dtypes=(torch.float32,), beside=qkv, packed=True)
            fits = scale.numel() in (1, heads.kv)
            require(fits, name, f"1 or {heads.kv} elements", tuple(scale.shape))
    if k_scale is not None and v_scale is not None:
        require(cache_k.dtype == FP8, "k_scale", "none", f"one for {short(cache_k.dtype)}")
        same = k_scale.numel() == v_scale.numel()
        require(same, "v_scale", f"{k_scale.numel()} elements as k_scale", v_scale.numel())


def cost(
    tokens: int, heads: Heads, size: int, element_bytes: int = 2, cache_bytes: int = 2
) -> Cost:
    """`cache_bytes`: of an element of the cache."""
    q, kv = heads.q * size * tokens, heads.kv * size * tokens
    moved = (2 * q + 2 * kv) * element_bytes + 2 * kv * cache_bytes
    return Cost(9 * (q + kv), moved)
