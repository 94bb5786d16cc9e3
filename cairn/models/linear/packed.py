"""Weights in few bits, for a CPU: what is kept of their numbers, and how they are multiplied with.

    Int4   32 values of a row share a scale and an offset: 16 levels     x rounded to 8 bits per token
    Int8   a row shares a scale: 255 levels                              x rounded to 8 bits per token

A matrix whose groups of 32 have 16 evenly spaced levels, as GGUF's Q4_1 stores them, is kept by Int4 as it is, up to a
scale in bfloat16. Both round the activations, each token by its own range, so no token pays for another in its batch.
A few columns of x are much larger than the rest in every trained model, and would leave few of the 255 levels to the
others: these `outliers` are multiplied in float32 and are zero in the rounded part (LLM.int8, arXiv:2208.07339).

    y = packed(x without outliers) + [sums of groups, outliers] @ [offsets of groups; their columns of the weight]

Products are torch's own (KleidiAI on ARM; oneDNN with ACL, or FBGEMM, under `linear_dynamic`); `obstacle` of each form
says where there is none. Which form pays on this machine is decided elsewhere, by measuring.
"""

import copy
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cairn.models.linear.form import PLAIN, Epilogue

GROUP = 32  # values that share a scale in Int4
LEVELS = 15  # steps between the smallest and the largest of a group
MIDDLE = 8  # the packed product reads a level as level - 8
INT8_MOST = 127
# Steps: bfloat16 keeps 8 bits of a scale, so it errs by up to 1/256, and a level is less than 15 steps from the mean.
SCALE_ERROR = LEVELS / 256


