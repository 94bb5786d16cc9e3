"""Times small Triton kernels, some with one fault, and writes what a reader of Nsight Compute looks at first.

    python -m cairn.labs.evidence.make_kernels FOLDER     one kernel-X.txt for each; needs a GPU

Durations are CUDA events; registers, spills and shared memory are the compiler's; occupancy and waves are arithmetic
over them. No hardware counter is read, so "useful bytes" are those that the task needs, not those that were moved.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from cairn.hw.timing import measure
from cairn.kernels.tooling.machine_code import WARPS_PER_SM, occupancy


class Launch(NamedTuple):
    """A kernel that ran: what its task needs, and what the compiler gave it."""

    task: str
    useful_bytes: float
    useful_flops: float
    blocks: int
    warps: int  # of one block
    registers: int  # of one thread
    spilled: int  # 32-bit values of one thread that do not fit into registers
    shared_bytes: int  # of one block


@triton.jit
def doubled(x_ptr, out_ptr, rows, columns, ALONG_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if not ALONG_ROWS:  # neighbouring lanes take neighbouring rows
        place = (place % rows) * columns + place // rows
    tl.store(out_ptr + place, 2 * tl.load(x_ptr + place))


@triton.jit
def product(a_ptr, b_ptr, c_ptr, N, M: tl.constexpr, K: tl.constexpr):  # noqa: ANN001, ANN201
    """C = A B of N x N matrices, one M x M tile of C for each block; N is a multiple of both."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * M + tl.arange(0, M)
    depth = tl.arange(0, K)
    sums = tl.zeros((M, M), tl.float32)
    for start in range(0, N, K):
        a = tl.load(a_ptr + rows[:, None] * N + start + depth[None, :])
        b = tl.load(b_ptr + (start + depth)[:, None] * N + columns[None, :])
        sums = tl.dot(a, b, sums)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], sums.to(tl.bfloat16))


@triton.jit
def row_sum(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    row, sums = tl.program_id(0).to(tl.int64), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        sums += tl.load(x_ptr + row * columns + start + tl.arange(0, BLOCK))
    tl.store(out_ptr + row, tl.sum(sums))


# Arguments of kernels are Triton's business: numbers where they say constexpr, options of a launch.
_DOUBLED: Any = doubled
_PRODUCT: Any = product
_ROW_SUM: Any = row_sum


def double_all(
    along_rows: bool, device: str, rows: int = 1 << 22
) -> tuple[Launch, Callable[[], Any]]:
    columns, block, warps = 64, 1024, 4
    x = torch.ones(rows, columns, device=device)
    out = torch.empty_like(x)
    blocks = x.numel() // block

    def call() -> Any:
        return _DOUBLED[(blocks,)](x, out, rows, columns, along_rows, block, num_warps=warps)

    task = f"out = 2 x over a row-major matrix of {rows} x {columns} float32"
    return _launched(call, task, 2.0 * x.numel() * 4, x.numel(), blocks, warps), call


def multiply(tile: int, warps: int, device: str, n: int = 4096) -> tuple[Launch, Callable[[], Any]]:
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    c, grid = torch.empty_like(a), (n // tile, n // tile)

    def call() -> Any:
        return _PRODUCT[grid](a, b, c, n, tile, 64, num_warps=warps, num_stages=3)

    task = f"C = A B of {n} x {n} bf16, tiles of {tile} x {tile} x 64"
    return _launched(call, task, 3.0 * n * n * 2, 2.0 * n**3, grid[0] * grid[1], warps), call


def sum_rows(rows: int, device: str, columns: int = 1 << 22) -> tuple[Launch, Callable[[], Any]]:
    x, out, warps = torch.ones(rows, columns, device=device), torch.empty(rows, device=device), 8

    def call() -> Any:
        return _ROW_SUM[(rows,)](x, out, columns, 4096, num_warps=warps)

    task = f"sum of each row of {rows} x {columns} float32, one block for a row"
    return _launched(call, task, 4.0 * x.numel(), x.numel(), rows, warps), call


def _launched(
    call: Callable[[], Any], task: str, moved: float, flops: float, blocks: int, warps: int
) -> Launch:
    built = call()
    registers, spilled = built.n_regs, built.n_spills
    shared = built.metadata.shared
    return Launch(task, moved, flops, blocks, warps, registers, spilled, shared)


def page(launch: Launch, seconds: float, multiprocessors: int, device: str) -> str:
    """The sections that Nsight Compute shows first: speed of light, launch, occupancy."""
    room = occupancy(launch.registers, launch.shared_bytes, launch.warps)
    waves = launch.blocks / max(1, room.blocks * multiprocessors)
    lines = [
        f"one Triton kernel on {device}, by CUDA events and the compiler's report; no hardware counters",
        launch.task,
        "",
        f"duration                      {seconds * 1e6:>14,.1f} us",
        f"useful bytes                  {launch.useful_bytes / 1e6:>14,.1f} MB",
        f"useful bandwidth              {launch.useful_bytes / seconds / 1e9:>14,.1f} GB/s",
        f"useful rate                   {launch.useful_flops / seconds / 1e12:>14,.2f} TFLOP/s",
        "",
        f"blocks                        {launch.blocks:>14,}",
        f"threads of a block            {launch.warps * 32:>14,}",
        f"multiprocessors               {multiprocessors:>14,}",
        f"waves                         {waves:>14,.2f}",
        "",
        f"registers of a thread         {launch.registers:>14,}",
        f"values spilled by a thread    {launch.spilled:>14,}",
        f"shared memory of a block      {launch.shared_bytes / 1024:>14,.1f} KiB",
        f"warps that a multiprocessor holds {room.warps:>10,} of {WARPS_PER_SM}, limited by {room.limit}",
    ]
    return "\n".join(lines) + "\n"


KERNELS: dict[str, Callable[[str], tuple[Launch, Callable[[], Any]]]] = {
    "kernel-a": lambda device: double_all(True, device),
    "kernel-b": lambda device: double_all(False, device),
    "kernel-c": lambda device: multiply(128, 8, device),
    "kernel-d": lambda device: multiply(256, 8, device),
    "kernel-e": lambda device: sum_rows(8, device),
}


def main(folder: Path) -> None:
    device = torch.device("cuda:0")
    about = torch.cuda.get_device_properties(device)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in KERNELS.items():
        launch, call = make(str(device))
        seconds = measure(call, device=str(device), budget_ms=200).median_s
        text = page(launch, seconds, about.multi_processor_count, about.name)
        (folder / f"{name}.txt").write_text(text)
        print(f"{name} {seconds * 1e6:.1f} us", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
