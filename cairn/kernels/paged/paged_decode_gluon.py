"""Gluon decode kernel: requirements and launch."""

from typing import Any, NamedTuple

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels.attention.attention_rings import shared_layout
from cairn.kernels.dependent import pdl
from cairn.kernels.dispatch import needs_hopper
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.paged.paged_decode_gluon_kernel import LOG2_E, ROWS, decode_kernel
from cairn.kernels.paged.paged_parts import Workspace, has_few_parts
from cairn.kernels.paged.paged_tiles import Paged, bucket
from cairn.kernels.paged.paged_views import matrix_view


class Plan(NamedTuple):
    """Launch parameters."""

    buffers: int = 3  # tiles under way or in work
    per_sm: int = 2  # programs
    box: int = 16  # tokens of a copy: what a last tile has not is not read
    registers: int = 64  # of a thread of the copying warp
    most: int = 128  # of any thread
    early: bool = True  # let the successor start before this one has ended
    block: int = 64  # keys of a tile


PLAN = Plan()
PLAN_8_BITS = Plan(box=32, block=128)  # as many bytes in a tile
# Leaves half of a multiprocessor to another stream: to its kernels, not to a successor that would only wait there.
BESIDE = Plan(per_sm=1, early=False)
# The arithmetic of float8 keeps one program busy for longer than the memory does: 128 sequences of 1,100 tokens took
# 110 us on an H200, and 87 with two that have fewer registers (81 with the plan for the whole chip).
BESIDE_8_BITS = Plan(registers=32, most=80, early=False)
SWIZZLED = 128  # bytes of a copied row, the widest swizzle


def plan_of(call: Paged, shares_chip: bool) -> Plan:
    if call.k_scale is None:
        plan = BESIDE if shares_chip else PLAN
    else:
        plan = BESIDE_8_BITS if shares_chip else PLAN_8_BITS
    return plan._replace(box=min(plan.box, call.page_size))  # a copy is of one page


def obstacle(call: Paged, workspace: Workspace | None, singles: bool = False) -> str | None:
    """Why this kernel cannot run these arguments, or None. `singles`: of sequences with one query alone."""
    not_hopper = needs_hopper(call.q_THC)
    if not_hopper is not None:
        return not_hopper
    if workspace is None:
        return "it needs a workspace that lasts"
    return unfit(call, PLAN.per_sm * multiprocessors(call.q_THC.device), singles)


def unfit(call: Paged, programs: int, singles: bool = False) -> str | None:
    """The same, whatever the device."""
    if call.window or call.softcap or call.sinks_H is not None or call.lse_TH is not None:
        return "it has no window, soft-cap, sinks or log-sum-exp"
    if call.q_THC.element_size() != 2:
        return "it takes queries of 16 bits only"
    queries = 1 if singles else call.max_query
    if call.columns not in (64, 128) or queries * call.group > ROWS.value:
        rows = f"{queries} queries of groups of {call.group} heads"
        return f"heads have {call.columns} columns, and there are {rows}"
    if not has_few_parts(call.sequences * call.kv_heads, programs):
        return "there are few sequences, each is cut into many parts, and those want a kernel of their own"
    if matrix_view(call.cache_k) is None or call.cache_v.data_ptr() % 16:
        return "TMA needs rows of 16 bytes, and pages at one distance from another"
    return None


def decode(
    call: Paged,
    workspace: Workspace,
    prefetch: bool,
    plan: Plan | None = None,
    singles: bool = False,
) -> None:
    """Fill all rows, or those of sequences with one query (`singles`) and leave the others alone.

    `prefetch`: lengths, tables and the tokens before the newest are not being written any more.
    """
    view = matrix_view(call.cache_k)
    if view is None:
        raise ValueError("call: wanted what the kernel takes, got pages that have no matrix view")
    plan = plan or plan_of(call, False)
    box = [plan.box, min(call.columns, SWIZZLED // call.cache_k.element_size())]
    caches = (
        TensorDescriptor(cache, [view.rows, view.columns], [cache.stride(1), 1], box,
                         shared_layout(box, cache.dtype))
        for cache in (call.cache_k, call.cache_v)
    )  # fmt: skip
    numbers, tensors = call.numbers(), call.tensors()
    kernel: Any = decode_kernel
    kernel[(plan.per_sm * multiprocessors(call.q_THC.device),)](
        *caches, call.q_THC, call.block_tables, call.lengths, tensors["starts"], call.out_THC, workspace.partial,
        workspace.partial_lse, workspace.arrivals, tensors["k_scale"], tensors["v_scale"], call.sequences,
        call.scale * LOG2_E.value,
        *(numbers[name] for name in ("table_stride", "q_token", "q_head", "out_token", "out_head")),
        view.page_rows, view.head_rows, view.head_columns,
        **constants(call.kv_heads, call.group, call.columns, call.page_size, bucket(call.sequences), plan, prefetch,
                    call.constants()["SCALES"], 0 if call.starts is None else 1 + singles),
        num_warps=4, maxnreg=plan.most, **pdl(call.q_THC.device),
    )  # fmt: skip


def constants(
    kv_heads: int,
    group: int,
    columns: int,
    page_size: int,
    sequences: int,
    plan: Plan,
    prefetch: bool,
    scales: int = 0,
    starts: int = 0,
) -> dict[str, Any]:
    return dict(
        KV_HEADS=kv_heads, GROUP=group, D=columns, PAGE=page_size, SEQUENCES=max(sequences, 128),
        BUFFERS=plan.buffers, EARLY=plan.early, PREFETCH=prefetch, REGISTERS=plan.registers,
        SCALES=scales, BLOCK=plan.block, STARTS=starts,
    )  # fmt: skip
