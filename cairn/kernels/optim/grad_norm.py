"""The length of all gradients together, and the factor that clips it.

    square_sum   sum of squares of many tensors, float32, on the GPU
    clip_scale   norm = sqrt(sum); factor = min(1, max_norm / norm)

Deterministic: each of a fixed number of programs sums its chunks in order, and one program adds up these sums. The
host never waits: the factor stays on the GPU, where adamw reads it. Between the two functions is the place to sum
over ranks. Bytes moved: each gradient once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import launch, multiprocessors, width
from cairn.kernels.optim.tensor_table import CHUNK, check_roles, pointer, size_of, tables
from cairn.kernels.tuned import tuned

DEFAULT = {"block": 4096, "warps": 4, "stages": 1, "per_sm": 8}


def square_sum_reference(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([grad.double().square().sum() for grad in grads]).sum().float()


def clip_scale(square_sum: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm, and what gradients are to be multiplied by: NaN, which skips a step, if the norm is not finite."""
    check("square_sum", square_sum, dtypes=(torch.float32, torch.float64))
    require(square_sum.numel() == 1, "square_sum", "one element", tuple(square_sum.shape))
    require(max_norm > 0, "max_norm", "above 0", max_norm)
    norm = square_sum.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, torch.where(norm.isfinite(), scale, torch.nan)


@triton.jit(do_not_specialize=["tensors", "chunks"])
def _squares_kernel(
    addresses, sizes, tensor_of, chunk_of, sums, tensors, chunks,
    dtype: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK], tl.float32)
    for program in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor = tl.load(tensor_of + program)
        size = size_of(sizes, tensor, ALIGNED)
        grad = pointer(addresses, 0, tensors, tensor, dtype, ALIGNED)
        start = tl.load(chunk_of + program).to(tl.int64) * CHUNK
        left = tl.minimum(size - start, CHUNK).to(tl.int32)
        for first in tl.range(0, left, BLOCK, num_stages=STAGES):
            at = start + first + tl.arange(0, BLOCK)
            g = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
            total += g * g
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit(do_not_specialize=["count"])
def _total_kernel(sums, total, count, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(total, tl.sum(tl.load(sums + at, mask=at < count, other=0.0)))


def square_sum(grads: Sequence[Tensor], impl: Impl = "auto") -> Tensor:
    """Sum of the squares of all elements, float32 []."""
    require(len(grads) > 0, "grads", "at least one tensor", "none")
    check("grads[0]", grads[0], dtypes=FLOATS)
    chosen = choose("grad_norm", impl, {"triton": needs_cuda(grads[0]), "reference": None})
    if chosen.impl == "reference":
        check_roles({"grads": grads})
        return square_sum_reference(grads)
    return _launch(grads)


def _launch(grads: Sequence[Tensor]) -> Tensor:
    how = tuned("grad_norm", short(grads[0].dtype), DEFAULT)
    device = grads[0].device
    most = how["per_sm"] * multiprocessors(device)
    over = tables(grads=grads)
    programs = [min(table.chunks, most) for table in over]
    sums = torch.empty(sum(programs), dtype=torch.float32, device=device)
    for table, count, part in zip(over, programs, sums.split(programs), strict=True):
        launch(
            _squares_kernel, count, table.addresses, table.sizes, table.tensor_of, table.chunk_of,
            part, len(table.sizes), table.chunks, dtype=TYPES[grads[0].dtype], CHUNK=CHUNK,
            ALIGNED=table.aligned, BLOCK=how["block"], STAGES=how["stages"],
            num_warps=how["warps"],
        )  # fmt: skip
    total = torch.empty((), dtype=torch.float32, device=device)
    launch(_total_kernel, 1, sums, total, len(sums), WIDTH=width(max(len(sums), 1)))
    return total


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cost(elements: int, element_bytes: int = 4) -> Cost:
    return Cost(2 * elements, elements * element_bytes)
