"""C = A @ B in tiles of BLOCK x BLOCK."""

import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, BLOCK: tl.constexpr):
    # begin answer: pass
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, K, BLOCK):
        at = first + tl.arange(0, BLOCK)
        a = tl.load(
            a_ptr + m[:, None] * am + at[None, :] * ak,
            mask=(m[:, None] < M) & (at[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            b_ptr + at[:, None] * bk + n[None, :] * bn,
            mask=(at[:, None] < K) & (n[None, :] < N),
            other=0.0,
        )
        acc += tl.dot(a, b)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=inside)
    # end answer


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Either matrix may be a transposed view."""
    (m, k), n = a_MK.shape, b_KN.shape[1]
    block = 16 if min(m, n) < 64 else 64  # large tiles reuse what they load
    c_MN = torch.zeros(m, n, dtype=a_MK.dtype, device=a_MK.device)
    grid = (triton.cdiv(m, block), triton.cdiv(n, block))
    _matmul[grid](a_MK, b_KN, c_MN, m, n, k, *a_MK.stride(), *b_KN.stride(), BLOCK=block)
    return c_MN
