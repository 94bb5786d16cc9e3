"""Attention behind a prefix that all sequences share: its keys are read once, not once for each sequence.

    prefix   all queries, side by side, attend to the pages that every table begins with   (a product: compute)
    rest     each query attends to what its sequence has for itself                        (decode: memory)
    both     are joined by their log-sum-exps                                              (`merge_state`)

A decode step reads sequences * length keys; of a shared prefix that is the same bytes over and over. Few queries are
few tiles, so the prefix is cut into parts that different multiprocessors walk over, and their results are joined two
by two. How long the prefix is lies on the GPU, in whole pages, so that a CUDA graph replays the call with another one;
0 is allowed and costs a few small kernels. Every query has to stand behind the prefix. No window: who sees only the
last keys does not see the same prefix as others. Knows nothing about who found out what is shared.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import check, require
from cairn.kernels.attention.merge_state import State, merge_state
from cairn.kernels.dispatch import needs_cuda
from cairn.kernels.paged import paged_prefill
from cairn.kernels.paged.paged_attention import (
    PAGE_SIZES,
    checked,
    paged_attention,
    paged_attention_reference,
)
from cairn.kernels.paged.paged_parts import Workspace
from cairn.kernels.paged.paged_tiles import Paged, power_of_2

SMALL_TILES = paged_prefill.Plan(rows=64, block=64, warps=4, stages=3)
PROGRAMS = 264  # that an H200 runs at a time: two on a multiprocessor
MOST_PARTS = 8  # of a prefix: each more is a longer way to join them


class Cascade(NamedTuple):
    """Block tables shared by the layers of a step: those of the prefix, and those after it."""

    prefix_S: Tensor  # int32: tokens of each part of the prefix; in all, whole pages that all sequences begin with
    prefix_SP: Tensor  # a table for each part
    bounds_S1: Tensor  # each part is a "sequence" that has all queries
    tables_BP: Tensor  # behind the prefix
    lengths_B: Tensor  # there


def parts_of(queries: int, heads: int, kv_heads: int) -> int:
    """Number of parts of a prefix, a power of two, so that the queries fill the GPU."""
    tiles = -(-queries * (heads // kv_heads) // SMALL_TILES.rows)
    fitting = max(1, min(MOST_PARTS, PROGRAMS // (tiles * kv_heads)))
    return 1 << (fitting.bit_length() - 1)


def split_tables(
    tables_BP: Tensor,
    lengths_B: Tensor,
    shared_1: Tensor,
    page_size: int,
    parts: int = 1,
    queries: int | None = None,
) -> Cascade:
    """Split the tables, once for a step and without host synchronisation. `shared_1`: int32 [1], shared prefix tokens.

    `queries`: of all sequences together; None: one for each.
    """
    check("tables", tables_BP, dtypes=(torch.int32,), shape=(None, None))
    check("lengths", lengths_B, dtypes=(torch.int32,), shape=tables_BP.shape[:1], beside=tables_BP)
    check("shared", shared_1, dtypes=(torch.int32,), shape=(1,), beside=tables_BP)
    require(page_size in PAGE_SIZES, "page_size", f"one of {PAGE_SIZES}", page_size)
    # Their results are joined by halves.
    require(parts >= 1 and parts & (parts - 1) == 0, "parts", "a power of two", parts)
    columns = tables_BP.shape[1]
    column_P = torch.arange(columns, device=tables_BP.device)
    behind_P = (column_P + shared_1 // page_size).clamp(max=columns - 1)
    prefix_S, prefix_SP = shared_1, tables_BP[:1]
    if parts > 1:
        each_1 = (shared_1 // page_size + parts - 1) // parts  # pages
        first_S = torch.arange(parts, device=tables_BP.device) * each_1
        index_SP = first_S[:, None] + column_P[: -(-columns // parts)]
        left_S = (shared_1 - first_S * page_size).clamp(min=0)
        prefix_S = left_S.minimum(each_1 * page_size).int()
        prefix_SP = tables_BP[0][index_SP.clamp(max=columns - 1)]
    queries = len(lengths_B) if queries is None else queries
    bounds_S1 = torch.arange(parts + 1, device=tables_BP.device) * queries
    return Cascade(
        prefix_S,
        prefix_SP,
        bounds_S1.int(),
        tables_BP.gather(1, behind_P.expand(len(tables_BP), columns)),
        (lengths_B - shared_1).clamp(min=0),
    )


def cascade_attention(
    q_THC: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cascade: Cascade,
    cu_seqlens_q: Tensor | None = None,
    *,
    max_query: int = 1,
    scale: float | None = None,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Attention with the result of `paged_attention` over the whole tables."""
    check("q", q_THC, shape=(None, None, None))
    require(len(q_THC) > 0, "q", "at least one query", 0)
    check("prefix", cascade.prefix_S, dtypes=(torch.int32,), shape=(None,), beside=q_THC)
    parts, queries = len(cascade.prefix_S), len(q_THC)
    each_q = q_THC if parts == 1 else q_THC.repeat(parts, 1, 1)
    call = checked(
        each_q, cache_k, cache_v, cascade.prefix_SP, cascade.prefix_S, cascade.bounds_S1, queries, scale, 0, softcap,
        k_scale=k_scale, v_scale=v_scale, lse=_levels(each_q),
    )  # fmt: skip
    # What is joined several times is not rounded each time; one kernel for any number of parts.
    call = call._replace(out_THC=torch.empty(each_q.shape, device=each_q.device))
    prefix = _over_prefix(call, queries)
    rest = State(torch.empty_like(q_THC), _levels(q_THC))
    paged_attention(
        q_THC, cache_k, cache_v, cascade.tables_BP, cascade.lengths_B, cu_seqlens_q, max_query=max_query, scale=scale,
        softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=rest.out_THC, lse=rest.lse_TH, workspace=workspace,
    )  # fmt: skip
    return merge_state(rest, prefix, out=rest).out_THC


def _over_prefix(call: Paged, queries: int) -> State:
    """Attention of all queries over each part of the prefix, combined."""
    if needs_cuda(call.q_THC) is None:
        small = SMALL_TILES._replace(rows=max(SMALL_TILES.rows, power_of_2(call.group)))
        plan = small if call.columns <= 128 and call.q_THC.dtype != torch.float32 else None
        paged_prefill.prefill(call, plan=plan, sees_all=True)
    else:
        _prefix_by_reference(call)
    out_THC, lse_TH = call.out_THC, _filled(call.lse_TH)
    while (half := len(out_THC) // 2) >= queries:
        low, high = (State(out_THC[at], lse_TH[at]) for at in (slice(half), slice(half, None)))
        out_THC, lse_TH = merge_state(low, high, out=low)
    return State(out_THC, lse_TH)


def _levels(q_THC: Tensor) -> Tensor:
    return torch.empty(q_THC.shape[:2], dtype=torch.float32, device=q_THC.device)


def _filled(lse_TH: Tensor | None) -> Tensor:
    if lse_TH is None:
        raise ValueError("lse: wanted a tensor, got None")
    return lse_TH


def _prefix_by_reference(call: Paged) -> None:
    """Each query as a sequence of its own that ends where its part of the prefix does."""
    queries = len(call.q_THC) // call.sequences
    alone = call._replace(
        starts=None,
        block_tables=call.block_tables.repeat_interleave(queries, 0),
        lengths=call.lengths.repeat_interleave(queries),
    )
    out_THC, lse_TH = paged_attention_reference(alone)
    call.out_THC.copy_(out_THC)
    if call.lse_TH is not None:
        call.lse_TH.copy_(lse_TH)
