"""Is this what the kernel was written for? Where it is not, a ValueError that names the argument.

A kernel given a wrong pointer reads whatever lies there, so every public function checks before it launches.
Nothing here looks at values: that would wait for the GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.few_rows import empty_rows

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)


def require(fine: bool, name: str, expected: str, value: object) -> None:
    if not fine:
        raise ValueError(f"{name}: wanted {expected}, got {value}")


def check(
    name: str,
    tensor: Tensor,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    beside: Tensor | None = None,
    packed: bool = False,
) -> Tensor:
    """`shape`: None where any size will do. `beside`: a tensor on whose device it has to be.

    What is wrong is put into words only if something is: a launch waits for this.
    """
    if not isinstance(tensor, Tensor):
        require(False, name, "a tensor", repr(tensor))
    if dtypes is not None and tensor.dtype not in dtypes:
        kinds = " or ".join(short(dtype) for dtype in dtypes)
        require(False, name, kinds, short(tensor.dtype))
    if shape is not None and not _fits(tensor.shape, shape):
        readable = [("*" if size is None else size) for size in shape]
        require(False, name, f"shape {_written(readable)}", _written(tensor.shape))
    if beside is not None and tensor.device != beside.device:
        require(False, name, f"a tensor on {beside.device}", tensor.device)
    if packed and not tensor.is_contiguous():
        require(False, name, "a contiguous tensor", f"strides {tensor.stride()}")
    return tensor


def as_rows(name: str, tensor: Tensor) -> Tensor:
    """The same memory as [rows, columns]: columns side by side, rows at one distance from another."""
    shape = tensor.shape
    require(len(shape) >= 1, name, "at least one dimension", "a scalar")
    columns = shape[-1]
    if columns == 0:
        require(False, name, "at least one column", f"shape {_written(shape)}")
    if columns > 1 and tensor.stride(-1) != 1 and tensor.numel():
        require(False, name, "stride 1 in the last dimension", tensor.stride())
    try:
        return tensor.view(-1, columns) if len(shape) != 2 else tensor
    except RuntimeError:
        expected = "rows at one distance from another"
        raise ValueError(f"{name}: wanted {expected}, got strides {tensor.stride()}") from None


def output(
    name: str,
    out: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    beside: Tensor,
) -> Tensor:
    """The caller's buffer, if it fits, or a new one."""
    if out is None:
        return empty_rows(shape, dtype, beside.device)
    check(name, out, dtypes=(dtype,), shape=shape, beside=beside)
    apart(name, as_rows(name, out))
    return out


def apart(name: str, buffer: Tensor) -> None:
    """An expanded tensor has one place for many elements: nothing can be written to it."""
    if 0 in buffer.stride() and any(
        step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)
    ):
        require(False, name, "a place of its own for each element", f"strides {buffer.stride()}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits(have: Sequence[int], pattern: Sequence[int | None]) -> bool:
    if have == pattern:
        return True
    return len(have) == len(pattern) and all(
        want is None or size == want for size, want in zip(have, pattern, strict=True)
    )


def _written(shape: Sequence[object]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
