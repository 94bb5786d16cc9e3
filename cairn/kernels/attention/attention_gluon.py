"""Gluon forward kernel of attention: requirements, launch, and compiled variants."""

from typing import Any

from torch import Tensor

from cairn.kernels.attention.attention_gluon_kernel import LOG2_E, attention_kernel
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
)
from cairn.kernels.attention.attention_schedule import schedule
from cairn.kernels.attention.attention_tiles import size_class, takes_descriptors
from cairn.kernels.dispatch import needs_hopper
from cairn.kernels.tuned import tuned


def obstacle(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, problem: Problem) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    not_hopper = needs_hopper(q_THC, k_TKC, v_TKC)
    if not_hopper is not None:
        return not_hopper
    width = q_THC.shape[2]
    if width not in CONFIGS:
        return f"heads have {width} columns, not {' or '.join(map(str, CONFIGS))}"
    if problem.window or problem.softcap:
        return "it has no window and no soft-cap"
    if not problem.square:
        return "there are more keys than queries"
    side_by_side = all(x.stride(1) == width for x in (q_THC, k_TKC, v_TKC))
    if not side_by_side or not takes_descriptors(q_THC, k_TKC, v_TKC):
        return "TMA needs 16-bit numbers, heads side by side and rows of 16 bytes"
    return None


CONFIGS = {  # by width: keys of a block, buffers of K and V, of Q
    64: dict(block_n=128, buffers=4, q_buffers=2),
    128: dict(block_n=128, buffers=2, q_buffers=2),
}


def gluon_config(width: int, keys: int) -> dict[str, Any]:
    """Ping-pong pays where tiles are short; sections of heads have not paid in the forward pass so far."""
    return CONFIGS[width] | dict(ping_pong=keys < 16384, sections=False)


def gluon_key(width: int, causal: bool, keys: int) -> str:
    return f"gluon D={width},{'causal' if causal else 'full'},keys<={size_class(keys)}"


GLUON_CANDIDATES = [
    dict(ping_pong=ping_pong, sections=sections)
    for ping_pong in (True, False)
    for sections in (True, False)
]


def attention_forward(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    sinks_H: Tensor | None,
    problem: Problem,
    out_THC: Tensor,
    lse_HT: Tensor,
) -> None:
    """Fill `out_THC` and `lse_HT` (natural logarithm)."""
    (tokens, heads, width), kv_heads = q_THC.shape, k_TKC.shape[1]
    if tokens == 0:
        return
    key = gluon_key(width, problem.causal, problem.max_k)
    config = tuned("attention", key, gluon_config(width, problem.max_k))
    section = section_of(kv_heads, width, tokens) if config["sections"] else kv_heads
    ragged = not (problem.dense and problem.max_q % config["block_n"] == 0)
    describe = ragged_descriptor if ragged else row_descriptor
    tiles = out_THC if problem.dense else schedule(problem, tokens, TILE.value)
    kernel: Any = attention_kernel
    kernel[(multiprocessors(q_THC.device),)](
        row_descriptor(q_THC, HALF.value), describe(k_TKC, config["block_n"]),
        describe(v_TKC, config["block_n"]), out_THC, lse_HT, sinks_H, tiles, problem.cu_q,
        problem.sequences, tokens, problem.max_q, problem.scale * LOG2_E.value,
        **_constants(width, heads, kv_heads, config, section),
        DENSE=problem.dense, RAGGED=ragged, CAUSAL=problem.causal, SINKS=sinks_H is not None,
        num_warps=4, maxnreg=AVERAGE_REGISTERS,
    )  # fmt: skip


def _constants(
    width: int, heads: int, kv_heads: int, config: dict[str, Any], section: int
) -> dict[str, Any]:
    return dict(
        HEADS=heads, GROUP=heads // kv_heads, SECTION=section * (heads // kv_heads), D=width, BLOCK_N=config["block_n"],
        BUFFERS=config["buffers"], Q_BUFFERS=config["q_buffers"], PING_PONG=config["ping_pong"],
        REGISTERS=REGISTERS,
    )  # fmt: skip
