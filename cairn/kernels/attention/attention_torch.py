"""Attention through what PyTorch carries: cuDNN for equal lengths, its flash attention (FA2) for ragged ones.

Both take the packed tensors as they are: a batch is a view. Results come in our layout, with the log-sum-exp that any
of our backward passes can use; and cuDNN's backward pass takes the output and log-sum-exp of any of our forward
passes. Neither knows soft-caps or sinks here; flash attention leaves rows behind the last sequence as they are, and
says +inf where a query sees nothing.
"""

import torch
from torch import Tensor

from cairn.kernels.attention.attention_problem import Problem

_aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)
WIDEST = 128  # of a head in cuDNN, forward and backward


def forward_obstacle(q_THC: Tensor, sinks_H: Tensor | None, problem: Problem) -> str | None:
    obstacle = _obstacle(q_THC, sinks_H, problem)
    if obstacle is None and problem.dense and problem.window:
        return "cuDNN is called without a window here"
    return obstacle


def backward_obstacle(
    q_THC: Tensor, sinks_H: Tensor | None, dlse_HT: Tensor | None, problem: Problem
) -> str | None:
    if not problem.dense:
        return "lengths differ, and flash attention's backward pass is slower than ours"
    if dlse_HT is not None:
        return "the log-sum-exp has a gradient"
    return forward_obstacle(q_THC, sinks_H, problem)


def _obstacle(q_THC: Tensor, sinks_H: Tensor | None, problem: Problem) -> str | None:
    if q_THC.device.type != "cuda":
        return f"a tensor is on {q_THC.device}, not on a GPU"
    if q_THC.dtype not in NARROW:
        return f"{q_THC.dtype} is not a 16-bit type"
    if q_THC.shape[0] == 0:
        return "there is nothing to compute"
    if problem.softcap:
        return "it has no soft-cap"
    if sinks_H is not None:
        return "it has no sinks"
    if problem.dense and problem.causal and not problem.square:
        return "cuDNN aligns queries with the first keys, not with the last"
    if problem.dense and q_THC.shape[-1] > WIDEST:
        return f"heads are wider than {WIDEST}"
    return None


def forward(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    if problem.dense:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *_batches(q_THC, k_TKC, v_TKC, problem), None, True, 0.0, problem.causal, False,
            scale=problem.scale,
        )  # fmt: skip
        tokens, heads, _ = q_THC.shape
        lse_HT = lse.reshape(problem.sequences, heads, -1).transpose(0, 1).reshape(heads, tokens)
        return out.transpose(1, 2).reshape(q_THC.shape), lse_HT
    left, right = (problem.window - 1 if problem.window else -1), (0 if problem.causal else -1)
    out_THC, lse_HT, *_ = _aten._flash_attention_forward(
        q_THC, k_TKC, v_TKC, problem.cu_q, problem.cu_q if problem.cu_k is None else problem.cu_k,
        problem.max_q, problem.max_k, 0.0, problem.causal, False, scale=problem.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out_THC, lse_HT


def backward(
    dout_THC: Tensor,
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_THC: Tensor,
    lse_HT: Tensor,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equal lengths only, by cuDNN."""
    q, k, v = _batches(q_THC, k_TKC, v_TKC, problem)
    dout, out = (
        x.view(problem.sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (dout_THC, out_THC)
    )
    heads = lse_HT.shape[0]
    lse = lse_HT.reshape(heads, problem.sequences, -1).transpose(0, 1).contiguous()[..., None]
    unused = torch.zeros((), dtype=torch.int64, device=q_THC.device)  # the seeds of a dropout of 0
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, unused, unused, None, None, None, problem.max_q, problem.max_k,
        0.0, problem.causal, scale=problem.scale,
    )  # fmt: skip
    dq, dk, dv = (grad.transpose(1, 2).reshape(x.shape)
                  for grad, x in zip(grads, (q_THC, k_TKC, v_TKC), strict=True))  # fmt: skip
    return dq, dk, dv


def _batches(
    q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, heads, S, C] views."""
    q, k, v = (
        x.unflatten(0, (problem.sequences, -1)).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
    )
    return q, k, v
