"""The product with a weight in floating point on a GPU, without gradients: which kernel suits the shape?

few rows       the kernel that reads weights at the memory's speed, SwiGLU in its epilogue; a long K is cut, and
               its parts are joined by the norm that follows
many rows      cuBLAS; added to the residual at once where K is short; SwiGLU and GELU in our own product's epilogue
invariant      one kernel with one tile for any number of rows
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.matmul.epilogue import Epilogue as MatmulEpilogue
from cairn.kernels.matmul.matmul import launch, matmul, usual_tiles
from cairn.kernels.matmul.skinny_matmul import skinny_matmul, skinny_parts
from cairn.kernels.matmul.skinny_plans import MOST_ROWS as PREFETCHING_ROWS
from cairn.kernels.matmul.skinny_plans import skinny_is_faster
from cairn.kernels.norm.join_norm import Parts
from cairn.kernels.tiles import aligned_rows
from cairn.models.activation import Gate
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import Epilogue, Kernels, Product, finished

LONGEST = 4096  # columns of a product that is added to the residual at once; cuBLAS has slower forms for longer ones
ALIGNED = 8  # values of 16 bits in 16 bytes
# From here on SwiGLU in our product's epilogue is ahead of cuBLAS and a kernel behind it.
MANY_ROWS = 1024


def gpu_product(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, epilogue: Epilogue, kernels: Kernels
) -> Product:
    if epilogue.onto_MN is not None and bias_N is None and not kernels.invariant:
        rows = len(x_MK)
        if skinny_is_faster(rows, *w_NK.shape):
            sums_SMN = skinny_parts(
                x_MK, w_NK, prefetch=True, shares_chip=kernels.shares_chip, ring=kernels.ring
            )
            if sums_SMN is not None:
                return Parts(sums_SMN)
        elif rows >= MANY_ROWS and w_NK.shape[1] <= LONGEST:
            epilogue.onto_MN.addmm_(x_MK, w_NK.T)
            return None
    gate = epilogue.gate
    if gate is not None and gate.is_swiglu and _joins(len(x_MK), w_NK, kernels):
        return _by_kernel(x_MK, w_NK, bias_N, kernels, swiglu=True)
    if gate is not None and _joins_gelu(len(x_MK), gate, bias_N, kernels):
        return _with_gelu(x_MK, w_NK, cast(Tensor, bias_N), gate)
    y_MN = _by_kernel(x_MK, w_NK, bias_N, kernels, swiglu=False)
    return y_MN if gate is None else gate.fast(y_MN)


def dequantised_product(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, epilogue: Epilogue, kernels: Kernels
) -> Product:
    """The matrix was written just before: not by a kernel that reads weights before its predecessor has ended."""
    if kernels.invariant or len(x_MK) > PREFETCHING_ROWS:
        return gpu_product(x_MK, w_NK, bias_N, epilogue, kernels)
    return finished(linear(x_MK, w_NK), bias_N, epilogue)


def _joins(rows: int, w_NK: Tensor, kernels: Kernels) -> bool:
    """SwiGLU in the product's epilogue: for few rows and for many, not for those between."""
    return (
        skinny_is_faster(rows, *w_NK.shape, gated=True) or rows >= MANY_ROWS
    ) and not kernels.invariant


def _joins_gelu(rows: int, gate: Gate, bias_N: Tensor | None, kernels: Kernels) -> bool:
    gelu = not gate.gated and gate.activation in ("gelu", "gelu_tanh")
    return gelu and bias_N is not None and rows >= MANY_ROWS and not kernels.invariant


def _with_gelu(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor, gate: Gate) -> Tensor:
    """cuBLAS has the tanh form in an epilogue; the exact one is ours."""
    if gate.activation == "gelu_tanh":
        return torch._addmm_activation(bias_N, x_MK, w_NK.T, use_gelu=True)
    return matmul(x_MK, w_NK, bias_N=bias_N, activation="gelu")


def _in_one_order(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The same sums for any number of rows: tiles of every size add up K in the same order, sixteen at a time.

    Rows begin at multiples of 16 bytes, as the kernel wants them.
    """
    if more := -w_NK.shape[1] % ALIGNED:
        x_MK, w_NK = F.pad(x_MK, (0, more)), F.pad(w_NK, (0, more))
    y_MN = aligned_rows(len(x_MK), len(w_NK), x_MK, x_MK.dtype)
    launch(x_MK, w_NK, y_MN, MatmulEpilogue(bias_N), usual_tiles(len(x_MK), len(w_NK)))
    return y_MN.contiguous()


def _by_kernel(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, kernels: Kernels, swiglu: bool
) -> Tensor:
    if kernels.invariant:
        return _in_one_order(x_MK, w_NK, bias_N)
    activation = "swiglu" if swiglu else None
    if skinny_is_faster(len(x_MK), *w_NK.shape, gated=swiglu):
        return skinny_matmul(
            x_MK,
            w_NK,
            bias_N=bias_N,
            activation=activation,
            prefetch=True,
            shares_chip=kernels.shares_chip,
            ring=kernels.ring,
        )
    if swiglu:
        return matmul(x_MK, w_NK, bias_N=bias_N, activation=activation)
    return F.linear(x_MK, w_NK, bias_N)
