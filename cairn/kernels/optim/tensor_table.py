"""Many tensors, one launch: where they are, and which program works on which piece.

An optimizer has hundreds of tensors, most of them small. A table on the GPU holds their addresses and cuts them
into chunks of one size; program i of a kernel works on chunk i. Tensors whose addresses and sizes allow 16-byte
accesses are in one table and the few others in a second one. A table is built when an address has changed and kept
otherwise: building copies a few kilobytes to the GPU without waiting for it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import check, require
from cairn.kernels.norm.rows import blocks

CHUNK = 32768  # elements; also part of what seeds stochastic rounding, so not for tuning
KEPT = 8
ALIGNMENT = 16  # of addresses in bytes, of sizes in elements


class Table(NamedTuple):
    addresses: Tensor  # int64 [roles, tensors]
    sizes: Tensor  # int64 [tensors]
    numbers: Tensor  # int32 [tensors]: which of all tensors it is, whatever table it is in
    tensor_of: Tensor  # int32 [chunks]
    chunk_of: Tensor  # int32 [chunks]: of its tensor
    aligned: bool

    @property
    def chunks(self) -> int:
        return len(self.tensor_of)


Key = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[torch.dtype, ...], torch.device]
_kept: dict[Key, Sequence[Table]] = {}  # the last few tables, by what they were made of


def tables(**roles: Sequence[Tensor]) -> Sequence[Table]:
    """Tables over the tensors of each role; empty tensors are left out."""
    addresses = tuple(tuple(tensor.data_ptr() for tensor in role) for role in roles.values())
    first = next(iter(roles.values()))
    require(len(first) > 0, next(iter(roles)), "at least one tensor", "none")
    sizes = tuple(tensor.numel() for tensor in first)
    dtypes = tuple(role[0].dtype for role in roles.values() if role)
    key = (addresses, sizes, dtypes, first[0].device)
    if key not in _kept:
        check_roles(roles)  # hundreds of tensors: only when something has changed
        while len(_kept) >= KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = _build(addresses, sizes, first[0].device)
    return _kept[key]


def check_roles(roles: Mapping[str, Sequence[Tensor]]) -> None:
    """Check that all roles have equally many tensors of the same shapes, one dtype each, on one device."""
    first_name, first = next(iter(roles.items()))
    for name, tensors in roles.items():
        count = len(first)
        require(len(tensors) == count, name, f"{count} tensors like {first_name}", len(tensors))
        for number, (tensor, model) in enumerate(zip(tensors, first, strict=True)):
            place = f"{name}[{number}]"
            check(place, tensor, dtypes=(tensors[0].dtype,), shape=model.shape, beside=first[0])
            check(place, tensor, packed=True)


def _build(
    addresses: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], device: torch.device
) -> Sequence[Table]:
    groups: dict[bool, list[int]] = {True: [], False: []}
    for number, size in enumerate(sizes):
        fits = (size, *(role[number] for role in addresses))
        if size:
            groups[all(value % ALIGNMENT == 0 for value in fits)].append(number)
    return tuple(
        _table(addresses, sizes, numbers, aligned, device)
        for aligned, numbers in groups.items()
        if numbers
    )


def _table(
    addresses: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    numbers: list[int],
    aligned: bool,
    device: torch.device,
) -> Table:
    counts = [blocks(sizes[number], CHUNK) for number in numbers]
    tensor_of = [place for place, count in enumerate(counts) for _ in range(count)]
    chunk_of = [chunk for count in counts for chunk in range(count)]
    return Table(
        _sent([[role[number] for number in numbers] for role in addresses], torch.int64, device),
        _sent([sizes[number] for number in numbers], torch.int64, device),
        _sent(numbers, torch.int32, device),
        _sent(tensor_of, torch.int32, device),
        _sent(chunk_of, torch.int32, device),
        aligned,
    )


def _sent(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    here = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return here
    return here.pin_memory().to(device, non_blocking=True)


@triton.jit
def pointer(addresses, role, tensors, tensor, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the tensor of a role begins."""
    address = tl.load(addresses + role * tensors + tensor).to(
        tl.pointer_type(dtype)  # pyrefly: ignore[bad-argument-type]
    )
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def size_of(sizes, tensor, ALIGNED: tl.constexpr):
    size = tl.load(sizes + tensor)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return size
