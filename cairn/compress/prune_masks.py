"""Pruning masks of a matrix: by magnitude, by magnitude and input norm, or with compensation by the other weights.

    magnitude    |w|
    wanda        |w| * |x_j|                     (arXiv:2306.11695): compared within each row
    sparsegpt    w^2 / U_jj^2, and the columns behind are adjusted as GPTQ does (arXiv:2301.00774)

n:m keeps n of each m neighbours in a row; without a pattern the smallest share goes.
"""

import torch
from torch import Tensor

from cairn.compress.gptq import inverse_factor

BLOCK = 128


def magnitude(w_NK: Tensor, sparsity: float, pattern: tuple[int, int] | None) -> Tensor:
    """The smallest weights of the whole matrix, or of each group, become zero."""
    return w_NK * ~smallest(w_NK.abs(), sparsity, pattern, by_row=False)


def wanda(w_NK: Tensor, norm_K: Tensor, sparsity: float, pattern: tuple[int, int] | None) -> Tensor:
    """The smallest products of weight and input length of each row become zero."""
    return w_NK * ~smallest(w_NK.abs() * norm_K, sparsity, pattern, by_row=True)


def sparsegpt(
    w_NK: Tensor,
    hessian_KK: Tensor,
    sparsity: float,
    pattern: tuple[int, int] | None,
    name: str = "a matrix",
) -> Tensor:
    """Blocks of columns from left to right; what a zero takes away the columns behind make up for."""
    w_KN = w_NK.float().t().contiguous()
    upper_KK = inverse_factor(hessian_KK, name)
    columns = len(w_KN)
    of = pattern[1] if pattern is not None else 1
    block = max(BLOCK // of, 1) * of  # whole groups of neighbours
    for begin in range(0, columns, block):
        end = min(begin + block, columns)
        upper_BB = upper_KK[begin:end, begin:end]
        saliency_NB = (w_KN[begin:end] / upper_BB.diagonal()[:, None]).square().t()
        gone_BN = smallest(saliency_NB, sparsity, pattern, by_row=False).t()
        block_BN, errors_BN = w_KN[begin:end], torch.empty_like(w_KN[begin:end])
        for i in range(end - begin):
            errors_BN[i] = block_BN[i] * gone_BN[i] / upper_BB[i, i]
            block_BN[i:].addr_(upper_BB[i, i:], errors_BN[i], alpha=-1.0)
            block_BN[i] *= ~gone_BN[i]
        w_KN[end:].addmm_(upper_KK[begin:end, end:].t(), errors_BN, alpha=-1.0)
    return w_KN.t().contiguous().to(w_NK.dtype)


def smallest(
    scores_NK: Tensor, sparsity: float, pattern: tuple[int, int] | None, by_row: bool
) -> Tensor:
    """True for the share with the smallest scores: of the matrix, of each row, or of each group of m."""
    if pattern is not None:
        kept, of = pattern
        groups = scores_NK.reshape(-1, of)
        gone = torch.zeros_like(groups, dtype=torch.bool)
        gone.scatter_(1, groups.argsort(1)[:, : of - kept], True)
        return gone.view(scores_NK.shape)
    flat = scores_NK if by_row else scores_NK.reshape(1, -1)
    count = round(flat.shape[1] * sparsity)
    gone = torch.zeros_like(flat, dtype=torch.bool)
    gone.scatter_(1, flat.argsort(1)[:, :count], True)
    return gone.view(scores_NK.shape)
