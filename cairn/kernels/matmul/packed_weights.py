"""Matrices of 4 or 8 bits a weight as `packed_matmul` reads them, and back to bfloat16 for products of many rows.

    int4    w = factor * (scale * (level - 8) + shift)        int8    w = factor * (scale * level + shift)
    e2m1    w = factor * scale * float of 4 bits              fp8     w = factor * (scale * float of 8 bits + shift)
    a scale, and perhaps a shift, for each row and each group of columns; perhaps a factor for each row

Groups are of a multiple of 64 columns, whose scales multiply sums, or of 16 or 32, whose scales multiply weights and
are rounded to bfloat16 as the weights are.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.experts.matrices import E2M1
from cairn.kernels.matmul.skinny_plans import FEW_ROWS
from cairn.kernels.matmul.tile_order import (
    TILE,
    packed_tiles,
    small_group_tiles,
    small_groups,
    unpacked_tiles,
)

MOST_ROWS = 128  # of x: with more, dequantising costs less than unpacking for each 64 rows
SMALL_GROUPS = (16, 32)
BITS = {"int4": 4, "e2m1": 4, "int8": 8, "fp8": 8}
E4M3 = torch.float8_e4m3fn
# Of e2m1 scales are so many times as large in memory: the kernel's floats of 4 bits are 2^-126 of what they mean, and
# its weights 2^-9, so that none overflows.
LIFT = 2.0**117
MOST_SCALE = 2.0**10


class PackedWeights(NamedTuple):
    """A packed matrix [N, K]."""

    tiles: Tensor  # uint8 [N / 64, K / 64, 2048, or 4096 of 8 bits]
    # [K / group, N], in 16 bits where those hold them and there are no shifts: 3% of the bytes less.
    # Of small groups bfloat16 [N / 64, K / 64, 4096 / group], `small_group_tiles`; of e2m1 times `LIFT`.
    scales: Tensor
    # What is added to the scaled level; None: 0. Otherwise they and the scales are of one type, float32 where groups
    # are not small: the kernel keeps both in buffers of one type.
    shifts: Tensor | None = None
    # int32 zeros [at least 2 * N / 64]: parts of a tile that are ready
    arrived: Tensor | None = None
    kind: str = "int4"
    factor_N: Tensor | None = None  # float32

    @property
    def shape(self) -> tuple[int, int]:
        pieces, tiles, _ = self.tiles.shape
        return pieces * TILE, tiles * TILE

    @property
    def small(self) -> bool:
        """Return whether groups are smaller than a tile."""
        return self.scales.dim() == 3

    @property
    def group(self) -> int:
        return (
            TILE * TILE // self.scales.shape[2] if self.small else self.shape[1] // len(self.scales)
        )

    @property
    def scales_NG(self) -> Tensor:
        """Scales in float32 without the stored lift."""
        scales = _plane(self.scales)
        return scales / LIFT if self.kind == "e2m1" else scales

    @property
    def shifts_NG(self) -> Tensor | None:
        return None if self.shifts is None else _plane(self.shifts)


def _plane(numbers: Tensor) -> Tensor:
    return (small_groups(numbers) if numbers.dim() == 3 else numbers.T).float()


def packed_weights(
    levels_NK: Tensor,
    scales_NG: Tensor,
    shifts_NG: Tensor | None = None,
    kind: str = "int4",
    factor_N: Tensor | None = None,
) -> PackedWeights:
    """Levels of a byte each (those of 4 bits 0 to 15, or codes), and what they stand for."""
    columns = levels_NK.shape[1]
    if columns // scales_NG.shape[1] in SMALL_GROUPS:
        scales = small_group_tiles(scales_NG * (LIFT if kind == "e2m1" else 1.0), columns)
        shifts = None if shifts_NG is None else small_group_tiles(shifts_NG, columns)
    else:
        scales = scales_NG.float().T.contiguous()
        shifts = None if shifts_NG is None else shifts_NG.float().T.contiguous()
        scales = in_16_bits(scales) if shifts is None else scales
    tiles = packed_tiles(levels_NK, BITS[kind])
    return PackedWeights(tiles, scales, shifts, None, kind, factor_N)


def in_16_bits(plane: Tensor) -> Tensor:
    """Scales or shifts in the type that a checkpoint had them in, if that is one of 16 bits: no number changes."""
    for kind in (torch.bfloat16, torch.float16):
        short = plane.to(kind)
        if torch.equal(short.float(), plane):
            return short
    return plane


def counted(w: PackedWeights) -> PackedWeights:
    """Add counters, so that the last program of a tile reduces its parts without a second launch."""
    tiles = len(w.tiles) * (MOST_ROWS // FEW_ROWS)
    return w._replace(arrived=torch.zeros(tiles, dtype=torch.int32, device=w.tiles.device))


def in_order(w: PackedWeights, order_N: Tensor) -> PackedWeights:
    """Permute the rows."""
    shifts_NG = None if w.shifts_NG is None else w.shifts_NG[order_N]
    factor_N = None if w.factor_N is None else w.factor_N[order_N]
    levels_NK = unpacked_tiles(w.tiles)[order_N]
    ordered = packed_weights(levels_NK, w.scales_NG[order_N], shifts_NG, w.kind, factor_N)
    return ordered._replace(arrived=w.arrived)


def packed_reference(w: PackedWeights, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] that is meant."""
    levels_NK = unpacked_tiles(w.tiles)
    if w.kind == "e2m1":
        table = torch.tensor([*E2M1, *(-size for size in E2M1)], device=levels_NK.device)
        w_NK = table[levels_NK.int()]
    elif w.kind == "int4":
        w_NK = levels_NK.float() - 8
    else:
        w_NK = levels_NK.view(torch.int8 if w.kind == "int8" else E4M3).float()
    w_NK = w_NK * w.scales_NG.repeat_interleave(w.group, 1)
    if w.shifts_NG is not None:
        w_NK = w_NK + w.shifts_NG.repeat_interleave(w.group, 1)
    return (w_NK if w.factor_N is None else w_NK * w.factor_N[:, None]).to(dtype)


