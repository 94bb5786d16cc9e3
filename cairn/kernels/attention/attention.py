"""Attention over packed sequences: softmax(q k^T scale) v, forward and backward.

    q [T, H, C]   k, v [T, K, C]   cu_seqlens int32 [n + 1] on the GPU     ->     out [T, H, C], lse float32 [H, T]

Sequences lie side by side, each a world of its own; H / K query heads share a key head. Causal or full, with a
window, a soft-cap (s -> cap tanh(s / cap), before masking) and sinks (one more logit per head in the denominator,
with no value). Queries may be fewer than keys: the ends are aligned, as when a prompt continues a cached prefix. A
query that sees nothing gets 0 and a log-sum-exp of -inf; so do rows behind the last sequence. Never a NaN.

Implementations: Gluon (sm_90, 64 or 128 columns, as many keys as queries, no window or soft-cap), plain Triton
(everything), torch (cuDNN for equal lengths, its flash attention for others), and the reference. The backward pass
chooses for itself, under the name "attention_backward"; any of its implementations takes what any of the forward ones
left. Ours give the same result every time. Knows nothing about pages: see paged_attention. Bytes moved forward:
(2 T H + 2 T K) C elements and 4 T H.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.arguments import check, output, require
from cairn.kernels.attention import attention_backward as triton_backward
from cairn.kernels.attention import attention_forward as triton_forward
from cairn.kernels.attention import attention_gluon as gluon_forward
from cairn.kernels.attention import attention_gluon_backward as gluon_backward
from cairn.kernels.attention import attention_torch as from_torch
from cairn.kernels.attention.attention_problem import Problem, checked_problem, cost
from cairn.kernels.attention.attention_tiles import size_class
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.tuned import tuned

SHORT = 4096  # keys of a sequence up to which our backward pass is ahead of cuDNN's, where heads share them
__all__ = ["attention", "attention_gradients", "attention_reference", "cost"]


def attention_reference(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    cu_seqlens: Tensor | None,
    *,
    max_length: int,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_length_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The specification: one sequence after another, all scores in memory. Waits for the GPU to read the lengths."""
    wide = torch.promote_types(q_THC.dtype, torch.float32)
    scale = q_THC.shape[-1] ** -0.5 if scale is None else scale
    bounds_q = _bounds("cu_seqlens", cu_seqlens, q_THC.shape[0], max_length)
    bounds_k, longest = bounds_q, max_length if max_length_k is None else max_length_k
    if cu_seqlens_k is not None:
        bounds_k = _bounds("cu_seqlens_k", cu_seqlens_k, k_TKC.shape[0], longest)
    elif cu_seqlens is None:
        bounds_k = [(s * longest, (s + 1) * longest) for s in range(len(bounds_q))]
    out_THC = torch.zeros_like(q_THC, dtype=wide, memory_format=torch.contiguous_format)
    behind = float("-inf") if sinks_H is None else sinks_H.to(wide)[:, None]
    lse_HT = torch.zeros(q_THC.shape[1], q_THC.shape[0], dtype=wide, device=q_THC.device) + behind
    group = q_THC.shape[1] // k_TKC.shape[1]
    k_THC, v_THC = (x.to(wide).repeat_interleave(group, dim=1) for x in (k_TKC, v_TKC))
    for (q0, q1), (k0, k1) in zip(bounds_q, bounds_k, strict=True):
        scores_HSN = torch.einsum("shc,nhc->hsn", q_THC[q0:q1].to(wide), k_THC[k0:k1]) * scale
        if softcap:
            scores_HSN = softcap * torch.tanh(scores_HSN / softcap)
        visible_SN = _visible(q1 - q0, k1 - k0, causal, window, q_THC.device)
        weights_HSN, lse_HS = _softmax(scores_HSN, visible_SN, sinks_H)
        out_THC[q0:q1] = torch.einsum("hsn,nhc->shc", weights_HSN, v_THC[k0:k1])
        lse_HT[:, q0:q1] = lse_HS
    return out_THC.to(q_THC.dtype), lse_HT


