"""Attention of packed queries to a cache of pages: decode, prefill behind a cached prefix, and both in one batch.

    out[t] = sum over the keys j that t sees of softmax(softcap(scale * q[t] . k[j]))[j] * v[j]

`paged_tiles` says what lies where and who sees whom. Batches of one query per sequence take the decode kernel, which
cuts the keys evenly over the GPU; others take the prefill kernel for the sequences with several queries and the
decode kernel for those with one, decided on the GPU. Nothing waits for the GPU and the grids depend on shapes alone,
so a call can be part of a CUDA graph and be replayed with other lengths, tables and counts. On Hopper a Gluon form of
the prefill kernel can be asked for, or be chosen by the tuned table; it wants a cache that is finite everywhere.

With `sinks`, each head has one more key, of value 0 and score sinks[head]. The log-sum-exp is natural and is that of
the whole denominator, sink included; 0 and -inf (or the sink) where a row sees nothing. Rows behind the last sequence
keep what `out` had. Knows nothing about writing to the cache. No backward: training has no pages.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.arguments import FLOATS, apart, check, require
from cairn.kernels.attention.attention_problem import pairs
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.few_rows import empty_rows
from cairn.kernels.kernel import Cost
from cairn.kernels.paged import (
    paged_decode,
    paged_decode_gluon,
    paged_prefill,
    paged_prefill_gluon,
)
from cairn.kernels.paged.paged_parts import Workspace
from cairn.kernels.paged.paged_tiles import Paged

PAGE_SIZES = (16, 32, 64, 128, 256)
FP8 = torch.float8_e4m3fn
FEW = 8  # queries of a sequence that the decode kernel takes


def paged_attention_reference(call: Paged) -> tuple[Tensor, Tensor]:
    """Reference in float32 (float64 for a float64 q), sequence by sequence: [T, H, C] and its log-sum-exp [T, H]."""
    kind = torch.float64 if call.q_THC.dtype == torch.float64 else torch.float32
    out_THC = torch.zeros(call.q_THC.shape, dtype=kind, device=call.q_THC.device)
    lse_TH = torch.full(call.q_THC.shape[:2], -torch.inf, dtype=kind, device=call.q_THC.device)
    starts = range(call.sequences + 1) if call.starts is None else call.starts.tolist()
    room = call.block_tables.shape[1] * call.page_size
    for sequence, length in enumerate(call.lengths.tolist()):
        fits = 0 <= length <= room
        require(fits, "lengths", f"at most the {room} tokens of a row of block_tables", length)
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        fits = 0 <= count <= call.max_query and rows.stop <= len(call.q_THC)
        wanted = f"0 to {call.max_query} (max_query) queries of a sequence, within the rows of q"
        require(fits, "cu_seqlens_q", wanted, starts)
        pages = call.block_tables[sequence, : -(-length // call.page_size)].long()
        stored = ((call.cache_k, call.k_scale), (call.cache_v, call.v_scale))
        k_NHC, v_NHC = (
            _gathered(cache, scale, pages, kind)[:length].repeat_interleave(call.group, 1)
            for cache, scale in stored
        )
        if call.window:  # pages behind the window may be somebody else's
            oldest = max(0, length - count + 1 - call.window)
            k_NHC[:oldest] = v_NHC[:oldest] = 0
        out_THC[rows], lse_TH[rows] = _attended(call, call.q_THC[rows].to(kind), k_NHC, v_NHC)
    return out_THC, lse_TH


def _gathered(cache: Tensor, scale: Tensor | None, pages: Tensor, kind: torch.dtype) -> Tensor:
    """The tokens of these pages, side by side and as numbers."""
    if scale is None:
        return cache[pages].flatten(0, 1).to(kind)
    stored = cache.view(torch.uint8)[pages].view(
        cache.dtype
    )  # 8-bit floats cannot be indexed everywhere
    return stored.flatten(0, 1).to(kind) * scale.to(kind)[:, None]


def _attended(call: Paged, q_QHC: Tensor, k_NHC: Tensor, v_NHC: Tensor) -> tuple[Tensor, Tensor]:
    scores_HQN = torch.einsum("qhc,nhc->hqn", q_QHC, k_NHC) * call.scale
    if call.softcap:
        scores_HQN = call.softcap * torch.tanh(scores_HQN / call.softcap)
    queries, keys = q_QHC.shape[0], k_NHC.shape[0]
    position_Q1 = torch.arange(keys - queries, keys, device=q_QHC.device)[:, None]
    key_N = torch.arange(keys, device=q_QHC.device)
    hidden_QN = key_N > position_Q1
    if call.window:
        hidden_QN |= key_N <= position_Q1 - call.window
    scores_HQN = scores_HQN.masked_fill(hidden_QN, -torch.inf)
    if call.sinks_H is not None:
        sinks_HQ1 = call.sinks_H.to(scores_HQN)[:, None, None].expand(-1, queries, 1)
        scores_HQN = torch.cat([scores_HQN, sinks_HQ1], -1)
        v_NHC = torch.cat([v_NHC, v_NHC.new_zeros(1, *v_NHC.shape[1:])])
    lse_HQ = scores_HQN.logsumexp(-1)
    weights_HQN = torch.exp(scores_HQN - lse_HQ.masked_fill(lse_HQ == -torch.inf, 0.0)[..., None])
    return torch.einsum("hqn,nhc->qhc", weights_HQN, v_NHC), lse_HQ.T


def paged_attention(
    q_THC: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    max_query: int,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Workspace | None = None,
    prefetch: bool = False,
    shares_chip: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """The last tokens of each sequence attend to its pages; [T, H, C] as q.

    `max_query`: no sequence has more queries. `lse`: float32 [T, H], filled where given. Keys and values in fp8 (e4m3)
    need `k_scale` and `v_scale`, float32 with one element or one for each key head. `workspace`: from
    `paged_parts.lasting_workspace`, to save a launch; only for calls that follow one another on one stream. `prefetch`:
    nothing that is still running writes lengths, tables or the cache, but for each sequence's newest token.
    `shares_chip`: another stream has work at the same time, for which a decode kernel should leave room.
    """
    call = checked(
        q_THC, cache_k, cache_v, block_tables, lengths, cu_seqlens_q, max_query, scale, window, softcap, sinks_H,
        k_scale, v_scale, out, lse,
    )  # fmt: skip
    chosen = choose("paged_attention", impl, _offers(call, workspace)).impl
    if chosen == "reference":
        _fill_by_reference(call)
    elif q_THC.shape[0] and call.sequences:
        singles_by = workspace if call.k_scale is not None and impl != "triton" else None
        _launch(call, workspace, singles_by, prefetch, shares_chip, gluon=chosen == "gluon")
    return call.out_THC


def _offers(call: Paged, workspace: Workspace | None) -> dict[str, str | None]:
    """Candidates in order of preference; for prefill Gluon is first if the tuned table says that it is faster."""
    obstacle = needs_cuda(call.q_THC) or _obstacle(call)
    if _is_decode(call):
        blocked = obstacle or paged_decode_gluon.obstacle(call, workspace)
        return {"gluon": blocked, "triton": obstacle, "reference": None}
    offers = {"triton": obstacle, "gluon": obstacle or paged_prefill_gluon.obstacle(call)}
    if paged_prefill.plan_of(call).gluon:
        offers = {"gluon": offers["gluon"], "triton": obstacle}
    return {**offers, "reference": None}


def _is_decode(call: Paged) -> bool:
    return paged_decode.fits(call, call.max_query) and call.max_query <= FEW


def _launch(
    call: Paged, workspace: Workspace | None, singles_by: Workspace | None, prefetch: bool, shares_chip: bool,
    gluon: bool,
) -> None:  # fmt: skip
    """`singles_by`: what the Gluon kernel may use for single queries among others."""
    if _is_decode(call):
        if gluon and workspace is not None:
            plan = paged_decode_gluon.plan_of(call, shares_chip)
            paged_decode_gluon.decode(call, workspace, prefetch, plan)
        else:
            paged_decode.decode(call, call.max_query, workspace, prefetch)
        return
    # With max_query rows for every sequence there is none with a single query.
    singles = call.q_THC.shape[0] < call.sequences * call.max_query and paged_decode.fits(call, 1)
    if singles and singles_by and not paged_decode_gluon.obstacle(call, singles_by, singles):
        plan = paged_decode_gluon.plan_of(call, shares_chip)
        paged_decode_gluon.decode(call, singles_by, prefetch, plan, singles)
    elif singles:
        paged_decode.decode(call, 1, workspace, prefetch)
    if gluon:
        plan = paged_prefill.plan_of(call)
        paged_prefill_gluon.prefill(call, int(singles), plan.ping_pong)
    else:
        paged_prefill.prefill(call, int(singles))


def _obstacle(call: Paged) -> str | None:
    if call.q_THC.dtype == torch.float64:
        return "kernels have no float64"
    if call.group > 64:
        return f"{call.group} heads share a key head, a tile holds 64"
    return None


def _fill_by_reference(call: Paged) -> None:
    out_THC, lse_TH = paged_attention_reference(call)
    last = call.sequences if call.starts is None else int(call.starts[-1])
    call.out_THC[:last].copy_(out_THC[:last])
    if call.lse_TH is not None:
        call.lse_TH[:last].copy_(lse_TH[:last])


def checked(
    q_THC: Tensor, cache_k: Tensor, cache_v: Tensor, block_tables: Tensor, lengths: Tensor, starts: Tensor | None,
    max_query: int, scale: float | None = None, window: int = 0, softcap: float = 0.0, sinks_H: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None,
) -> Paged:  # fmt: skip
    """Everything that can be wrong without looking at values on the GPU is a ValueError here."""
    check("q", q_THC, dtypes=(*FLOATS, torch.float64), shape=(None, None, None))
    require(q_THC.stride(2) == 1, "q", "stride 1 in the last dimension", q_THC.stride())
    tokens, heads, columns = q_THC.shape
    require(
        columns % 16 == 0 and 16 <= columns <= 256,
        "q",
        "16 to 256 columns, in steps of 16",
        columns,
    )
    _check_cache(q_THC, cache_k, cache_v, k_scale, v_scale)
    check("lengths", lengths, dtypes=(torch.int32,), shape=(None,), beside=q_THC, packed=True)
    sequences = lengths.shape[0]
    check(
        "block_tables", block_tables, dtypes=(torch.int32,), shape=(sequences, None), beside=q_THC
    )
    side_by_side = block_tables.stride(1) == 1 or block_tables.shape[1] <= 1
    require(side_by_side, "block_tables", "stride 1 in the last dimension", block_tables.stride())
    if starts is not None:
        check(
            "cu_seqlens_q",
            starts,
            dtypes=(torch.int32,),
            shape=(sequences + 1,),
            beside=q_THC,
            packed=True,
        )
    else:
        require(
            tokens == sequences,
            "cu_seqlens_q",
            f"bounds, since {tokens} rows of q are not {sequences}",
            None,
        )
    require(max_query >= 1, "max_query", "at least 1", max_query)
    require(window >= 0, "window", "0 (none) or more", window)
    require(0 <= softcap < math.inf, "softcap", "0 (none) or more", softcap)
    scale = columns**-0.5 if scale is None else scale
    require(0 < scale < math.inf, "scale", "above 0", scale)
    if sinks_H is not None:
        check("sinks", sinks_H, dtypes=FLOATS, shape=(heads,), beside=q_THC, packed=True)
    if lse is not None:
        check("lse", lse, dtypes=(torch.float32,), shape=(tokens, heads), beside=q_THC, packed=True)
    out = empty_rows(q_THC.shape, q_THC.dtype, q_THC.device) if out is None else out
    check("out", out, dtypes=(q_THC.dtype,), shape=q_THC.shape, beside=q_THC)
    require(out.stride(2) == 1, "out", "stride 1 in the last dimension", out.stride())
    apart("out", out)
    return Paged(q_THC, cache_k, cache_v, block_tables, lengths, starts, max_query, scale, window, softcap, sinks_H,
                 k_scale, v_scale, out, lse)  # fmt: skip


def _check_cache(
    q_THC: Tensor, cache_k: Tensor, cache_v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    heads, columns = q_THC.shape[1:]
    kinds = (q_THC.dtype, FP8) if q_THC.dtype in (torch.bfloat16, torch.float16) else (q_THC.dtype,)
    check("cache_k", cache_k, dtypes=kinds, shape=(None, None, None, columns), beside=q_THC)
    check("cache_v", cache_v, dtypes=(cache_k.dtype,), shape=cache_k.shape, beside=q_THC)
    same = cache_k.stride() == cache_v.stride()
    require(same, "cache_v", f"the strides {cache_k.stride()} of cache_k", cache_v.stride())
    require(cache_k.stride(3) == 1, "cache_k", "stride 1 in the last dimension", cache_k.stride())
    page_size, kv_heads = cache_k.shape[1:3]
    require(page_size in PAGE_SIZES, "cache_k", f"pages of {PAGE_SIZES} tokens", page_size)
    divides = kv_heads > 0 and heads > 0 and heads % kv_heads == 0
    require(divides, "cache_k", f"heads that divide the {heads} of q", kv_heads)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (cache_k.dtype == FP8):
            wanted = (
                "a float32 tensor for an fp8 cache"
                if scale is None
                else "None unless the cache is fp8"
            )
            require(False, name, wanted, None if scale is None else "a tensor")
        if scale is not None:
            check(name, scale, dtypes=(torch.float32,), shape=(None,), beside=q_THC, packed=True)
            fits = scale.numel() in (1, kv_heads)
            require(fits, name, f"1 or {kv_heads} elements", scale.numel())
    if k_scale is not None and v_scale is not None:
        check("v_scale", v_scale, shape=k_scale.shape)


def cost(
    queries: Sequence[int],
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    columns: int,
    *,
    window: int = 0,
    bytes_kv: int = 2,
) -> Cost:
    """Two products for each pair that sees another; keys and values that someone sees once, q and out once."""
    visible = sum(pairs(q, n, True, window) for q, n in zip(queries, lengths, strict=True))
    read = sum(
        min(n, window + q - 1) if window else n for q, n in zip(queries, lengths, strict=True) if q
    )
    q_bytes = 2 * 2 * sum(queries) * heads * columns
    return Cost(
        flops=4.0 * visible * heads * columns,
        bytes=float(q_bytes + 2 * read * kv_heads * columns * bytes_kv),
    )