@triton.jit
def float_of_4_bits(code):
    """e2m1: its bits are those of a float16 that is 2^14 times as small."""
    wide = code.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _dequantize_kernel(
    tiles, scales, shifts, factor, y, N, K,
    KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """One tile of 64 x 64 for a program; `tile_order` says where its levels and its scales are."""
    column_tile, piece = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    tile = (piece * (K // TILE) + column_tile).to(tl.int64)
    at = tiles + tile * (TILE * TILE // 8 * BITS) + thread * 16 + column % 2 * 2
    if BITS == 8:
        code = tl.load(
            at + column // 32 * (TILE * TILE // 2) + column % 32 // 8 * 4 + row % 16 // 8
        )
    else:
        byte = tl.load(at + column // 16 * 4 + column % 16 // 8)
        code = (byte >> (row % 16 // 8 * 4).to(tl.uint8)) & 15
    n = piece * TILE + tl.arange(0, TILE)
    if GROUP < TILE:
        of_row = (row // 16 * 8 + row % 8) * (TILE // GROUP) + column // GROUP
        number = tile * (TILE * TILE // GROUP) + of_row * 2 + row % 16 // 8
    else:
        number = (column_tile * TILE // GROUP * N + n)[:, None]
    scale = tl.load(scales + number).to(tl.float32)
    if KIND == "e2m1":
        w = float_of_4_bits(code) * (scale * 2.0**-117)
    elif KIND == "int4":
        w = (code.to(tl.float32) - 8.0) * scale
    elif KIND == "int8":
        w = code.to(tl.int8, bitcast=True).to(tl.float32) * scale
    else:
        w = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    if shifts is not None:
        w += tl.load(shifts + number).to(tl.float32)
    if factor is not None:
        w *= tl.load(factor + n)[:, None]
    if PAIRED:
        n = n // 16 * 8 + n % 8 + n % 16 // 8 * (N // 2)
    place = n.to(tl.int64)[:, None] * K + column_tile * TILE + column
    tl.store(y + place, w.to(y.dtype.element_ty))


def dequantize_packed(
    w: PackedWeights, out: Tensor | None = None, *, paired: bool = False, impl: Impl = "auto"
) -> Tensor:
    """bfloat16 [N, K]; `paired`: w has the order of `paired_rows`, the result has gate and up one after the other."""
    check_packed(w)
    n, k = w.shape
    if out is None:
        out = torch.empty(n, k, dtype=torch.bfloat16, device=w.tiles.device)
    check("out", out, dtypes=(torch.bfloat16,), shape=(n, k), beside=w.tiles, packed=True)
    offers = {"triton": needs_cuda(w.tiles), "reference": None}
    if choose("packed_matmul", impl, offers).impl == "reference":
        rows = packed_reference(w)
        return out.copy_(gate_then_up(rows) if paired else rows)
    kernel: Any = _dequantize_kernel
    kernel[(k // TILE, n // TILE)](
        *(w.tiles, w.scales, w.shifts, w.factor_N, out, n, k),
        KIND=w.kind,
        BITS=BITS[w.kind],
        GROUP=w.group,
        TILE=TILE,
        PAIRED=paired,
        num_warps=4,
    )
    return out


def gate_then_up(rows: Tensor) -> Tensor:
    """Back from `paired_rows`."""
    return rows.view(-1, 2, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def check_packed(w: PackedWeights) -> None:
    require(w.kind in BITS, "w.kind", " or ".join(BITS), repr(w.kind))
    shape = (None, None, TILE * TILE // 8 * BITS[w.kind])
    check("w.tiles", w.tiles, dtypes=(torch.uint8,), shape=shape, packed=True)
    n, k = w.shape
    require(n > 0 and k > 0, "w.tiles", "at least one tile", list(w.tiles.shape))
    kinds = (torch.bfloat16,) if w.small else FLOATS if w.shifts is None else (torch.float32,)
    shape = (*w.tiles.shape[:2], None) if w.small else (None, n)
    check("w.scales", w.scales, dtypes=kinds, shape=shape, beside=w.tiles, packed=True)
    if w.small:
        fits = w.scales.shape[2] in [TILE * TILE // group for group in SMALL_GROUPS]
        require(fits, "w.scales", f"groups of one of {SMALL_GROUPS} columns", list(w.scales.shape))
    else:
        fits = len(w.scales) > 0 and k % len(w.scales) == 0 and w.group % TILE == 0
        require(fits, "w.scales", f"groups of a multiple of {TILE} columns", list(w.scales.shape))
    floats = w.kind != "e2m1" or (w.small and w.shifts is None)
    require(floats, "w.kind", "e2m1 in small groups without shifts", f"groups of {w.group}")
    if w.shifts is not None:
        shape = tuple(w.scales.shape)
        check("w.shifts", w.shifts, dtypes=kinds, shape=shape, beside=w.tiles, packed=True)
    if w.factor_N is not None:
        check("w.factor", w.factor_N, dtypes=(torch.float32,), shape=(n,), beside=w.tiles, packed=True)  # fmt: skip
    if w.arrived is not None:
        check("w.arrived", w.arrived, dtypes=(torch.int32,), beside=w.tiles, packed=True)
        fewest = len(w.tiles) * (MOST_ROWS // FEW_ROWS)
        require(w.arrived.numel() >= fewest, "w.arrived", f"{fewest} counters", w.arrived.numel())
