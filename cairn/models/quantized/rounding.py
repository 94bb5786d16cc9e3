"""Rounds a matrix to the levels of a scheme: float weights in, planes out.

    scale of a group = its largest magnitude / the largest level        level = nearest to w / scale

`SCHEMES` names the grids that checkpoints are written in. Whatever rounds (round to nearest, GPTQ, training with fake
quantisation) takes its scales and levels from here, so that what was measured is what a file holds. Scales are
rounded to the type that the file stores before any level is chosen.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.quantized.planes import E2M1, Activations, Kind, Planes, dequantized

LARGEST_FP8 = 448.0
LARGEST_E2M1 = 6.0
SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class QuantizationGrid:
    """Quantization grid: its levels and the number of weights per scale."""

    kind: Kind
    group: int = 0  # columns that share a scale; 0: all of a row
    block_rows: int = 1  # rows that share a scale
    symmetric: bool = True  # int4: zero is level 8; else it has a level of its own for each group
    activations: Activations = "float"


SCHEMES: dict[str, QuantizationGrid] = {
    "w4a16": QuantizationGrid("int4", 128),
    "w8a8": QuantizationGrid("int8", activations="token"),
    "fp8": QuantizationGrid("fp8", activations="token"),
    "fp8-block": QuantizationGrid("fp8", 128, 128, activations="group"),
    "mxfp4": QuantizationGrid("mxfp4", 32),
    "nvfp4": QuantizationGrid("nvfp4", 16),
    "q8_0": QuantizationGrid("int8", 32),
    "q4_0": QuantizationGrid("int4", 32),
}
# Files of these schemes are GGUF; the others are written as compressed-tensors.
GGUF_SCHEMES = ("q8_0", "q4_0")


class Steps(NamedTuple):
    """Scales and shifts of a matrix, [ceil(N / block_rows), ceil(K / group)], float32."""

    scales: Tensor
    shifts: Tensor | None = None
    global_scale: float | None = None  # nvfp4: scales are e4m3 numbers divided by it


def fitted(
    scheme: str, widths: list[int], group: int | None = None
) -> tuple[QuantizationGrid, str | None]:
    """The grid of a scheme for matrices with so many columns, and a note where its group was made smaller."""
    grid = SCHEMES[scheme]
    if group is not None and (group < 8 or grid.kind != "int4" or scheme in GGUF_SCHEMES):
        raise ConfigError(
            f"scheme {scheme} has no groups of {group}",
            hint="--group is for w4a16: 32, 64 or 128",
        )
    wanted = group or grid.group
    odd = [k for k in widths if wanted and k % wanted]
    if not odd:
        return replace(grid, group=wanted), None
    fits = next((g for g in (128, 64, 32, 16) if not any(k % g for k in widths)), None)
    if group is not None or fits is None or grid.kind != "int4" or scheme in GGUF_SCHEMES:
        raise ConfigError(
            f"groups of {wanted} do not divide rows of {_listed(odd)} values",
            hint=f"use --group {fits}"
            if fits and scheme == "w4a16"
            else "use --scheme w8a8 or fp8",
        )
    note = f"group {fits} because {wanted} does not divide rows of {odd[0]} values"
    return replace(grid, group=fits), note


def _listed(widths: list[int]) -> str:
    return " and ".join(str(width) for width in sorted(set(widths)))


def rounded(w_NK: Tensor, grid: QuantizationGrid, stored: torch.dtype = torch.float32) -> Planes:
    """Each weight to its nearest level; `stored`: the type of scales in the file."""
    return with_levels(w_NK, steps_of(w_NK, grid, stored), grid)


def fake_quantized(
    w_NK: Tensor, grid: QuantizationGrid, stored: torch.dtype = torch.float32
) -> Tensor:
    """The weights that a file of this grid would hold, in their own type."""
    return dequantized(rounded(w_NK.detach(), grid, stored), w_NK.dtype)


def with_levels(w_NK: Tensor, steps: Steps, grid: QuantizationGrid) -> Planes:
    """The nearest levels at given scales."""
    rows, columns = w_NK.shape
    scale_NK = spread_steps(steps.scales, grid, rows, columns)
    shift_NK = None
    if steps.shifts is not None:
        shift_NK = spread_steps(steps.shifts, grid, rows, columns)
    levels_NK = nearest_levels(w_NK.float(), scale_NK, shift_NK, grid)
    return planes_of(levels_NK, steps, grid)


def planes_of(levels_NK: Tensor, steps: Steps, grid: QuantizationGrid) -> Planes:
    shifts = steps.shifts
    if grid.kind == "int4" and shifts is None:
        shifts = -8.0 * steps.scales
    return Planes(
        kind=grid.kind,
        levels_NK=levels_NK,
        scales=steps.scales,
        shifts=shifts,
        group=grid.group or levels_NK.shape[1],
        block_rows=grid.block_rows,
        activations=grid.activations,
        global_scale=steps.global_scale,
    )


def steps_of(
    w_NK: Tensor, grid: QuantizationGrid, stored: torch.dtype, global_scale: float | None = None
) -> Steps:
    """Scales that cover the largest weight of each group. `global_scale`: nvfp4's, where it is known already."""
    if grid.kind == "int4" and not grid.symmetric:
        return _asymmetric(w_NK, grid, stored)
    most = _blocks(w_NK.abs().float(), grid).amax(dim=(1, 3))
    if grid.kind == "nvfp4":
        if global_scale is None:
            largest = float(most.max())
            global_scale = LARGEST_FP8 * LARGEST_E2M1 / largest if largest > 0 else 1.0
            global_scale = float(torch.tensor(global_scale))  # a file holds it in float32
        narrow = (most / LARGEST_E2M1 * global_scale).clamp(SMALLEST_E4M3, LARGEST_FP8)
        scales = narrow.to(torch.float8_e4m3fn).float() / global_scale
        return Steps(scales, None, global_scale)
    if grid.kind == "mxfp4":
        # A power of two that leaves the largest weight at 3.5 to 7 steps: beyond 6 it is cut.
        exponent = (most * (8 / 7)).clamp(min=2.0**-100).log2().floor() - 2
        return Steps(exponent.exp2())
    largest_level = {"int4": 7.5, "int8": 127.0, "fp8": LARGEST_FP8}[grid.kind]
    return Steps(_storable(most / largest_level, stored))


