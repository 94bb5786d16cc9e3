"""Memory: a launch touches the tensors it was given and nothing else; descriptors and atomics do what TMA does."""

import dataclasses
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.interpreter.narrow_floats import NARROW

Handle = interpreter.TensorHandle
Builder: Any = interpreter.InterpreterBuilder


class OutOfBounds(IndexError):
    """A kernel touched memory outside of the tensors it was given."""


@dataclasses.dataclass(frozen=True)
class Region:
    name: str
    start: int
    end: int


_regions: list[Region] = []  # what the running launch may touch


def pointers_are_checked() -> None:
    """A pointer outside of every tensor ends the process, or worse, reads what happens to lie there."""
    load, store, cas = (
        Builder.create_masked_load,
        Builder.create_masked_store,
        Builder.create_atomic_cas,
    )

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check_bounds("load", pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_bounds("store", pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        _check_bounds("atomic", pointers, np.ones(np.shape(pointers.data), dtype=bool))
        return cas(self, pointers, *rest)

    Builder.create_masked_load = checked_load
    Builder.create_masked_store = checked_store
    Builder.create_atomic_cas = checked_cas


def launches_are_quiet_and_bounded() -> None:
    """exp(-inf) and 1/0 are ordinary on a GPU, no warnings; and a launch may touch its own tensors only."""
    executor: Any = interpreter.GridExecutor
    stock = executor.__call__

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        named_arguments = [*zip(self.arg_names, arguments, strict=False), *named.items()]
        regions = [region for name, value in named_arguments for region in _regions_of(name, value)]
        with np.errstate(all="ignore"), _reachable(regions):
            return stock(self, *arguments, **named)

    executor.__call__ = call


def narrow_floats_add_atomically() -> None:
    """The C++ atomics know no bfloat16; one program runs at a time here, so a loop is atomic."""
    stock = Builder.create_atomic_rmw

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check_bounds("atomic", pointers, mask.data)
        kind = value.dtype.scalar
        if operation != ir.ATOMIC_OP.FADD or kind not in NARROW:
            return stock(self, operation, pointers, value, mask, *rest)
        before = np.zeros(np.shape(pointers.data), dtype=value.data.dtype)
        for place in np.argwhere(np.broadcast_to(mask.data, before.shape)):
            one = tuple(place)
            pointer = Handle(pointers.data[one].reshape(1), pointers.dtype)
            old = self.create_load(pointer, None, None, False)
            addend = Handle(np.broadcast_to(value.data, before.shape)[one].reshape(1), kind)
            self.create_store(pointer, self.binary_op(old, addend, np.add), None, None)
            before[one] = old.data[0]
        return Handle(before, kind)

    Builder.create_atomic_rmw = atomic


def descriptors_reduce_and_pad() -> None:
    """TMA's reducing stores do not exist in the stock interpreter, and NaN is no padding for integers."""
    operations = {
        ir.DESCRIPTOR_REDUCE_KIND.ADD: np.add,
        ir.DESCRIPTOR_REDUCE_KIND.MIN: np.fmin,
        ir.DESCRIPTOR_REDUCE_KIND.MAX: np.fmax,
        ir.DESCRIPTOR_REDUCE_KIND.AND: np.bitwise_and,
        ir.DESCRIPTOR_REDUCE_KIND.OR: np.bitwise_or,
        ir.DESCRIPTOR_REDUCE_KIND.XOR: np.bitwise_xor,
    }

    def reduce(self: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
        pointers, mask = descriptor.materialize_pointers(indices)
        handle = Handle(mask, tl.int1)
        old = self.create_masked_load(pointers, handle, None, None, None, False)
        new = self.binary_op(old, value, operations[kind])
        return self.create_masked_store(pointers, new, handle, None, None)

    def load(self: Any, descriptor: Any, indices: Any, *policies: Any) -> Any:
        pointers, mask = descriptor.materialize_pointers(indices)
        kind = pointers.get_element_ty()
        other = None
        if descriptor.padding == ir.PADDING_OPTION.PAD_NAN:
            blank = np.full(mask.shape, np.nan, dtype=np.float32)
            other = self.cast_impl(Handle(blank, tl.float32), kind)
        return self.create_masked_load(pointers, Handle(mask, tl.int1), other, None, None, False)

    Builder.create_descriptor_reduce = reduce
    Builder.create_descriptor_load = load


FIXES = (
    pointers_are_checked,
    launches_are_quiet_and_bounded,
    narrow_floats_add_atomically,
    descriptors_reduce_and_pad,
)


@contextmanager
def reachable(**tensors: torch.Tensor) -> Generator[None]:
    """Lets launches touch tensors that they get as addresses in another tensor."""
    regions = [region for name, tensor in tensors.items() for region in _regions_of(name, tensor)]
    with _reachable(regions):
        yield


@contextmanager
def _reachable(regions: list[Region]) -> Generator[None]:
    before = len(_regions)
    _regions.extend(regions)
    try:
        yield
    finally:
        del _regions[before:]


def _regions_of(name: str, value: Any) -> Iterator[Region]:
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _regions_of(f"{name}[{index}]", item)
    elif isinstance(value, TensorDescriptor | TensorWrapper):
        yield from _regions_of(name, value.base)
    elif isinstance(value, torch.Tensor):
        storage = value.untyped_storage()  # a kernel may go on behind a view: rows of one result
        yield Region(name, storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _check_bounds(what: str, pointers: Any, mask: np.ndarray) -> None:
    addresses = pointers.data[np.broadcast_to(mask, np.shape(pointers.data)).astype(bool)]
    if not addresses.size:
        return
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    low, high = int(addresses.min()), int(addresses.max()) + width
    if any(region.start <= low and high <= region.end for region in _regions):
        return
    inside = np.zeros(addresses.shape, dtype=bool)
    for region in _regions:
        last = max(region.end - width, 0)
        inside |= (addresses >= np.uint64(region.start)) & (addresses <= np.uint64(last))
    if not inside.all():
        raise OutOfBounds(_describe(what, int(addresses[~inside][0]), int((~inside).sum()), width))


def _describe(what: str, address: int, count: int, width: int) -> str:
    program = interpreter.interpreter_builder.grid_idx
    message = f"{count} pointers of a {what} in program {program} lie outside of every tensor"
    if not _regions:
        return message
    near = min(_regions, key=lambda r: max(r.start - address, address - r.end))
    elements = (near.end - near.start) // width
    return f"{message}; the first is element {(address - near.start) // width} of {near.name}, which has {elements}"
