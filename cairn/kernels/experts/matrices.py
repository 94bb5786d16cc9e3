"""The matrices of all experts in the forms that the grouped products multiply with.

    Tensor [E, N, K]   bfloat16 or float16
    Fp8Experts         float8 e4m3 with a float32 scale for each row; activations are float8 rows, too
    Mxfp4Experts       4-bit floats (e2m1), 32 of which share a power of two; activations stay as they are

Two codes lie in a byte so that a tile of 128 columns is unpacked without moving numbers between threads: byte j of a
tile has column j in its low half and column 64 + j in its high half. Columns are padded to whole tiles with zeros.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

GROUP = 32  # columns that share a scale in MXFP4
TILE = 128  # columns that are packed together
HIGHEST = 128  # exponent of a scale, from which on the kernel's factor would not be finite
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Fp8Experts(NamedTuple):
    values_ENK: Tensor
    scale_EN: Tensor  # float32

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, columns = self.values_ENK.shape
        return count, rows, columns

    @property
    def nbytes(self) -> int:
        return self.values_ENK.nbytes + self.scale_EN.nbytes


class Mxfp4Experts(NamedTuple):
    packed_ENB: Tensor  # uint8, half as many as columns with their padding
    scale_EGN: (
        Tensor  # uint8 exponents, 127 is 1; groups lie outside so that rows are read side by side
    )
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, _ = self.packed_ENB.shape
        return count, rows, self.columns

    @property
    def nbytes(self) -> int:
        return self.packed_ENB.nbytes + self.scale_EGN.nbytes


ExpertMatrices: TypeAlias = "Tensor | Fp8Experts | Mxfp4Experts"


def quantize_experts(w_ENK: Tensor) -> Fp8Experts:
    """Each row by its largest value, one expert after another so that little is held twice."""
    from cairn.kernels.quantize.quantize import quantize

    made = [quantize(w_NK.contiguous()) for w_NK in w_ENK]
    return Fp8Experts(
        torch.stack([one.values for one in made]),
        torch.stack([one.scale.flatten() for one in made]),
    )


def pack_mxfp4(codes_ENK: Tensor, scale_ENG: Tensor) -> Mxfp4Experts:
    """`codes_ENK`: uint8 0..15, the highest bit is the sign; `scale_ENG`: uint8, an exponent for each 32 columns."""
    columns = codes_ENK.shape[2]
    tiles = -(-columns // TILE)
    padded = torch.nn.functional.pad(codes_ENK, (0, tiles * TILE - columns))
    low, high = padded.unflatten(-1, (tiles, 2, TILE // 2)).unbind(-2)
    missing = tiles * TILE // GROUP - scale_ENG.shape[2]
    scale = torch.nn.functional.pad(scale_ENG, (0, missing), value=127)
    return Mxfp4Experts(
        (low | high << 4).flatten(-2).contiguous(), scale.transpose(1, 2).contiguous(), columns
    )


def round_mxfp4(w_ENK: Tensor) -> Mxfp4Experts:
    """The nearest codes of floating-point matrices; the exponent is that of the largest value, less e2m1's own 2."""
    made = [_round_matrix(w_NK.float()) for w_NK in w_ENK]
    codes, scales = zip(*made, strict=True)
    return pack_mxfp4(torch.stack(codes), torch.stack(scales))


def _round_matrix(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    columns = w_NK.shape[1]
    w_NGV = torch.nn.functional.pad(w_NK, (0, -columns % GROUP)).unflatten(-1, (-1, GROUP))
    largest_NG = w_NGV.abs().amax(-1).clamp(min=2.0**-100)
    exponent_NG = (largest_NG.log2().floor() - 2).clamp(-126, HIGHEST - 127)
    scaled_NGV = w_NGV / torch.exp2(exponent_NG)[..., None]
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=w_NK.device)
    codes_NGV = torch.bucketize(scaled_NGV.abs(), bounds).to(torch.uint8)
    codes_NGV |= (scaled_NGV < 0).to(torch.uint8) << 3
    return codes_NGV.flatten(1)[:, :columns], (exponent_NG + 127).to(torch.uint8)


def dequantized(w: ExpertMatrices, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that a form stands for, [E, N, K]."""
    if isinstance(w, Tensor):
        return w.to(dtype)
    if isinstance(w, Fp8Experts):
        return (w.values_ENK.float() * w.scale_EN[..., None]).to(dtype)
    tiles = w.packed_ENB.unflatten(-1, (-1, TILE // 2))
    codes_ENK = torch.stack((tiles & 15, tiles >> 4), dim=-2).flatten(-3)[..., : w.columns].int()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes_ENK.device)
    power_EGN = torch.exp2(w.scale_EGN.float() - 127)
    power_ENK = power_EGN.transpose(1, 2).repeat_interleave(GROUP, -1)[..., : w.columns]
    return (table[codes_ENK] * power_ENK).to(dtype)
