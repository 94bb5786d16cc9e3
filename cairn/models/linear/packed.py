"""Weights in few bits, for a CPU: what is kept of their numbers, and how they are multiplied with.

    Int4   32 values of a row share a scale and an offset: 16 levels     x rounded to 8 bits per token
    Int8   a row shares a scale: 255 levels                              x rounded to 16 bits per token

A matrix whose groups of 32 have 16 evenly spaced levels, as GGUF's Q4_1 stores them, is kept by Int4 as it is, up to a
scale in bfloat16. Both round the activations of each token by its own range, so no token depends on its batch. A few
columns of x are much larger than the rest in every trained model, and would leave few of the levels to the others:
these `outliers` are multiplied in float32 and are zero in the rounded part (LLM.int8, arXiv:2208.07339).

    y = packed(x without outliers) + [sums of groups, outliers] @ [offsets of groups; their columns of the weight]

Products are torch's own (KleidiAI on ARM; oneDNN with ACL, QNNPACK or FBGEMM under `linear_dynamic`); `obstacle` of
each form says where there is none. Which form pays on this machine is decided elsewhere, by measuring.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.cpu.compiled import ON_ARM
from cairn.kernels.cpu.compiled import obstacle as no_compiled
from cairn.kernels.cpu.digits import Digits
from cairn.kernels.cpu.level_rows import RowsOfMatrix
from cairn.models.linear.form import PLAIN, AnyRows, Epilogue

GROUP = 32  # values that share a scale in Int4
LEVELS = 15  # steps between the smallest and the largest of a group
MIDDLE = 8  # the packed product reads a level as level - 8
INT8_MOST = 127
LOWER = 2.0 * INT8_MOST  # steps of the second digit of an activation in one of the first
PINS = (-127.0, 128.0)  # the ends of the range: 255 steps of 1
PAIR_MOST = 2**15 // 256  # levels of two neighbours, where their products are added in 16 bits
DIGIT_ROWS = 32  # of x, up to which two digits are faster than floats on a CPU that adds so
ROWS_AT_ONCE = 8192  # of a matrix that is being packed
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


class Int4(AnyRows):
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


class Int8(AnyRows):
    """Rows of 8-bit levels; x in two digits of 8 bits each, by its token's largest value; outliers in float32.

    With one digit, a difference in the last bit of a float32 decides here and there what a value is rounded to, and
    thirty layers make another answer of it: what a request gets would depend on what else is in the batch.

    torch's product takes one range for all rows that it is given. Two columns that have no weights in it, since they
    are outliers, are therefore pinned to the ends of the range: it is the same for every batch, and its step is 1.
    """

    def __init__(self, weight_NK: RowsOfMatrix, outliers_O: Tensor) -> None:
        self.columns = weight_NK.shape[1]
        self.outliers_O = outliers_O = _at_least(len(PINS), outliers_O, self.columns)
        self.apart_ON = torch.empty(len(outliers_O), weight_NK.shape[0])
        self.inlier_K = torch.ones(self.columns).index_fill_(0, outliers_O, 0.0)
        in_pairs = saturates()
        self.scale_N, level_NK = self._levels(weight_NK, in_pairs)
        # Where 8-bit products are no faster than float32 once there are many rows, levels become floats there.
        self.level_NK = level_NK if in_pairs else None
        level_bytes = level_NK.nbytes
        quantised_NK = _quantised(level_NK, self.scale_N)
        del level_NK  # a vocabulary's are hundreds of megabytes
        self.packed = _packed(quantised_NK, int8_engine())
        self.multiply: Any = torch.ops.quantized.linear_dynamic.default
        pins = torch.tensor(PINS)
        self.pinned_K = torch.zeros(self.columns).index_copy_(0, outliers_O[: len(pins)], pins)
        self.tiny = torch.tensor(torch.finfo(torch.float32).tiny)
        given = (self.inlier_K, self.pinned_K, self.outliers_O, self.apart_ON)
        self.digits = None if no_compiled() else Digits(*given, INT8_MOST, LOWER)
        copies = 1 if self.level_NK is None else 2
        self.nbytes = copies * level_bytes + self.scale_N.nbytes + self.apart_ON.nbytes

    def _levels(self, weight_NK: RowsOfMatrix, in_pairs: bool) -> tuple[Tensor, Tensor]:
        """A scale for each row, and the levels; few rows at a time, because a vocabulary is large."""
        count, columns = weight_NK.shape
        scale_N, level_NK = torch.empty(count), torch.empty(count, columns, dtype=torch.int8)
        for first in range(0, count, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, count))
            weight_RK = weight_NK[rows].detach().float()
            self.apart_ON[:, rows] = weight_RK[:, self.outliers_O].t()
            inlier_RK = weight_RK * self.inlier_K
            scale_N[rows] = row_scales(inlier_RK, in_pairs)
            level_NK[rows] = inlier_RK.div_(scale_N[rows, None]).round_()
        return scale_N, level_NK

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        in_floats = self.level_NK is not None and len(x_MK) > DIGIT_ROWS
        if self.digits is not None and not in_floats:
            return _finished(self._compiled(self.digits, x_MK.contiguous()), bias_N, epilogue)
        inlier_MK = x_MK * self.inlier_K
        if self.level_NK is not None and in_floats:
            y_MN = F.linear(inlier_MK, self.level_NK.float()).mul_(self.scale_N)
        else:
            largest_M1 = torch.linalg.vector_norm(inlier_MK, torch.inf, dim=-1, keepdim=True)
            step_M1 = torch.add(self.tiny, largest_M1, alpha=1 / INT8_MOST)
            digits_2MK = self._digits(inlier_MK, step_M1)
            y_MN = self._sum(self.multiply(digits_2MK, self.packed), step_M1)
        y_MN.addmm_(x_MK.index_select(1, self.outliers_O), self.apart_ON)
        return _finished(y_MN, bias_N, epilogue)

    def _compiled(self, digits: Digits, x_MK: Tensor) -> Tensor:
        """The same by compiled kernels around torch's product."""
        digits_2MK, step_M1 = digits.split(x_MK)
        products_2MN = self.multiply(digits_2MK, self.packed)
        if digits.joins and len(x_MK) <= DIGIT_ROWS:
            return digits.join(products_2MN, step_M1, x_MK)
        y_MN = self._sum(products_2MN, step_M1)
        return y_MN.addmm_(x_MK.index_select(1, self.outliers_O), self.apart_ON)

    def _sum(self, products_2MN: Tensor, step_M1: Tensor) -> Tensor:
        high_MN, low_MN = products_2MN.chunk(2)
        return high_MN.add_(low_MN, alpha=1 / LOWER).mul_(step_M1)

    def _digits(self, x_MK: Tensor, step_M1: Tensor) -> Tensor:
        """Twice the rows: whole steps, and what is left over in steps that are 254 times as small.

        The pins are whole steps, so they are in the first half alone; both halves have one range.
        """
        steps_MK = torch.addcdiv(self.pinned_K, x_MK, step_M1)
        high_MK = steps_MK.round()
        return torch.cat((high_MK, steps_MK.sub_(high_MK).mul_(LOWER)))

    @staticmethod
    def obstacle(rows: int, columns: int) -> str | None:
        """Why a matrix of this shape has no such form here, or None."""
        if columns < len(PINS):
            return f"rows of {columns} values have none to spare"
        made = hasattr(torch, "_make_per_tensor_quantized_tensor")
        return None if made and int8_engine() else "torch has no 8-bit product for this CPU"


