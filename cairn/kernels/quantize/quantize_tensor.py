"""fp8 (e4m3) with one float32 scale for a whole tensor: value = stored * scale.

The scale is given, or the smallest one that fits the largest magnitude. Finding that takes a pass of its own: each
program notes the largest magnitude it has seen, and the programs of the second pass read all these notes, so two
launches suffice and nothing depends on their order. What a given scale cannot reach saturates. Bytes moved per
element of a 16-bit tensor: 3 with a given scale, 5 without.

The kernels' result equals the reference bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch, multiprocessors, width
from cairn.kernels.quantize.quantize import (
    FP8_LIMIT,
    LIMITS,
    SMALLEST,
    SMALLEST_LARGEST,
    Quantized,
    by_largest,
    filled,
    fp8_scaled,
    rounded,
)
from cairn.kernels.tuned import tuned

DEFAULT = {"block": 8192, "warps": 8, "stages": 1, "per_sm": 4}


def quantize_tensor_reference(x: Tensor, scale: Tensor | None = None) -> Quantized:
    if scale is None:
        largest = x.float().abs().amax() if x.numel() else torch.zeros((), device=x.device)
        return by_largest(x.float(), largest, torch.float8_e4m3fn)
    return Quantized(rounded(x.float() * scale.reciprocal(), torch.float8_e4m3fn), scale)


@triton.jit
def largest_kernel(x, largest, elements, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The largest magnitude that each program has seen."""
    seen = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in tl.range(start, elements, step, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        y = tl.load(x + at, mask=at < elements, other=0.0).to(tl.float32)
        seen = tl.maximum(seen, tl.abs(y))
    tl.store(largest + tl.program_id(0), tl.max(seen))


@triton.jit
def factor_of(scale, largest, parts, LIMIT: tl.constexpr, PARTS: tl.constexpr):
    """What values are multiplied by. PARTS 0: by the given scale; otherwise by the largest of all programs of the
    pass before, and the first program writes the scale."""
    if PARTS == 0:
        return tl.div_rn(1.0, tl.load(scale))
    else:
        part = tl.arange(0, PARTS)
        notes = tl.load(largest + part, mask=part < parts, other=0.0)
        whole = tl.maximum(tl.max(notes), SMALLEST_LARGEST)
        if tl.program_id(0) == 0:
            tl.store(scale, tl.div_rn(whole, LIMIT))
        return tl.div_rn(LIMIT, whole)


@triton.jit(do_not_specialize=["parts"])
def _quantize_tensor_kernel(
    x, values, scale, largest, elements, parts,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    factor = factor_of(scale, largest, parts, FP8_LIMIT, PARTS)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in tl.range(start, elements, step, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        y = tl.load(x + at, mask=at < elements, other=0.0).to(tl.float32)
        tl.store(values + at, fp8_scaled(y, factor), mask=at < elements)


def quantize_tensor(
    x: Tensor, scale: Tensor | None = None, out: Quantized | None = None, impl: Impl = "auto"
) -> Quantized:
    """fp8 with one scale for all: the given one (float32, one element) or the smallest that fits."""
    check("x", x, dtypes=FLOATS, packed=True)
    if scale is not None:
        check("scale", scale, dtypes=(torch.float32,), beside=x)
        require(scale.numel() == 1, "scale", "one element", tuple(scale.shape))
    quantized = _tensor_output(x, scale, out)
    if (
        choose("quantize_tensor", impl, {"triton": needs_cuda(x), "reference": None}).impl
        == "reference"
    ):
        return filled(quantized, quantize_tensor_reference(x, scale))
    if x.numel():
        _launch(x, quantized, dynamic=scale is None)
    elif scale is None:  # as if all of it were 0
        quantized.scale.fill_(SMALLEST / LIMITS[torch.float8_e4m3fn])
    return quantized


def _launch(x: Tensor, quantized: Quantized, dynamic: bool) -> None:
    how = tuned("quantize_tensor", short(x.dtype), DEFAULT)
    most = how["per_sm"] * multiprocessors(x.device)
    programs = min(blocks(x.numel(), how["block"]), most)
    meta = {"BLOCK": how["block"], "STAGES": how["stages"], "num_warps": how["warps"]}
    parts, largest = 0, quantized.scale
    if dynamic:
        parts, largest = programs, torch.empty(programs, dtype=torch.float32, device=x.device)
        launch(largest_kernel, programs, x, largest, x.numel(), **meta)
    arguments = (x, quantized.values, quantized.scale, largest, x.numel(), parts)
    padded = width(parts) if dynamic else 0
    launch(_quantize_tensor_kernel, programs, *arguments, PARTS=padded, **meta)


def _tensor_output(x: Tensor, scale: Tensor | None, out: Quantized | None) -> Quantized:
    values, scale_out = out or (None, None)
    values = output("out.values", values, x.shape, torch.float8_e4m3fn, x)
    check("out.values", values, packed=True)
    if scale is not None:
        return Quantized(values, scale)
    if scale_out is None:
        return Quantized(values, torch.empty((), dtype=torch.float32, device=x.device))
    check("out.scale", scale_out, dtypes=(torch.float32,), beside=x)
    require(scale_out.numel() == 1, "out.scale", "one element", tuple(scale_out.shape))
    return Quantized(values, scale_out)


def cost(elements: int, dynamic: bool, bytes_in: int = 2) -> Cost:
    return Cost(flops=3 * elements, bytes=elements * ((2 if dynamic else 1) * bytes_in + 1))
