"""Decode behind a prefix that all sequences share: its keys are read once, not once for each sequence.

    prefix   all queries, side by side, attend to the pages that every table begins with   (a product: compute)
    rest     each query attends to what its sequence has for itself                        (decode: memory)
    both     are joined by their log-sum-exps                                              (`merge_state`)

A decode step reads sequences * length keys; of a shared prefix that is the same bytes over and over. How long the
prefix is lies on the GPU, in whole pages, so that a CUDA graph replays the call with another one; 0 is allowed and
costs two small kernels. Every query has to stand behind the prefix. No window: who sees only the last keys does not
see the same prefix as others. Knows nothing about who found out what is shared.
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


class Cascade(NamedTuple):
    """What a step's layers have in common: the pages of the prefix, and those behind it."""

    shared_1: Tensor  # int32 [1]: tokens that all sequences begin with, whole pages of them
    first_1P: Tensor  # a table that begins with the shared pages
    bounds_2: Tensor  # all queries are of one "sequence"
    tables_BP: Tensor  # behind the prefix
    lengths_B: Tensor  # there


def split_tables(tables_BP: Tensor, lengths_B: Tensor, shared_1: Tensor, page_size: int) -> Cascade:
    """Once for a step, in tensors alone."""
    check("tables", tables_BP, dtypes=(torch.int32,), shape=(None, None))
    check("lengths", lengths_B, dtypes=(torch.int32,), shape=tables_BP.shape[:1], beside=tables_BP)
    check("shared", shared_1, dtypes=(torch.int32,), shape=(1,), beside=tables_BP)
    require(page_size in PAGE_SIZES, "page_size", f"one of {PAGE_SIZES}", page_size)
    columns = tables_BP.shape[1]
    behind_P = torch.arange(columns, device=tables_BP.device) + shared_1 // page_size
    index_BP = behind_P.clamp(max=columns - 1).expand(len(tables_BP), columns)
    bounds = torch.arange(2, dtype=torch.int32, device=tables_BP.device) * len(lengths_B)
    return Cascade(
        shared_1, tables_BP[:1], bounds.to(torch.int32), tables_BP.gather(1, index_BP),
        (lengths_B - shared_1).clamp(min=0),
    )  # fmt: skip


def cascade_attention(
    q_BHC: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cascade: Cascade,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """One query for each sequence, as `paged_attention` with max_query 1 over the whole tables."""
    check("q", q_BHC, shape=(*cascade.lengths_B.shape, None, None))
    prefix = State(torch.empty_like(q_BHC), _levels(q_BHC))
    rest = State(torch.empty_like(q_BHC), _levels(q_BHC))
    call = checked(
        q_BHC, cache_k, cache_v, cascade.first_1P, cascade.shared_1, cascade.bounds_2, len(q_BHC), scale, 0,
        softcap, k_scale=k_scale, v_scale=v_scale, out=prefix.out_THC, lse=prefix.lse_TH,
    )  # fmt: skip
    if needs_cuda(q_BHC) is None:
        small = SMALL_TILES._replace(rows=max(SMALL_TILES.rows, power_of_2(call.group)))
        plan = small if call.columns <= 128 and q_BHC.dtype != torch.float32 else None
        paged_prefill.prefill(call, plan=plan, sees_all=True)
    else:
        _prefix_by_reference(call)
    paged_attention(
        q_BHC, cache_k, cache_v, cascade.tables_BP, cascade.lengths_B, max_query=1, scale=scale,
        softcap=softcap, k_scale=k_scale, v_scale=v_scale, out=rest.out_THC, lse=rest.lse_TH, workspace=workspace,
    )  # fmt: skip
    return merge_state(rest, prefix, out=rest).out_THC


def _levels(q_BHC: Tensor) -> Tensor:
    return torch.empty(q_BHC.shape[:2], dtype=torch.float32, device=q_BHC.device)


def _prefix_by_reference(call: Paged) -> None:
    """Each query as a sequence of its own that ends where the prefix does."""
    count = len(call.q_THC)
    alone = call._replace(
        starts=None, block_tables=call.block_tables.expand(count, -1), lengths=call.lengths.expand(count)
    )  # fmt: skip
    out_THC, lse_TH = paged_attention_reference(alone)
    call.out_THC.copy_(out_THC)
    if call.lse_TH is not None:
        call.lse_TH.copy_(lse_TH)
