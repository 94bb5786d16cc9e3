"""Attention backward in plain Triton: the same result every time, without atomics.

    delta_i = sum_c out_ic dout_ic               one pass over out and dout
    p_ij    = exp(s_ij - lse_i)                  recomputed from q, k and the log-sum-exp
    ds_ij   = p_ij (dout_i . v_j - delta_i)      times 1 - tanh^2 under a soft-cap
    dv_j    = sum_i p_ij dout_i                  one program per tile of keys, over all heads of its group
    dk_j    = scale sum_i ds_ij q_i              the same program
    dq_i    = scale sum_j ds_ij k_j              one program per tile of queries
    dsink   = -sum_i exp(sink - lse_i) delta_i   by torch: it is small

Keys and queries have a kernel each: seven products where five would do, and in exchange nobody adds into anyone
else's memory.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from cairn.kernels.arguments import short
from cairn.kernels.attention.attention_backward_kernels import (
    ROWS,
    keys_kernel,
    queries_kernel,
    rows_kernel,
)
from cairn.kernels.attention.attention_problem import Problem
from cairn.kernels.attention.attention_tiles import (
    LOG2_E,
    score_scale,
    scratch_memory,
    size_class,
    slots,
    takes_descriptors,
)
from cairn.kernels.tuned import tuned


def backward_config(width: int, dtype: torch.dtype, tma: bool, plain: bool) -> dict[str, int]:
    """`keys_*`: the kernel for dk and dv (n: its own keys); `queries_*`: the one for dq (m: its own queries).

    `plain`: neither window nor soft-cap. Without spills, which a larger tile of queries in the first kernel has.
    """
    if dtype == torch.float32:
        sizes = (32, 32, 4, 1), (32, 32, 4, 1)
    elif width == 256:
        sizes = (16, 64, 8, 2), (64, 32, 8, 2)
    else:
        sizes = (64 if plain or width == 64 else 32, 128, 8, 2), (128, 64, 8, 3)
    names = ("m", "n", "warps", "stages")
    config = {f"{part}_{name}": size for part, of_part in zip(("keys", "queries"), sizes, strict=True)
              for name, size in zip(names, of_part, strict=True)}  # fmt: skip
    return config | dict(tma=int(tma and dtype != torch.float32))


def backward_key(width: int, dtype: torch.dtype, causal: bool, max_k: int, plain: bool) -> str:
    mask = "causal" if causal else "full"
    more = "" if plain else ",window or softcap"
    return f"backward D={width},{short(dtype)},{mask},keys<={size_class(max_k)}{more}"


def backward_candidates(width: int) -> list[dict[str, int]]:
    """The usual sizes first; then deeper pipelines, and smaller tiles of which two fit on an SM."""
    usual = backward_config(width, torch.bfloat16, tma=True, plain=True)
    return [
        usual,
        usual | dict(keys_stages=3),
        usual | dict(queries_stages=2),
        usual | dict(keys_m=32, keys_n=64, keys_warps=4),
        usual | dict(queries_m=64, queries_n=64, queries_warps=4, queries_stages=2),
        usual | dict(queries_n=128, queries_stages=1),
    ]


def row_numbers(
    out_THC: Tensor,
    dout_THC: Tensor,
    lse_HT: Tensor,
    dlse_HT: Tensor | None,
    problem: Problem,
    level_scale: float,
    delta_scale: float,
) -> tuple[Tensor, Tensor]:
    """lse and delta times their scales, float32 [H, padded rows]. Bytes moved: 2 T H C elements and 12 T H."""
    tokens, heads, width = out_THC.shape
    tiles = slots(tokens, problem, problem.max_q, ROWS.value)
    level, delta = torch.empty(
        2, heads, tiles * ROWS.value, dtype=torch.float32, device=out_THC.device
    )
    if tiles:
        kernel: Any = rows_kernel
        kernel[(tiles, heads)](
            out_THC, dout_THC, lse_HT, dlse_HT, level, delta, problem.cu_q, problem.sequences, tokens, problem.max_q,
            dout_THC.stride(0), dout_THC.stride(1), lse_HT.stride(0), 0 if dlse_HT is None else dlse_HT.stride(0),
            level.stride(0), level_scale, delta_scale, HEADS=heads, D=width, BLOCK_D=triton.next_power_of_2(width),
            DENSE=problem.dense, DLSE=dlse_HT is not None, num_warps=4,
        )  # fmt: skip
    return level, delta


def sink_gradient(
    sinks_H: Tensor, level: Tensor, delta: Tensor, level_scale: float, delta_scale: float
) -> Tensor:
    weight = torch.exp(sinks_H.float()[:, None] - level / level_scale)
    return -(weight * (delta / delta_scale)).sum(1).to(sinks_H.dtype)


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
    """dq, dk, dv and, where there are sinks, theirs."""
    dq_THC, dk_TKC, dv_TKC = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THC, k_TKC, v_TKC)
    )
    scales = (LOG2_E.value, 1.0)
    level, delta = row_numbers(out_THC, dout_THC, lse_HT, dlse_HT, problem, *scales)
    dsinks_H = None if sinks_H is None else sink_gradient(sinks_H, level, delta, *scales)
    (tokens_q, heads, width), dtype = q_THC.shape, q_THC.dtype
    tokens_k, kv_heads, _ = k_TKC.shape
    tma = takes_descriptors(q_THC, k_TKC, v_TKC, dout_THC)
    if (
        not tma and dtype != torch.float32
    ):  # copies are cheaper than what pointers cost in registers
        q_THC, k_TKC, v_TKC = (
            x.clone(memory_format=torch.contiguous_format) for x in (q_THC, k_TKC, v_TKC)
        )
        tma = takes_descriptors(q_THC, k_TKC, v_TKC, dout_THC)
    plain = not (problem.window or problem.softcap)
    key = backward_key(width, dtype, problem.causal, problem.max_k, plain)
    config = tuned("attention", key, backward_config(width, dtype, tma, plain))
    tma = tma and bool(config["tma"])
    if tma:
        triton.set_allocator(scratch_memory)
    lengths = (
        problem.cu_q,
        problem.cu_q if problem.cu_k is None else problem.cu_k,
        problem.sequences,
    )
    strides = [t.stride(dim) for dim in (0, 1) for t in (q_THC, k_TKC, v_TKC, dout_THC)]
    numbers = (
        *strides,
        level.stride(0),
        problem.scale,
        score_scale(problem),
        problem.softcap,
        problem.window,
    )
    flags = dict(
        DENSE=problem.dense,
        CAUSAL=problem.causal,
        WINDOW=problem.window > 0,
        SOFTCAP=problem.softcap > 0,
    )
    wide = dtype == torch.float32
    key_slots = slots(tokens_k, problem, problem.max_k, config["keys_n"])
    if key_slots:
        kernel: Any = keys_kernel
        kernel[(key_slots, kv_heads)](
            q_THC, k_TKC, v_TKC, dout_THC, level, delta, dk_TKC, dv_TKC, *lengths, tokens_k,
            problem.max_q, problem.max_k, *numbers, **flags, KV_HEADS=kv_heads,
            ONE_WALK=_one_walk(width, problem.window > 0),
            num_warps=config["keys_warps"], num_stages=config["keys_stages"],
            **_constants(width, heads // kv_heads, wide, config, "keys", tma),
        )  # fmt: skip
    query_slots = slots(tokens_q, problem, problem.max_q, config["queries_m"])
    if query_slots:
        kernel: Any = queries_kernel
        kernel[(query_slots, heads)](
            q_THC, k_TKC, v_TKC, dout_THC, level, delta, dq_THC, *lengths, tokens_q, problem.max_q,
            problem.max_k, *numbers, **flags, HEADS=heads,
            num_warps=config["queries_warps"], num_stages=config["queries_stages"],
            **_constants(width, heads // kv_heads, wide, config, "queries", tma),
        )  # fmt: skip
    return dq_THC, dk_TKC, dv_TKC, dsinks_H


def _constants(
    width: int, group: int, wide: bool, config: dict[str, Any], part: str, tma: bool
) -> dict[str, Any]:
    return dict(
        GROUP=group, D=width, BLOCK_D=triton.next_power_of_2(width),
        BLOCK_M=config[f"{part}_m"], BLOCK_N=config[f"{part}_n"],
        TMA=tma, PRECISION="ieee" if wide else "tf32",
    )  # fmt: skip


def _one_walk(width: int, window: bool) -> bool:
    """Return whether one loop masks every block, because there are not enough registers for two loops."""
    return window or width > 128
