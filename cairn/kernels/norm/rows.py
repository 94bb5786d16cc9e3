"""Layouts of tensor rows over the programs of a kernel.

Row-wise kernels (norms, activations, quantisation) share one form: a program holds `rows` whole rows in
registers, works on them and steps on until none is left.

    per_sm = 0    as many programs as there are groups of rows: one step each, the hardware keeps the SMs full
    per_sm = n    n programs per multiprocessor stay and step: weights are loaded once, sums are written once,
                  and `stages` - 1 groups are on their way through shared memory while one is worked on

A layout depends on the width of a row and on its type, never on how many rows there are: a row's result is the
same whatever else is in the batch. Which layout is fastest is for the tuned tables to say.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import short
from cairn.kernels.kernel import Variant
from cairn.kernels.tuned import shipped, tuned

INTERPRETED_PROCESSORS = 3  # on a CPU: so few that every loop turns
WIDEST = 32768  # columns that fit the registers of one program


# 32 columns are 128 bytes of each part, a whole cache line; with 128 parts at once few trips remain.
PARTS_BLOCK = {"PARTS": 128, "WIDTH": 32}


class Layout(NamedTuple):
    rows: int = 1
    warps: int = 4
    stages: int = 1
    per_sm: int = 0

    def programs(self, rows: int, device: torch.device) -> int:
        groups = blocks(rows, self.rows)
        return min(groups, self.per_sm * multiprocessors(device)) if self.per_sm else groups


def layout(kernel: str, form: str, columns: int, dtype: torch.dtype, default: Layout) -> Layout:
    """The tuned layout for this GPU, or the default."""
    return Layout(**tuned(kernel, key(form, columns, dtype), default._asdict()))


def key(form: str, columns: int, dtype: torch.dtype) -> str:
    return f"{form},columns={columns},{short(dtype)}"


def shipped_layouts(kernel: str) -> Iterator[tuple[str, int, Layout]]:
    """The form, the columns and the layout of each entry that ships in a tuned table."""
    for entry, how in shipped(kernel):
        form, _, columns = entry.partition(",columns=")
        if columns:
            yield form, int(columns.partition(",")[0]), Layout(**how)


def default_layout(columns: int) -> Layout:
    """A program for each row, 32 columns for each of its threads: 64 bytes of 16-bit numbers in flight."""
    return Layout(warps=max(1, min(width(columns) // 1024, 32)))


def packed_layout(columns: int) -> Layout:
    """The same with several narrow rows for each program: 131,072 rows of 768 columns are twice as fast on an H200."""
    rows = max(1, 4096 // width(columns))
    return Layout(rows, default_layout(rows * columns).warps)


def summing_layout(columns: int) -> Layout:
    """Layout for kernels that also sum over rows: few programs, because each writes its sums; their rows are on the way
    ahead of time, as far as shared memory goes. 16 columns for each thread leave registers for the sums."""
    warps = max(1, min(width(columns) // 512, 32))
    stages = 3 if columns <= 8192 else 2 if columns <= 16384 else 1
    return Layout(1, warps, stages, per_sm=max(1, 16 // warps))


def candidates(columns: int) -> list[dict[str, int]]:
    """Candidates for tuning kernels that read a row, reduce it and write it."""
    full = default_layout(columns).warps
    ideas = [
        Layout(1, full),
        Layout(1, max(1, full // 2)),
        Layout(1, min(2 * full, 32)),
        Layout(2, min(2 * full, 32)),
        Layout(4, min(4 * full, 32)),
        Layout(1, full, 3, 8192 // width(columns) * 2 or 1),
        Layout(1, min(2 * full, 32), 3, 16384 // width(columns) or 1),
        Layout(2, min(2 * full, 32), 2, 8192 // width(columns) or 1),
    ]
    fit = [idea for idea in ideas if idea.rows * width(columns) <= 64 * 32 * idea.warps]
    return [idea._asdict() for idea in dict.fromkeys(fit)]


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Start a one-dimensional grid; triton's own types do not know what a launch takes."""
    kernel[(programs,)](*arguments, **options)


def width(columns: int) -> int:
    """Blocks have sizes that are powers of two; what is beyond the columns is masked."""
    return 1 << (columns - 1).bit_length()


def blocks(count: int, size: int) -> int:
    """Number of blocks of a size that cover a count."""
    return -(-count // size)


def too_wide(columns: int) -> str | None:
    return None if columns <= WIDEST else f"{columns} columns do not fit one program ({WIDEST})"


@triton.jit
def shared_row(pointer, column, inside):
    """Weights that multiply every row: to stay in the cache while rows stream through it.

    A program with one group of rows asks for them when it has done its sums: as long as the rows are on their way
    the registers are free, and more programs fit. One that goes on to other rows asks once.
    """
    return tl.load(pointer + column, mask=inside, other=0.0, eviction_policy="evict_last")


@functools.lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["parts"])
def _sum_parts_kernel(
    parts_pointer, total, parts, COLUMNS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = column < COLUMNS
    sums = tl.zeros([PARTS, WIDTH], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        mask = (part < parts)[:, None] & inside[None, :]
        sums += tl.load(parts_pointer + at, mask=mask, other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=inside)


def sum_parts(parts_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the programs' float32 sums, always in the same order."""
    parts, columns = parts_PD.shape
    total_D = torch.empty(columns, dtype=dtype, device=parts_PD.device)
    programs = blocks(columns, PARTS_BLOCK["WIDTH"])
    launch(_sum_parts_kernel, programs, parts_PD, total_D, parts, COLUMNS=columns, **PARTS_BLOCK)
    return total_D


SUM_PARTS = Variant(
    "sum of parts 4096",
    _sum_parts_kernel,
    {"parts_pointer": "*fp32", "total": "*bf16", "parts": "i32"},
    {"COLUMNS": 4096, **PARTS_BLOCK},
    aligned=("parts_pointer", "total"),
)
