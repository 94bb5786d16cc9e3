"""Checks and conversions of tensors for the collectives: flat, contiguous, detached, one for each rank.

Invalid arguments raise before anything is sent, so a mistake that all ranks make alike does not stop the group.
"""

from collections.abc import Sequence

import torch

from cairn.labs.torch_backend.errors import CommError
from cairn.labs.torch_backend.wire import DTYPES

Tensors = list[torch.Tensor]


def vector(operation: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor, or a flat copy."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise CommError(
            f"{operation}: a {tensor.layout} tensor on {tensor.device}",
            hint="the cairn backend moves dense CPU tensors; for GPUs use nccl",
        )
    if tensor.dtype not in DTYPES:
        raise CommError(f"{operation}: tensors of {tensor.dtype} are not moved")
    flat = tensor.detach() if tensor.requires_grad else tensor
    if not flat.is_contiguous():
        flat = flat.contiguous()
    return flat if flat.dim() == 1 else flat.view(-1)


def place(operation: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view to receive into; a copy would lose the result, so the tensor must be contiguous."""
    flat = vector(operation, tensor)
    if flat.data_ptr() != tensor.data_ptr() and tensor.numel():
        raise CommError(
            f"{operation} into a tensor of strides {tensor.stride()}",
            hint="receive into a contiguous one",
        )
    return flat


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the result back into a tensor that was not contiguous."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def vectors(operation: str, tensors: Sequence[torch.Tensor]) -> Tensors:
    return [vector(operation, tensor) for tensor in tensors]


def parts(operation: str, tensors: Sequence[torch.Tensor], world: int) -> Tensors:
    """Check that there is one tensor for each rank."""
    if len(tensors) != world:
        raise CommError(f"{operation}: {len(tensors)} tensors for {world} ranks")
    return vectors(operation, tensors)


def shares(operation: str, whole: torch.Tensor, count: int, world: int) -> Tensors:
    """Split a tensor into equal shares of `count` elements, one for each rank."""
    flat = vector(operation, whole)
    if flat.numel() != count * world:
        raise CommError(
            f"{operation}: {flat.numel()} elements for {world} ranks of {count}",
            hint="the large tensor is the world size times the small one",
        )
    return list(flat.split(count)) if count else [flat] * world


def rows(flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int], world: int) -> Tensors:
    """Split the rows of the first dimension into one range for each rank, evenly or by `sizes`."""
    first = tensor.shape[0] if tensor.dim() else 0
    if not sizes and first % world:
        raise CommError(f"all_to_all: {first} rows do not divide among {world} ranks")
    split = list(sizes) or [first // world] * world
    if len(split) != world or sum(split) != first or min(split) < 0:
        raise CommError(f"all_to_all: splits {split} of {first} rows for {world} ranks")
    width = flat.numel() // first if first else 0
    return list(flat.split([size * width for size in split]))


def same(operation: str, place: torch.Tensor, mine: torch.Tensor, name: int) -> None:
    """Check that the tensor a rank sends to itself fits its destination."""
    if place.numel() != mine.numel() or place.dtype != mine.dtype:
        raise CommError(
            f"{operation}: rank {name} has {mine.dtype}[{mine.numel()}] for itself, "
            f"and a place of {place.dtype}[{place.numel()}]"
        )
