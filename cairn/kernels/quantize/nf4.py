"""Weights in NF4 with double quantisation (QLoRA, arXiv:2305.14314): 4.127 bits each.

    64 values share a scale     value -> the nearest of 16 quantiles of a normal distribution, two to a byte, first high
    256 scales share a scale    scale - mean of all scales -> one of 256 levels of a "dynamic" map

The bytes are those of bitsandbytes. The kernel dequantises to the bits of the reference. Bytes moved by it, for each
value: half a byte and a 64th are read, and what a value takes in the result is written.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch

BLOCK, SCALES = 64, 256
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
TINY = 1e-38
PROGRAM = 32  # blocks that a program of the kernel reads
WARPS = 4


class NF4(NamedTuple):
    """A matrix in NF4; its scales are quantised as well."""

    packed: Tensor  # uint8, two values each
    scales: Tensor  # uint8, one for each block of values
    scale_of_scales: Tensor  # float32, one for each 256 scales
    mean: Tensor  # float32 scalar, of all scales
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales, self.scale_of_scales, self.mean)
        return sum(part.nbytes for part in parts)


def quantize_nf4(weight: Tensor) -> NF4:
    scaled, absmax = _scaled(weight.detach().float().flatten(), BLOCK)
    codes = _nearest(F.pad(scaled, (0, len(scaled) % 2)), _levels(weight.device))
    mean = absmax.mean()
    rest, scale_of_scales = _scaled(absmax - mean, SCALES)
    scales = _nearest(rest, dynamic_map(weight.device))
    packed = (codes[::2] << 4) | codes[1::2]
    return NF4(packed, scales, scale_of_scales, mean, tuple(weight.shape))


def dequantize_nf4_reference(nf4: NF4, dtype: torch.dtype) -> Tensor:
    levels = dynamic_map(nf4.packed.device)[nf4.scales.long()]
    absmax = levels * _repeated(nf4.scale_of_scales, SCALES, len(levels)) + nf4.mean
    codes = torch.stack([nf4.packed >> 4, nf4.packed & 15], dim=1).flatten()
    count = torch.Size(nf4.shape).numel()
    values = _levels(nf4.packed.device)[codes[:count].long()]
    return (values * _repeated(absmax, BLOCK, count)).reshape(nf4.shape).to(dtype)


@triton.jit(do_not_specialize=["count"])
def _dequantize_kernel(
    packed, scales, scale_of_scales, mean, levels, map_of_scales, out, count,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Some blocks, each with one scale. `EVEN`: no program has more than there are."""
    block, first = tl.arange(0, BLOCKS), tl.program_id(0) * BLOCKS
    there = first + block < tl.cdiv(count, BLOCK)
    code = tl.load(scales + first + block, mask=there, other=0).to(tl.int32)
    wide = tl.load(scale_of_scales + (first + block) // SCALES, mask=there, other=0.0)
    scale = (tl.load(map_of_scales + code) * wide + tl.load(mean))[:, None]
    start = first.to(tl.int64) * BLOCK
    at = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    inside = None if EVEN else start + 2 * at < count
    both = tl.load(packed + start // 2 + at, mask=inside).to(tl.int32)
    first_of_two, second = tl.load(levels + (both >> 4)), tl.load(levels + (both & 15))
    values = tl.interleave(first_of_two * scale, second * scale)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = None if EVEN else start + place < count
    tl.store(out + start + place, values.to(out.dtype.element_ty), mask=inside)


def dequantize_nf4(nf4: NF4, dtype: torch.dtype, impl: Impl = "auto") -> Tensor:
    """All values, in the shape that they had."""
    packed = check("packed", nf4.packed, dtypes=(torch.uint8,), shape=(None,), packed=True)
    require(dtype.is_floating_point, "dtype", "a floating-point type", dtype)
    count = torch.Size(nf4.shape).numel()
    require(len(packed) == blocks(count, 2), "packed", f"{blocks(count, 2)} bytes", len(packed))
    scales = blocks(count, BLOCK)
    for name, tensor, kind, shape in (
        ("scales", nf4.scales, torch.uint8, (scales,)),
        ("scale_of_scales", nf4.scale_of_scales, torch.float32, (blocks(scales, SCALES),)),
        ("mean", nf4.mean, torch.float32, ()),
    ):
        check(name, tensor, dtypes=(kind,), shape=shape, beside=packed, packed=True)
    offers = {"triton": needs_cuda(packed), "reference": None}
    if choose("dequantize_nf4", impl, offers).impl == "reference":
        return dequantize_nf4_reference(nf4, dtype)
    out = torch.empty(nf4.shape, dtype=dtype, device=packed.device)
    launch(
        _dequantize_kernel, blocks(scales, PROGRAM),
        packed, nf4.scales, nf4.scale_of_scales, nf4.mean, _levels(packed.device),
        dynamic_map(packed.device), out, count, BLOCKS=PROGRAM, BLOCK=BLOCK, SCALES=SCALES,
        EVEN=count % (PROGRAM * BLOCK) == 0, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@functools.cache
def dynamic_map(device: torch.device | str = "cpu") -> Tensor:
    """256 levels in [-1, 1], sorted: seven decades, of which each larger one is cut twice as finely."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        levels += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)


@functools.cache
def _levels(device: torch.device | str) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


def _scaled(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Values in [-1, 1], and the largest magnitude of each block; the last block may be short."""
    padded = F.pad(values, (0, -len(values) % block)).view(-1, block)
    absmax = padded.abs().amax(1)
    scaled = padded * (1.0 / absmax.clamp(min=TINY))[:, None]
    return scaled.clamp(-1, 1).flatten()[: len(values)], absmax


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)


def _repeated(scales: Tensor, block: int, count: int) -> Tensor:
    return scales.repeat_interleave(block)[:count]


def cost(values: int) -> Cost:
    """Cost of dequantising 4 bits to 16."""
    return Cost(2.0 * values, values * (0.5 + 1 / BLOCK + 2))