def _at_least(count: int, outliers_O: Tensor, columns: int) -> Tensor:
    """The outliers, and the first of the other columns where there are too few."""
    others = torch.ones(columns).index_fill_(0, outliers_O, 0.0).nonzero()[:, 0]
    missing = max(0, count - len(outliers_O))
    return torch.cat((outliers_O, others[:missing])).sort().values


def row_scales(weight_NK: Tensor, in_pairs: bool) -> Tensor:
    """Scale of each row. `in_pairs`: the sum of two neighbouring products must fit into 16 bits."""
    scale_N = weight_NK.abs().amax(-1) / INT8_MOST
    if in_pairs:
        even_NP = weight_NK[:, ::2]
        odd_NP = F.pad(weight_NK[:, 1::2], (0, weight_NK.shape[1] % 2))
        # Rounding adds up to half a level to each of them.
        scale_N = torch.maximum(scale_N, (even_NP + odd_NP).abs().amax(-1) / (PAIR_MOST - 1))
    return scale_N.where(scale_N > 0, 1.0)


def _finished(y_MN: Tensor, bias_N: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Apply bias and epilogue in place, because the result is not shared yet."""
    if bias_N is not None:
        y_MN.add_(bias_N)
    return y_MN if epilogue.gate is None else epilogue.gate.in_place(y_MN)


@lru_cache(maxsize=1)
def int8_engine() -> str | None:
    """The quantised engine of torch that multiplies 8-bit integers correctly on this machine, or None."""
    wanted = ("onednn", "qnnpack") if ON_ARM else ("x86", "fbgemm", "onednn")
    present = torch.backends.quantized.supported_engines
    return next((name for name in wanted if name in present and _is_right(name)), None)


def _is_right(engine: str) -> bool:
    """oneDNN without ACL (torch 2.13 on ARM) is right for as many rows as it was given first, and wrong for others."""
    level_NK = torch.arange(-32, 32, dtype=torch.int8).view(4, 16)
    packed = _packed(_quantised(level_NK, torch.ones(4)), engine)
    for rows in (2, 1, 5):
        x_MK = torch.arange(16 * rows).remainder_(7).sub_(3).view(rows, 16).float()
        x_MK[:, : len(PINS)] = torch.tensor(PINS)
        found_MN = torch.ops.quantized.linear_dynamic(x_MK, packed)
        if not torch.allclose(found_MN, x_MK @ level_NK.float().t()):
            return False
    return True


def _quantised(level_NK: Tensor, scale_N: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # How it is made is deprecated, the product with it is not.
        warnings.simplefilter("ignore", UserWarning)
        none_N = torch.zeros(len(level_NK), dtype=torch.long)
        return torch._make_per_channel_quantized_tensor(level_NK, scale_N, none_N, 0)


def _packed(quantised_NK: Tensor, engine: str | None) -> Any:
    """Weights packed for a quantised engine of torch."""
    with _engine(engine), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.ops.quantized.linear_prepack(quantised_NK, None)


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


def saturates() -> bool:
    """x86 without VNNI adds pairs of products in 16 bits."""
    return not ON_ARM and not torch.cpu._is_vnni_supported()