def _bounds(
    name: str, cu_seqlens: Tensor | None, tokens: int, length: int
) -> list[tuple[int, int]]:
    """Only here are the numbers looked at: a kernel believes them."""
    if cu_seqlens is None:
        return [(start, start + length) for start in range(0, tokens, length)]
    bounds = cu_seqlens.tolist()
    found = list(itertools.pairwise(bounds))
    rising = bounds[0] >= 0 and all(start <= end for start, end in found) and bounds[-1] <= tokens
    require(rising, name, f"bounds that rise from 0 to at most {tokens}", bounds)
    longest = max(end - start for start, end in found)
    require(longest <= length, name, f"sequences of at most {length} tokens", longest)
    return found


def _visible(queries: int, keys: int, causal: bool, window: int, device: torch.device) -> Tensor:
    position_S1 = torch.arange(keys - queries, keys, device=device)[:, None]
    key_N = torch.arange(keys, device=device)
    seen_SN = key_N <= position_S1 if causal else torch.ones_like(key_N <= position_S1)
    return seen_SN & (key_N > position_S1 - window) if window else seen_SN


def _softmax(
    scores_HSN: Tensor, visible_SN: Tensor, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights, and the log-sum-exp of what is seen; without NaN, forward or backward, where that is nothing."""
    if sinks_H is not None:
        logits = scores_HSN.masked_fill(~visible_SN, float("-inf"))
        sink_HS1 = sinks_H.to(logits)[:, None, None].expand(-1, logits.shape[1], 1)
        lse_HS = torch.cat([logits, sink_HS1], -1).logsumexp(-1)
        return (logits - lse_HS[..., None]).exp(), lse_HS
    seen_S = visible_SN.any(-1)
    logits = scores_HSN.masked_fill(~visible_SN & seen_S[:, None], float("-inf"))
    lse_HS = logits.logsumexp(-1)
    weights_HSN = (logits - lse_HS[..., None]).exp() * seen_S[:, None]
    return weights_HSN, lse_HS.masked_fill(~seen_S, float("-inf"))


def attention(
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    cu_seqlens: Tensor | None,
    *,
    max_length: int,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    cu_seqlens_k: Tensor | None = None,
    max_length_k: int | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """out [T, H, C], and lse [H, T] (natural logarithm, sinks included) if asked for.

    `cu_seqlens` None: equal sequences of `max_length` tokens each. `cu_seqlens_k`, `max_length_k`: where there are
    more keys than queries. `scale` None: 1 / sqrt(C). `out`: a contiguous buffer, where no gradient is wanted.
    """
    problem = checked_problem(
        q_THC, k_TKC, v_TKC, cu_seqlens, cu_seqlens_k, max_length, max_length_k,
        causal, window, softcap, scale,
    )  # fmt: skip
    if sinks_H is not None:
        floats = (torch.float32, q_THC.dtype)
        check("sinks", sinks_H, dtypes=floats, shape=q_THC.shape[1:2], beside=q_THC, packed=True)
    inputs = (q_THC, k_TKC, v_TKC, sinks_H)
    chosen = choose("attention", impl, _offers(*inputs, problem)).impl
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if out is not None:
        if learns:
            raise ValueError("out: wanted None where a gradient is needed, got a tensor")
        check("out", out, packed=True)
        out = output("out", out, q_THC.shape, q_THC.dtype, q_THC)
    if chosen == "reference":
        result, lse_HT = attention_reference(
            q_THC, k_TKC, v_TKC, problem.cu_q, max_length=max_length, causal=causal, window=window,
            softcap=softcap, sinks_H=sinks_H, scale=scale, cu_seqlens_k=cu_seqlens_k,
            max_length_k=max_length_k,
        )  # fmt: skip
        result = result if out is None else out.copy_(result)
    elif learns:
        result, lse_HT = _Attention.apply(*inputs, problem, chosen)
    else:
        result, lse_HT = _forward(chosen, *inputs, problem, out)
    return (result, lse_HT) if return_lse else result


def _offers(
    q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, sinks_H: Tensor | None, problem: Problem
) -> Mapping[str, str | None]:
    """Each implementation with what keeps it from running, the preferred one first.

    Measured on an H200: Gluon is ahead of cuDNN where the mask is causal and heads have 128 columns, and far ahead of
    torch's flash attention (FA2) where lengths differ.
    """
    not_double = None if q_THC.dtype != torch.float64 else "float64 is for the reference"
    ours = {
        "gluon": gluon_forward.obstacle(q_THC, k_TKC, v_TKC, problem),
        "triton": needs_cuda(q_THC, k_TKC, v_TKC) or not_double,
    }
    torchs = {"torch": from_torch.forward_obstacle(q_THC, sinks_H, problem)}
    if not problem.dense:
        return {**ours, **torchs, "reference": None}
    ahead = problem.causal and q_THC.shape[2] == 128
    order = ("gluon", "torch", "triton") if ahead else ("torch", "gluon", "triton")
    obstacles = {name: {**ours, **torchs}[name] for name in order} | {"reference": None}
    return _best_first("forward", q_THC, problem, obstacles)


def first_key(direction: str, width: int, keys: int) -> str:
    return f"first choice {direction} D={width},keys<={size_class(keys)}"


def _best_first(
    direction: str, q_THC: Tensor, problem: Problem, obstacles: dict[str, str | None]
) -> dict[str, str | None]:
    """Order the implementations; for equal lengths the tuned table may prefer another than the default."""
    if problem.dense:
        usual = next(iter(obstacles))
        key = first_key(direction, q_THC.shape[2], problem.max_k)
        best = tuned("attention", key, dict(impl=usual))["impl"]
        obstacles = {best: obstacles[best], **obstacles}
    return obstacles


def _forward(
    impl: str,
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    sinks_H: Tensor | None,
    problem: Problem,
    out_THC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if impl == "torch":
        result, lse_HT = from_torch.forward(q_THC, k_TKC, v_TKC, problem)
        return (result if out_THC is None else out_THC.copy_(result)), lse_HT
    if out_THC is None:
        out_THC = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
    lse_HT = torch.empty(*q_THC.shape[1::-1], dtype=torch.float32, device=q_THC.device)
    kernel = gluon_forward if impl == "gluon" else triton_forward
    kernel.attention_forward(q_THC, k_TKC, v_TKC, sinks_H, problem, out_THC, lse_HT)
    return out_THC, lse_HT


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        sinks_H: Tensor | None,
        problem: Problem,
        impl: str,
    ) -> tuple[Tensor, Tensor]:
        out_THC, lse_HT = _forward(impl, q_THC, k_TKC, v_TKC, sinks_H, problem)
        ctx.save_for_backward(q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_HT)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return out_THC, lse_HT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        dout_THC, dlse_HT = grad_outputs
        q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_HT = ctx.saved_tensors
        if dout_THC is None:
            dout_THC = torch.zeros_like(out_THC)
        grads = attention_gradients(
            dout_THC, q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_HT, ctx.problem, dlse_HT
        )
        return *grads, None, None


def attention_gradients(
    dout_THC: Tensor,
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    sinks_H: Tensor | None,
    out_THC: Tensor,
    lse_HT: Tensor,
    problem: Problem,
    dlse_HT: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsinks, whichever implementation computed `out` and `lse`."""
    dout_THC = dout_THC.contiguous()
    obstacles = {
        "gluon": gluon_backward.obstacle(q_THC, k_TKC, v_TKC, problem),
        "torch": from_torch.backward_obstacle(q_THC, sinks_H, dlse_HT, problem),
        "triton": needs_cuda(q_THC),
    }
    ahead = problem.causal and q_THC.shape[1:] != k_TKC.shape[1:] and problem.max_k <= SHORT
    if not (ahead and q_THC.shape[2] == 128):  # torch's cannot run where lengths differ
        obstacles = {"torch": obstacles.pop("torch"), **obstacles}
    offers = _best_first("backward", q_THC, problem, obstacles)
    chosen = choose("attention_backward", impl, offers).impl
    if chosen == "torch":
        return *from_torch.backward(dout_THC, q_THC, k_TKC, v_TKC, out_THC, lse_HT, problem), None
    kernels = gluon_backward if chosen == "gluon" else triton_backward
    return kernels.attention_backward(
        dout_THC, q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_HT, dlse_HT, problem
    )
