"""Epilogue of a linear layer: bias, SwiGLU or GELU, residual, quantisation. Pure torch.

With SwiGLU the first half of b's rows is the gate and the second half is up, as the model keeps them:
y = silu(a @ gate.T) * (a @ up.T). With a scale y becomes float8 e4m3: clamp(y / scale). `matmul_reference` is the
specification of every product that has an epilogue.
"""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, require

Activation = Literal["swiglu", "gelu"]
LARGEST_E4M3 = 448.0


class Epilogue(NamedTuple):
    """Operations on a @ b.T, in this order."""

    bias_N: Tensor | None = None
    activation: Activation | None = None
    residual_MN: Tensor | None = None
    out_scale: Tensor | None = None

    def needed(self) -> bool:
        return any(part is not None for part in self)

    def columns(self, n: int) -> int:
        return n // 2 if self.activation == "swiglu" else n

    def check(self, a: Tensor, b: Tensor) -> None:
        """A ValueError where it does not fit these operands."""
        n, known = b.shape[0], (None, *get_args(Activation))
        wanted = "'swiglu', 'gelu' or None"
        require(self.activation in known, "activation", wanted, repr(self.activation))
        paired = self.activation != "swiglu" or n % 2 == 0
        require(paired, "b_NK", "as many rows of gate as of up", f"{n} rows")
        if self.bias_N is not None:
            check("bias_N", self.bias_N, dtypes=FLOATS, shape=(n,), beside=a, packed=True)
        if self.residual_MN is not None:
            shape = (*a.shape[:-1], self.columns(n))
            check("residual_MN", self.residual_MN, dtypes=(a.dtype,), shape=shape, beside=a)
            as_rows("residual_MN", self.residual_MN)
        if self.out_scale is not None:
            check("out_scale", self.out_scale, dtypes=(torch.float32,), beside=a)
            found = self.out_scale.numel()
            require(found == 1, "out_scale", "one number", found)


def matmul_reference(
    a_MK: Tensor, b_NK: Tensor, epilogue: Epilogue, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Reference in float32 (float64 for a float64 a), rounded at the end only."""
    wide = torch.float64 if a_MK.dtype == torch.float64 else torch.float32
    y = a_MK.to(wide) @ b_NK.to(wide).T
    if epilogue.bias_N is not None:
        y = y + epilogue.bias_N.to(wide)
    y = _after_bias(y, epilogue, dtype)
    return y if out is None else out.copy_(y)


def _after_bias(y: Tensor, epilogue: Epilogue, dtype: torch.dtype) -> Tensor:
    if epilogue.activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    elif epilogue.activation == "gelu":
        y = F.gelu(y)
    if epilogue.residual_MN is not None:
        y = y + epilogue.residual_MN
    if epilogue.out_scale is not None:
        y = (y / epilogue.out_scale).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return y.to(dtype)


def with_epilogue(
    a: Tensor, b: Tensor, epilogue: Epilogue, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """cuBLAS, and torch for the rest."""
    if out is not None and a.ndim == 2 and dtype == a.dtype and not epilogue.needed():
        return torch.mm(a, b.T, out=out)
    bias = None if epilogue.bias_N is None else epilogue.bias_N.to(a.dtype)
    y = _after_bias(F.linear(a, b, bias), epilogue, dtype)
    return y if out is None else out.copy_(y)
