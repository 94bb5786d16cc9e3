"""Gluon kernel of latent decode: requirements and launch."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels.attention.attention_rings import AVERAGE_REGISTERS, shared_layout
from cairn.kernels.dispatch import needs_hopper
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.paged.latent_gluon_kernel import COLUMNS, FEW, latent_decode_kernel
from cairn.kernels.paged.paged_tiles import LOG2_E

if TYPE_CHECKING:
    from cairn.kernels.paged.latent_attention import Latents

MANY = 64  # heads of a tile that wgmma takes
MOST_PARTS = 32
BOX = 16  # rows of a copy: what a last tile has not is not read
SWIZZLED = 64  # columns of a copy, the widest swizzle


class GluonPlan(NamedTuple):
    """Launch parameters."""

    tile: int  # heads
    block: int = 64  # rows of the cache in a step
    buffers: int = 3  # tiles under way or in work
    warps: int = 8
    per_sm: int = 1  # programs
    most: int = AVERAGE_REGISTERS  # registers of any thread
    copying: int = 24  # registers of a thread of the copying warp


FEW_HEADS = GluonPlan(FEW.value, buffers=2)  # a third one was 7% slower on an H200
MANY_HEADS = GluonPlan(MANY, buffers=2)  # beside the queries there is no room for more


def obstacle(
    q_THE: Tensor, cache: Tensor, rank: int, max_query: int, starts: Tensor | None
) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    return needs_hopper(q_THE) or unfit(q_THE, cache, rank, max_query, starts)


def unfit(
    q_THE: Tensor, cache: Tensor, rank: int, max_query: int, starts: Tensor | None
) -> str | None:
    """The same, whatever the device."""
    heads, width = q_THE.shape[1:]
    if cache.dtype != q_THE.dtype:
        return "its rows are not in float8"
    if max_query > 1 or starts is not None or q_THE.element_size() != 2:
        return "it takes one query of each sequence, of 16 bits"
    if heads > FEW.value and heads % MANY:
        return f"{heads} heads are neither at most {FEW.value} nor a multiple of {MANY}"
    if rank % COLUMNS.value or rank & (rank - 1) or rank > 512 or width - rank != SWIZZLED:
        return f"rows have {rank} + {width - rank} columns"
    if cache.stride(0) % cache.stride(1) or cache.stride(1) % 8 or cache.data_ptr() % 16:
        return "TMA needs rows of 16 bytes, and pages at one distance from another"
    return None


def plan_of(heads: int) -> GluonPlan:
    return FEW_HEADS if heads <= FEW.value else MANY_HEADS


def parts_of(plan: GluonPlan, heads: int, sequences: int, on: Tensor) -> int:
    """Few tiles are cut into parts, so that every multiprocessor has its programs."""
    chip = multiprocessors(on.device) if on.is_cuda else 4
    wanted = plan.per_sm * chip // max(sequences * -(-heads // plan.tile), 1)
    return min(MOST_PARTS, 1 << max(wanted.bit_length() - 1, 0))


def decode(call: "Latents", out: Tensor, lse: Tensor, plan: GluonPlan) -> None:
    """Fills out [parts, T, H, rank] and lse [parts, T, H]."""
    cache, parts, heads = call.cache, len(out), call.q_THE.shape[1]
    page_rows = cache.stride(0) // cache.stride(1)
    box = [min(BOX, call.page_size), SWIZZLED]
    rows, width = cache.shape[0] * page_rows, cache.shape[3]
    view = TensorDescriptor(
        cache, [rows, width], [cache.stride(1), 1], box, shared_layout(box, cache.dtype)
    )
    kernel: Any = latent_decode_kernel
    kernel[(parts * call.sequences * -(-heads // plan.tile),)](
        view, call.q_THE, call.block_tables, call.lengths, out, lse, call.sequences, call.scale * LOG2_E.value,
        call.block_tables.stride(0), call.q_THE.stride(0), call.q_THE.stride(1), page_rows,
        **constants(plan, heads, call.rank, call.page_size, parts),
        num_warps=plan.warps, maxnreg=plan.most,
    )  # fmt: skip


def constants(plan: GluonPlan, heads: int, rank: int, page_size: int, parts: int) -> dict[str, Any]:
    return dict(
        HEADS=heads, TILE=plan.tile, RANK=rank, ROTATED=SWIZZLED, PAGE=page_size, BLOCK=plan.block, PARTS=parts,
        BUFFERS=plan.buffers, WARPS=plan.warps, REGISTERS=plan.copying,
    )  # fmt: skip


def output(call: "Latents", plan: GluonPlan) -> tuple[Tensor, Tensor]:
    """Room for the parts; every program writes its rows."""
    tokens, heads, _ = call.q_THE.shape
    parts = parts_of(plan, heads, call.sequences, call.q_THE)
    kind = torch.float32 if parts > 1 else call.q_THE.dtype
    out = torch.empty(parts, tokens, heads, call.rank, dtype=kind, device=call.q_THE.device)
    lse = torch.empty(out.shape[:3], device=out.device) if parts > 1 else out
    return out, lse
