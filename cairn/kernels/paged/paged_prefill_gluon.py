"""Gluon kernel of paged prefill: requirements and launch."""

from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels.attention.attention_rings import shared_layout
from cairn.kernels.dispatch import needs_hopper
from cairn.kernels.paged.paged_gluon_kernel import BLOCK, BOX, HALF, LOG2_E, prefill_kernel
from cairn.kernels.paged.paged_tiles import Paged
from cairn.kernels.paged.paged_views import matrix_view

REGISTERS = 240  # of a computing thread; the copying warp has 24
AVERAGE_REGISTERS = 168


def obstacle(call: Paged) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    not_hopper = needs_hopper(call.q_THC)
    if not_hopper is not None:
        return not_hopper
    return unfit(call)


def unfit(call: Paged) -> str | None:
    """The same, whatever the device."""
    if call.window or call.softcap:
        return "it has no window and no soft-cap"
    if call.q_THC.element_size() != 2 or call.cache_k.dtype != call.q_THC.dtype:
        return "it takes 16-bit numbers only"
    if call.columns not in (64, 128):
        return f"heads have {call.columns} columns, not 64 or 128"
    if HALF.value % call.group:
        return f"groups of {call.group} heads do not divide {HALF.value}"
    if call.starts is None:
        return "every sequence has one query"
    steps = (call.q_THC.stride(0) | call.q_THC.stride(1)) % 8 or call.q_THC.data_ptr() % 16
    if steps or matrix_view(call.cache_k) is None or call.cache_v.data_ptr() % 16:
        return "TMA needs rows of 16 bytes, and pages at one distance from another"
    return None


def prefill(call: Paged, skip: int, ping_pong: bool) -> None:
    """Fill the rows of every sequence that has more than `skip` queries; other rows are left alone."""
    view = matrix_view(call.cache_k)
    if view is None or call.starts is None:
        raise ValueError(f"call: wanted what the kernel takes, got one where {unfit(call)}")
    rows, group, columns = min(call.page_size, BLOCK.value), call.group, call.columns
    q_block = [HALF.value // group, group, columns]
    caches = (
        TensorDescriptor(cache, [view.rows, view.columns], [cache.stride(1), 1], [rows, BOX.value],
                         shared_layout([rows, BOX.value], cache.dtype))
        for cache in (call.cache_k, call.cache_v)
    )  # fmt: skip
    q_layout = shared_layout(q_block, call.q_THC.dtype)
    q_view = TensorDescriptor(
        call.q_THC, list(call.q_THC.shape), list(call.q_THC.stride()), q_block, q_layout
    )
    tiles = call.q_THC.shape[0] // (2 * HALF.value // group) + call.sequences
    tensors, numbers = call.tensors(), call.numbers()
    kernel: Any = prefill_kernel
    kernel[(tiles * call.kv_heads,)](
        q_view, *caches, *(tensors[name] for name in ("tables", "lengths", "starts", "out", "lse", "sinks")),
        call.sequences, skip, call.scale * LOG2_E.value, numbers["table_stride"], numbers["out_token"],
        numbers["out_head"], view.page_rows, view.head_rows, view.head_columns,
        **constants(call.kv_heads, group, columns, call.page_size, ping_pong),
        SINKS=call.sinks_H is not None, LSE=call.lse_TH is not None, num_warps=4, maxnreg=AVERAGE_REGISTERS,
    )  # fmt: skip


def constants(
    kv_heads: int, group: int, columns: int, page_size: int, ping_pong: bool
) -> dict[str, Any]:
    return dict(KV_HEADS=kv_heads, GROUP=group, D=columns, PAGE=page_size, BUFFERS=256 // columns,
                PING_PONG=ping_pong, REGISTERS=REGISTERS)  # fmt: skip
