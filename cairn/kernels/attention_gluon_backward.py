"""Attention backward in Gluon for sm_90: keys and values in one kernel, queries in another, as in plain Triton.

Where they can run, how they are launched, and in which forms they ship. Both start their sums of products at what is to
be subtracted from them: -lse / scale, and -delta. Nobody adds into anyone else's memory: the same result every time.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels import attention_gluon
from cairn.kernels.attention_backward import row_numbers, sink_gradient
from cairn.kernels.attention_gluon_kernel import LOG2_E
from cairn.kernels.attention_gluon_keys import STEP, keys_kernel
from cairn.kernels.attention_gluon_queries import queries_kernel
from cairn.kernels.attention_problem import Problem
from cairn.kernels.attention_rings import (
    AVERAGE_REGISTERS,
    HALF,
    REGISTERS,
    TILE,
    described,
    multiprocessors,
    ragged_descriptor,
    row_descriptor,
    section_of,
    shared_layout,
)
from cairn.kernels.attention_schedule import schedule
from cairn.kernels.attention_tiles import size_class
from cairn.kernels.kernel import Variant
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
    )


BACKWARD_CANDIDATES = [
    dict(sections=True),
    dict(sections=False),
    dict(keys_buffers=2),
    dict(keys_buffers=4),
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
    """dq, contiguous; dk and dv, which share one tensor; and, where there are sinks, theirs."""
    (tokens, heads, width), kv_heads = q_THC.shape, k_TKC.shape[1]
    dq_THC = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
    dkv_T2KC = torch.empty(tokens, 2, kv_heads, width, dtype=q_THC.dtype, device=q_THC.device)
    dk_TKC, dv_TKC = dkv_T2KC.unbind(1)
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
    for_keys: Any = keys_kernel
    for_keys[((tokens // TILE.value + problem.sequences) * kv_heads,)](
        q, k_half, v_half, dout, _numbers(level), _numbers(delta), dkv_T2KC, tiles, problem.cu_q,
        problem.sequences, tokens, scale_log2,
        KV_HEADS=kv_heads, SECTION=section, BUFFERS=config["keys_buffers"], **flags, **launch,
    )  # fmt: skip
    for_queries: Any = queries_kernel
    for_queries[(multiprocessors(q_THC.device),)](
        q_half, k, v, dout_half, level, delta, dq_THC, tiles, problem.cu_q, problem.sequences,
        tokens, level.stride(0), scale_log2,
        HEADS=heads, SECTION=section * (heads // kv_heads), BUFFERS=config["queries_buffers"], **flags, **launch,
    )  # fmt: skip
    return dq_THC, dk_TKC, dv_TKC, dsinks_H


def _numbers(rows: Tensor) -> TensorDescriptor:
    """A number for each of STEP rows of a head."""
    block = [1, STEP.value]
    return TensorDescriptor(
        rows, list(rows.shape), [rows.stride(0), 1], block, shared_layout(block, rows.dtype)
    )


def _variant(part: str, width: int, causal: bool, ragged: bool) -> Variant:
    config = backward_config(width)
    rows, half = ([1, 1, STEP.value, width] if ragged else [STEP.value, width]), [HALF.value, width]
    numbers = described([1, STEP.value], torch.float32)
    types = dict(tiles="*i32", cu="*i32", sequences="i32", tokens="i32", scale_log2="fp32")
    constants = dict(
        GROUP=4,
        D=width,
        CAUSAL=causal,
        RAGGED=ragged,
        REGISTERS=REGISTERS,
        BUFFERS=config[f"{part}_buffers"],
    )
    if part == "keys":
        types |= dict(q_desc=described(rows), dout_desc=described(rows), k_desc=described(half), v_desc=described(half),
                      level_desc=numbers, delta_desc=numbers, dkv="*bf16")  # fmt: skip
        constants |= dict(KV_HEADS=8, SECTION=2)
    else:
        types |= dict(q_desc=described(half), dout_desc=described(half), k_desc=described(rows), v_desc=described(rows),
                      level="*fp32", delta="*fp32", dq="*bf16", stride_level="i32")  # fmt: skip
        constants |= dict(HEADS=32, SECTION=8)
    return Variant(
        name=f"attention gluon backward {part} D{width} {'causal' if causal else 'full'}"
        f"{' ragged' if ragged else ' equal lengths'}",
        function=keys_kernel if part == "keys" else queries_kernel,
        types=types,
        constants=constants,
        options=dict(num_warps=4, maxnreg=AVERAGE_REGISTERS),
        aligned=[name for name in ("dkv", "dq", "level", "delta", "stride_level") if name in types],
        expect="wgmma",
        gluon=True,
    )


VARIANTS = [
    *(_variant(part, width, True, True) for part in ("keys", "queries") for width in WIDTHS),
    *(
        _variant(part, 128, causal, False)
        for part in ("keys", "queries")
        for causal in (True, False)
    ),
]
