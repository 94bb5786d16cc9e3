"""Attention backward in Gluon for sm_90: keys and values in one kernel, queries in another, as in plain Triton.

Where they can run, how they are launched, and in which forms they ship. Both start their sums of products at what is to
be subtracted from them: -lse / scale, and -delta. Nobody adds into anyone else's memory: the same result every time.

Where lengths are equal and there is room, the first kernel leaves its slopes behind and the second multiplies them:
five products in place of seven, for 2 bytes written and read per pair (attention_gluon_slopes).

dq, dk and dv lie side by side in one tensor [T, H + 2 K, C], as the projection that they go back to: see rope_backward.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels.attention import attention_gluon
from cairn.kernels.attention.attention_backward import row_numbers, sink_gradient
from cairn.kernels.attention.attention_gluon_kernel import LOG2_E
from cairn.kernels.attention.attention_gluon_keys import STEP, keys_kernel
from cairn.kernels.attention.attention_gluon_queries import queries_kernel
from cairn.kernels.attention.attention_gluon_slopes import slopes_kernel
from cairn.kernels.attention.attention_problem import Problem
from cairn.kernels.attention.attention_rings import (
    AVERAGE_REGISTERS,
    HALF,
    REGISTERS,
    TILE,
    multiprocessors,
    ragged_descriptor,
    row_descriptor,
    section_of,
    shared_layout,
)
from cairn.kernels.attention.attention_room import slopes_bytes
from cairn.kernels.attention.attention_schedule import schedule
from cairn.kernels.attention.attention_tiles import size_class
from cairn.kernels.tuned import tuned

WIDTHS = (64, 128)


def obstacle(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, problem: Problem) -> str | None:
    """Why these kernels cannot run these arguments, or None."""
    if q_THC.shape[2] not in WIDTHS:
        return f"heads have {q_THC.shape[2]} columns, not {' or '.join(map(str, WIDTHS))}"
    return attention_gluon.obstacle(q_THC, k_TKC, v_TKC, problem)


def backward_key(width: int, causal: bool, keys: int) -> str:
    return f"gluon backward D={width},{'causal' if causal else 'full'},keys<={size_class(keys)}"


def backward_config(width: int) -> dict[str, Any]:
    """Buffers of the keys' kernel and of the queries'; sections as in the forward pass."""
    return dict(
        keys_buffers=3 if width == 128 else 4,
        queries_buffers=2 if width == 128 else 4,
        sections=True,
        slopes=width == 128,  # narrower heads save less work for the same bytes
        slopes_buffers=4,
    )


BACKWARD_CANDIDATES = [
    dict(sections=True),
    dict(sections=False),
    dict(keys_buffers=2),
    dict(keys_buffers=4),
    dict(slopes=False),
    dict(slopes_buffers=3),
]


def attention_backward(
    dout_THC: Tensor,
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    sinks_H: Tensor | None,
    out_THC: Tensor,
    lse_HT: Tensor,
    dlse_HT: Tensor | None,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv, which share one tensor; and, where there are sinks, theirs."""
    (tokens, heads, width), kv_heads = q_THC.shape, k_TKC.shape[1]
    row = heads + 2 * kv_heads
    dqkv_TRC = torch.empty(tokens, row, width, dtype=q_THC.dtype, device=q_THC.device)
    dq_THC, dk_TKC, dv_TKC = dqkv_TRC.split([heads, kv_heads, kv_heads], dim=1)
    ragged = not (problem.dense and problem.max_q % TILE.value == 0)
    if problem.cu_q is None:  # these kernels look all tiles up
        bounds = torch.arange(0, tokens + 1, problem.max_q, dtype=torch.int32, device=q_THC.device)
        problem = problem._replace(cu_q=bounds)
    # Sums of products start at what is to be subtracted from them, in units of a product.
    scales = (-1.0 / problem.scale, -1.0)
    level, delta = row_numbers(out_THC, dout_THC, lse_HT, dlse_HT, problem, *scales)
    dsinks_H = None if sinks_H is None else sink_gradient(sinks_H, level, delta, *scales)
    if tokens == 0:
        return dq_THC, dk_TKC, dv_TKC, dsinks_H
    config = tuned(
        "attention", backward_key(width, problem.causal, problem.max_k), backward_config(width)
    )
    describe = ragged_descriptor if ragged else row_descriptor
    tiles = schedule(problem, tokens, TILE.value)
    section = section_of(kv_heads, width, tokens) if config["sections"] else kv_heads
    flags = dict(
        D=width, GROUP=heads // kv_heads, CAUSAL=problem.causal, RAGGED=ragged, REGISTERS=REGISTERS
    )
    launch = dict(num_warps=4, maxnreg=AVERAGE_REGISTERS)
    q, dout, k, v = (describe(x, STEP.value) for x in (q_THC, dout_THC, k_TKC, v_TKC))
    q_half, dout_half, k_half, v_half = (
        row_descriptor(x, HALF.value) for x in (q_THC, dout_THC, k_TKC, v_TKC)
    )
    scale_log2 = problem.scale * LOG2_E.value
    slopes = _room_for_slopes(q_THC, problem) if config["slopes"] and not ragged else None
    for_keys: Any = keys_kernel
    for_keys[((tokens // TILE.value + problem.sequences) * kv_heads,)](
        q, k_half, v_half, dout, _numbers(level), _numbers(delta), _numbers(level) if slopes is None else slopes,
        dqkv_TRC, tiles, problem.cu_q, problem.sequences, tokens, scale_log2,
        KV_HEADS=kv_heads, FIRST=heads, ROW=row, SECTION=section, SLOPES=slopes is not None,
        BUFFERS=config["keys_buffers"], **flags, **launch,
    )  # fmt: skip
    if slopes is not None:
        from_slopes: Any = slopes_kernel
        from_slopes[(multiprocessors(q_THC.device),)](
            slopes, k, row_descriptor(dq_THC, HALF.value), dqkv_TRC, problem.sequences, problem.max_q, problem.scale,
            HEADS=heads, GROUP=heads // kv_heads, SECTION=section * (heads // kv_heads), ROW=row, D=width,
            BUFFERS=config["slopes_buffers"], PAIR=pair_of(heads // kv_heads), CAUSAL=problem.causal,
            REGISTERS=REGISTERS, **launch,
        )  # fmt: skip
        return dq_THC, dk_TKC, dv_TKC, dsinks_H
    for_queries: Any = queries_kernel
    for_queries[(multiprocessors(q_THC.device),)](
        q_half, k, v, dout_half, level, delta, dqkv_TRC, tiles, problem.cu_q, problem.sequences,
        tokens, level.stride(0), scale_log2, HEADS=heads, SECTION=section * (heads // kv_heads), ROW=row,
        BUFFERS=config["queries_buffers"], **flags, **launch,
    )  # fmt: skip
    return dq_THC, dk_TKC, dv_TKC, dsinks_H


def pair_of(group: int) -> int:
    """Number of heads of a group that the kernel processes at a time."""
    return 2 if group % 2 == 0 else 1


def _room_for_slopes(q_THC: Tensor, problem: Problem) -> TensorDescriptor | None:
    """Blocks of STEP x STEP for each pair of blocks that see each other; None if they are too many."""
    tokens, heads, _ = q_THC.shape
    room = slopes_bytes(tokens, problem.max_q, heads, problem.causal)
    if not room:
        return None
    block = [STEP.value, STEP.value]
    memory = torch.empty(
        room // 2 // STEP.value, STEP.value, dtype=q_THC.dtype, device=q_THC.device
    )
    layout = shared_layout(block, memory.dtype)
    return TensorDescriptor(memory, list(memory.shape), [STEP.value, 1], block, layout)


def _numbers(rows: Tensor) -> TensorDescriptor:
    """A number for each of STEP rows of a head."""
    block = [1, STEP.value]
    return TensorDescriptor(
        rows, list(rows.shape), [rows.stride(0), 1], block, shared_layout(block, rows.dtype)
    )