def nearest_levels(
    w: Tensor, scale: Tensor, shift: Tensor | None, grid: QuantizationGrid
) -> Tensor:
    """Levels as planes store them; all arguments broadcast against each other."""
    x = w / scale
    if grid.kind == "int4":
        zero = 8.0 if shift is None else -shift / scale
        return (x + zero).round_().clamp_(0, 15).to(torch.uint8)
    if grid.kind == "int8":
        return x.round_().clamp_(-127, 127).to(torch.int8)
    if grid.kind == "fp8":
        return x.clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return _e2m1_codes(x)


def rounded_activations(x_MK: Tensor, grid: QuantizationGrid) -> Tensor:
    """Input of a matmul with this grid: x rounded to 8 bits by token or by group of columns, or x itself."""
    if grid.activations == "float":
        return x_MK
    wide = x_MK.float()
    if grid.activations == "group":
        groups = F.pad(wide, (0, -wide.shape[1] % 128)).unflatten(1, (-1, 128))
        return _to_8_bits(groups, grid.kind).flatten(1)[:, : wide.shape[1]].to(x_MK.dtype)
    return _to_8_bits(wide, grid.kind).to(x_MK.dtype)


def spread_steps(plane: Tensor, grid: QuantizationGrid, rows: int, columns: int) -> Tensor:
    """Expand a plane to one value for each weight, or for each row if a row shares one."""
    wide = plane if grid.block_rows == 1 else plane.repeat_interleave(grid.block_rows, 0)[:rows]
    group = grid.group or columns
    return wide if group >= columns else wide.repeat_interleave(group, 1)[:, :columns]


def sum_of_blocks(w_NK: Tensor, grid: QuantizationGrid) -> Tensor:
    """The sum over the weights that share a scale, in the form that scales have."""
    return _blocks(w_NK, grid).sum(dim=(1, 3))


def _to_8_bits(x: Tensor, kind: Kind) -> Tensor:
    most = x.abs().amax(-1, keepdim=True)
    scale = (most / (127.0 if kind == "int8" else LARGEST_FP8)).clamp(min=1e-12)
    if kind == "int8":
        return (x / scale).round_() * scale
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _asymmetric(w_NK: Tensor, grid: QuantizationGrid, stored: torch.dtype) -> Steps:
    blocks = _blocks(w_NK.float(), grid)
    low, high = blocks.amin(dim=(1, 3)).clamp(max=0), blocks.amax(dim=(1, 3)).clamp(min=0)
    scales = _storable((high - low) / 15, stored)
    zeros = (-low / scales).round().clamp(0, 15)
    return Steps(scales, -zeros * scales)


def _blocks(w_NK: Tensor, grid: QuantizationGrid) -> Tensor:
    """[N / block_rows, block_rows, K / group, group], padded with zeros."""
    rows, columns = w_NK.shape
    group = grid.group or columns
    w = F.pad(w_NK, (0, -columns % group, 0, -rows % grid.block_rows))
    return w.view(-1, grid.block_rows, w.shape[1] // group, group)


def _storable(scales: Tensor, stored: torch.dtype) -> Tensor:
    """Scales rounded to the stored dtype; a group of zeros gets scale 1."""
    tiny = torch.finfo(stored).tiny
    return torch.where(scales > 0, scales.clamp(min=tiny), 1.0).to(stored).float()


def _e2m1_codes(x: Tensor) -> Tensor:
    """Nearest of the 16 values; a tie goes to the even code."""
    values = torch.tensor(E2M1, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs()
    code = torch.bucketize(size, middles)  # a tie stays below ...
    tie = (code < 7) & (size == middles[code.clamp(max=6)]) & (code % 2 == 1)
    code = code + tie.long()  # ... unless the code above is the even one
    negative = (x < 0) & (code > 0)  # there is one zero
    return (code + 8 * negative.long()).to(torch.uint8)