class Levels:
    """A matrix as levels 0..15 per value, and a scale and an offset per group: w = scale * (level - 8) + offset."""

    def __init__(self, weight_NK: Tensor) -> None:
        rows, columns = weight_NK.shape
        w_NGE = weight_NK.detach().float().view(rows, columns // GROUP, GROUP)
        low_NG1, high_NG1 = w_NGE.aminmax(dim=-1, keepdim=True)
        step_NG1 = (high_NG1 - low_NG1) / LEVELS
        safe_NG1 = step_NG1.where(step_NG1 > 0, 1.0)
        level_NGE = ((w_NGE - low_NG1) / safe_NG1).round_().clamp_(0, LEVELS)
        # The packed product has its scales in this type.
        self.scale_NG = step_NG1[..., 0].bfloat16()
        centred_NG = level_NGE.mean(-1) - MIDDLE
        self.offset_NG = w_NGE.mean(-1) - centred_NG * self.scale_NG.float()
        self.level_NK = level_NGE.to(torch.uint8).view(rows, columns)

    def weight_NK(self) -> Tensor:
        """The matrix that these levels stand for, in float32."""
        rows, columns = self.level_NK.shape
        centred_NGE = self.level_NK.view(rows, -1, GROUP).float() - MIDDLE
        w_NGE = centred_NGE * self.scale_NG.float()[..., None] + self.offset_NG[..., None]
        return w_NGE.view(rows, columns)

    def exact(self, weight_NK: Tensor) -> bool:
        """Is this the matrix itself, up to what rounding the scales to bfloat16 does?"""
        error_NG = (self.weight_NK() - weight_NK).abs().view(*self.scale_NG.shape, GROUP).amax(-1)
        return bool((error_NG <= SCALE_ERROR * self.scale_NG.float() + 1e-12).all())

    def packed_NH(self) -> Tensor:
        """Two levels to a byte, the first in the low half."""
        return self.level_NK[:, ::2] | self.level_NK[:, 1::2] << 4


class Int4:
    """Levels through the packed product; offsets of groups and outliers through a small one in float32."""

    def __init__(self, levels: Levels, outliers_O: Tensor) -> None:
        self.rows, self.columns = levels.level_NK.shape
        self.packed = torch._dyn_quant_pack_4bit_weight(
            levels.packed_NH(), levels.scale_NG, None, GROUP, self.columns, self.rows
        )
        inlier_K = torch.ones(self.columns).index_fill_(0, outliers_O, 0.0)
        self.factor_K = inlier_K if len(outliers_O) else None  # of x, before it is rounded
        groups_KG = torch.eye(self.columns // GROUP).repeat_interleave(GROUP, dim=0)
        alone_KO = torch.eye(self.columns)[:, outliers_O]
        self.pick_KS = torch.cat((groups_KG * inlier_K[:, None], alone_KO), dim=1)
        columns_NO = levels.weight_NK()[:, outliers_O]
        self.apart_SN = torch.cat((levels.offset_NG, columns_NO), dim=1).t().contiguous()
        self.nbytes = self.packed.nbytes + self.apart_SN.nbytes + self.pick_KS.nbytes

    def covers(self, rows: int) -> bool:
        return True

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        rounded_MK = x_MK if self.factor_K is None else x_MK * self.factor_K
        y_MN = torch._dyn_quant_matmul_4bit(rounded_MK, self.packed, GROUP, self.columns, self.rows)
        return _finished(y_MN.addmm_(x_MK @ self.pick_KS, self.apart_SN), bias_N, epilogue)

    def after(self, weight_K: Tensor) -> "Int4":
        made = copy.copy(self)
        made.factor_K = weight_K if self.factor_K is None else self.factor_K * weight_K
        made.pick_KS = self.pick_KS * weight_K[:, None]
        return made

    @staticmethod
    def obstacle(rows: int, columns: int) -> str | None:
        """Why a matrix of this shape has no such form here, or None."""
        if not torch.backends.kleidiai.is_available():
            return "torch has no 4-bit product for this CPU"
        if columns % GROUP or columns == GROUP:
            return f"rows of {columns} values are not several groups of {GROUP}"
        return None


class Int8:
    """Rows scaled to -127..127; x scaled to -1..1 per token, so that one scale fits the whole step."""

    def __init__(self, weight_NK: Tensor, outliers_O: Tensor) -> None:
        weight_NK = weight_NK.detach().float()
        self.columns, self.outliers_O = weight_NK.shape[1], outliers_O
        self.apart_ON = weight_NK[:, outliers_O].t().contiguous()
        self.inlier_K = torch.ones(self.columns).index_fill_(0, outliers_O, 0.0)
        inlier_NK = weight_NK * self.inlier_K
        largest_N1 = inlier_NK.abs().amax(-1, keepdim=True)
        self.scale_N = largest_N1[:, 0] / INT8_MOST
        level_NK = inlier_NK.mul_(INT8_MOST / largest_N1.where(largest_N1 > 0, 1.0)).round_()
        with _engine(int8_engine()), warnings.catch_warnings():
            # How the levels are made is deprecated, the product is not.
            warnings.simplefilter("ignore", UserWarning)
            levels = torch._make_per_tensor_quantized_tensor(level_NK.to(torch.int8), 1.0, 0)
            self.packed = torch.ops.quantized.linear_prepack(levels, None)
        self.multiply: Any = torch.ops.quantized.linear_dynamic.default
        self.narrow = saturates()
        self.nbytes = level_NK.numel() + self.scale_N.nbytes + self.apart_ON.nbytes

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        inlier_MK = x_MK * self.inlier_K
        largest_M1 = torch.linalg.vector_norm(inlier_MK, torch.inf, dim=-1, keepdim=True)
        largest_M1.clamp_(min=torch.finfo(x_MK.dtype).tiny)
        y_MN = self.multiply(inlier_MK.div_(largest_M1), self.packed, self.narrow)
        y_MN.mul_(self.scale_N).mul_(largest_M1)
        y_MN.addmm_(x_MK.index_select(1, self.outliers_O), self.apart_ON)
        return _finished(y_MN, bias_N, epilogue)

    @staticmethod
    def obstacle(rows: int, columns: int) -> str | None:
        """Why a matrix of this shape has no such form here, or None."""
        made = hasattr(torch, "_make_per_tensor_quantized_tensor")
        return None if made and int8_engine() else "torch has no 8-bit product for this CPU"


def _finished(y_MN: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
    """In place: the result belongs to nobody else yet."""
    if bias_N is not None:
        y_MN.add_(bias_N)
    return y_MN if epilogue.gate is None else epilogue.gate.in_place(y_MN)


def int8_engine() -> str | None:
    """Which of torch's libraries multiplies 8-bit integers here."""
    wanted = ("onednn",) if _is_arm() else ("x86", "fbgemm", "onednn")
    present = torch.backends.quantized.supported_engines
    return next((name for name in wanted if name in present), None)


@contextmanager
def _engine(name: str | None) -> Iterator[None]:
    """torch remembers in a global which library packs; the packed matrix remembers it for itself."""
    if name is None:
        raise ValueError("torch has no 8-bit product for this CPU; see `Int8.obstacle`")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def _is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def saturates() -> bool:
    """x86 without VNNI adds pairs of products in 16 bits: activations then have to stay within 7 bits."""
    return not _is_arm() and not torch.cpu._is_vnni_supported()
