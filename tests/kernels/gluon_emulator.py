"""Runs warp-specialised Gluon kernels on the CPU, well enough to find what is wrong with their protocol.

    import cairn.kernels.interpret, then gluon_emulator, then the kernel modules, in a process of their own

Partitions are threads; barriers count arrivals and bytes and have phases, as on the chip. A copy by TMA is done later
by another thread, and until then its buffer is no number; an asynchronous product reads its operands both when it is
issued and when it is waited for, and they must not have changed in between. So a barrier that is waited for too
early, released too early or in the wrong phase becomes a wrong result or a deadlock here, which is reported.

Layouts mean nothing here, and neither do registers, shared memory's size or time. Only what our kernels use exists.
"""

import inspect
import math
import operator
import queue
import random
import sys
import threading
import types

import numpy as np
import torch
import triton.experimental
import triton.language.core
from triton.runtime.jit import mangle_type

mangle_type(1)  # looks for the real gluon, once

DEADLOCK_S = 20.0


class DType:
    def __init__(self, name: str, torch_dtype: torch.dtype, bits: int):
        self.name, self.torch_dtype, self.primitive_bitwidth = name, torch_dtype, bits

    def rounded(self, array: np.ndarray) -> np.ndarray:
        if self.name in ("bfloat16", "float8e4nv"):
            wide = torch.from_numpy(np.ascontiguousarray(array, np.float32))
            return wide.to(self.torch_dtype).float().numpy()
        kinds = {"float32": np.float32, "int32": np.int32, "int64": np.int64, "int8": np.int8}
        return np.asarray(array).astype(kinds[self.name])


bfloat16 = DType("bfloat16", torch.bfloat16, 16)
float32 = DType("float32", torch.float32, 32)
float8e4nv = DType("float8e4nv", torch.float8_e4m3fn, 8)
int32, int64 = DType("int32", torch.int32, 32), DType("int64", torch.int64, 64)
int8 = DType("int8", torch.int8, 8)
DTYPES = {dtype.torch_dtype: dtype for dtype in (bfloat16, float8e4nv, float32, int8, int32, int64)}


class constexpr:
    """Numbers stay numbers, with a value."""

    def __new__(cls, value):
        kind = {int: Integer, float: Real}.get(type(value))
        return value if kind is None else kind(value)


class Integer(int):
    value = property(int)


class Real(float):
    value = property(float)


class Layout:
    def __init__(self, *arguments, **named):
        self.parent = arguments[-1] if arguments else None

    @staticmethod
    def get_default_for(shape, dtype):
        return Layout()


class Tensor:
    """A block of numbers, or one number, in registers."""

    def __init__(self, array, layout=None, dtype=None, place=None):
        self.array, self.layout = np.asarray(array), layout
        self.place = place  # in shared memory, which is the order of registers: known of what was just loaded
        if dtype is None:
            dtype = float32 if self.array.dtype.kind == "f" else int32
        self.dtype = dtype

    @property
    def shape(self):
        return list(self.array.shape)

    @property
    def type(self):
        return types.SimpleNamespace(layout=self.layout, scalar=self.dtype, shape=self.shape)

    def reshape(self, shape):
        place = None if self.place is None else self.place.reshape(shape)
        return Tensor(self.array.reshape(shape), self.layout, self.dtype, place)

    def expand_dims(self, axis):
        return Tensor(np.expand_dims(self.array, axis), self.layout.parent, self.dtype)

    def broadcast_to(self, shape):
        return Tensor(np.broadcast_to(self.array, shape), self.layout, self.dtype)

    def permute(self, order):
        place = None if self.place is None else self.place.transpose(order)
        return Tensor(self.array.transpose(order), self.layout, self.dtype, place)

    def to(self, dtype, bitcast=False):
        array = self.array.view(np.float32) if bitcast else dtype.rounded(self.array)
        return Tensor(array, self.layout, dtype)

    def __getitem__(self, key):
        return Tensor(self.array[key], self.layout and self.layout.parent, self.dtype)

    def __index__(self):
        return int(self.array)

    def __bool__(self):
        return bool(self.array)

    def __neg__(self):
        return Tensor(-self.array, self.layout)


def _array(value):
    return value.array if isinstance(value, Tensor) else value


def _binary(function, swapped=False):
    def apply(self, other):
        if isinstance(other, Pointer):
            return other + self
        layout = self.layout or getattr(other, "layout", None)
        left, right = self.array, _array(other)
        with np.errstate(all="ignore"):
            return Tensor(function(right, left) if swapped else function(left, right), layout)

    return apply


def _divide(a, b):
    return np.trunc(a / b).astype(np.int64) if np.all(np.asarray(b) != 0) else np.zeros_like(a)


for _name, _function in dict(
    add=operator.add, sub=operator.sub, mul=operator.mul, truediv=operator.truediv, floordiv=_divide,
    mod=lambda a, b: a - _divide(a, b) * b, xor=operator.xor, lshift=operator.lshift, rshift=operator.rshift,
    **{"and": operator.and_, "or": operator.or_},
).items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _binary(_function))
    setattr(Tensor, f"__r{_name}__", _binary(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name}__", _binary(getattr(operator, _name)))


class Pointer:
    def __init__(self, memory: torch.Tensor, offset=0, layout=None):
        self.memory, self.offset, self.layout = memory, offset, layout
        self.dtype = types.SimpleNamespace(element_ty=DTYPES[memory.dtype])

    def __add__(self, offset):
        layout = getattr(offset, "layout", None) or self.layout
        return Pointer(self.memory, self.offset + _array(offset), layout)

    def cells(self) -> torch.Tensor:
        """All that lies behind the first element, whatever the strides."""
        size = self.memory.untyped_storage().nbytes() // self.memory.element_size()
        start = self.memory.storage_offset()
        return self.memory.as_strided((size - start,), (1,), start)


def load(pointer: Pointer, mask=True, other=0.0, cache_modifier="", eviction_policy=""):
    places = np.asarray(pointer.offset)
    there = np.broadcast_to(_array(mask), places.shape)
    cells = pointer.cells()
    cells = cells.float() if cells.dtype == torch.float8_e4m3fn else cells  # cannot be indexed
    found = cells[torch.tensor(np.where(there, places, 0))]
    values = (found.float() if found.is_floating_point() else found).numpy()
    return Tensor(np.where(there, values, other).astype(values.dtype), pointer.layout)


def store(pointer: Pointer, value, mask=True):
    places = np.asarray(pointer.offset)
    there = np.broadcast_to(_array(mask), places.shape)
    values = np.broadcast_to(_array(value), places.shape)[there]
    pointer.cells()[torch.tensor(places[there])] = torch.tensor(values).to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, value, sem, scope):
    before = load(pointer)
    store(pointer, before + value)
    return before


def split(value):
    """The two halves of the last axis."""
    return tuple(Tensor(value.array[..., i], value.layout, value.dtype) for i in (0, 1))


def join(a, b):
    return Tensor(np.stack((a.array, b.array), -1), a.layout, a.dtype)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    """Four bytes of neighbours in a register, of each argument -> two registers of two bfloat16 for each result."""
    given, registers = args[0], {}
    first = constraints.count("=")  # the number of the first operand
    assert pack == 4
    assert all(one.dtype is int8 for one in args)
    order = np.argsort(given.place.reshape(-1))
    arrived = np.ones(given.array.size // 4, bool)
    for number, one in enumerate(args):
        values = one.array.reshape(-1)[order].reshape(-1, 4)
        arrived &= ~np.isnan(values).any(-1)
        bytes_ = np.where(np.isnan(values), 0, values).astype(np.int64) & 255
        registers[f"${first + number}"] = bytes_ @ np.array([1, 1 << 8, 1 << 16, 1 << 24])
    for line in asm.strip("{} \n").splitlines():
        _instruct(line.strip().rstrip(";"), registers)
    results = []
    for number in range(0, first, 2):
        pair = np.stack([registers[f"${number}"], registers[f"${number + 1}"]], -1)
        halves = np.stack([pair & 0xFFFF, pair >> 16], -1).reshape(-1, 4)
        halves = np.where(arrived[:, None], _from_bfloat16(halves), np.nan)
        flat = np.empty(given.array.size, np.float32)
        flat[order] = halves.reshape(-1)
        results.append(Tensor(flat.reshape(given.array.shape), given.layout, bfloat16))
    return results[0] if len(results) == 1 else tuple(results)


def _from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _permuted_bytes(a, b, selector):
    bytes_ = [a >> shift & 255 for shift in (0, 8, 16, 24)]
    bytes_ += [b >> shift & 255 for shift in (0, 8, 16, 24)]
    return sum(bytes_[selector >> 4 * place & 7] << 8 * place for place in range(4))


def _in_halves(function):
    """Of bfloat16 in both halves of a register, rounded once."""

    def apply(*registers):
        whole = np.broadcast_arrays(*registers)
        halves = [_from_bfloat16(np.stack([one & 0xFFFF, one >> 16], -1)) for one in whole]
        exact = function(*(half.astype(np.float64) for half in halves)).astype(np.float32)
        bits = bfloat16.rounded(exact).view(np.uint32).astype(np.int64) >> 16
        return bits[..., 0] | bits[..., 1] << 16

    return apply


PTX = {
    "mov.b32": lambda a: a,
    "shr.b32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": _permuted_bytes,
    "sub.rn.bf16x2": _in_halves(operator.sub),
    "mul.rn.bf16x2": _in_halves(operator.mul),
    "fma.rn.bf16x2": _in_halves(lambda a, b, c: a * b + c),
}


def _instruct(line, registers):
    """One PTX instruction of those that our kernels use."""
    name, _, rest = line.partition(" ")
    operands = [part.strip() for part in rest.split(",")]
    if name in ("", ".reg"):
        return
    read = [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
    if name == "lop3.b32":
        assert read.pop() == 0xEA  # (a and b) or c
        registers[operands[0]] = (read[0] & read[1]) | read[2]
    else:
        registers[operands[0]] = PTX[name](*read)


class Memory:
    """A view of shared memory."""

    def __init__(self, array: np.ndarray, dtype):
        self.array, self.dtype = array, dtype

    @property
    def shape(self):
        return list(self.array.shape)

    def index(self, i):
        return Memory(self.array[operator.index(i)], self.dtype)

    def reshape(self, shape):
        view = self.array.reshape(shape)
        assert np.shares_memory(view, self.array)
        return Memory(view, self.dtype)

    def permute(self, order):
        return Memory(self.array.transpose(order), self.dtype)

    def slice(self, start, length, dim=0):
        place = [slice(None)] * self.array.ndim
        place[dim] = slice(start, start + length)
        return Memory(self.array[tuple(place)], self.dtype)

    def _reinterpret(self, dtype, shape, layout):
        """Boxes of rows and columns, as swizzled rows lie: all rows of some columns, then of the next ones."""
        assert dtype is self.dtype
        return Boxes(self, shape)

    def load(self, layout):
        place = np.arange(self.array.size).reshape(self.array.shape)
        return Tensor(self.array.copy(), layout, self.dtype, place)

    def store(self, value):
        self.array[...] = self.dtype.rounded(value.array)


class Boxes:
    def __init__(self, memory: Memory, shape):
        self.memory, (self.count, self.rows, self.columns) = memory, shape
        assert self.count * self.rows * self.columns == memory.array.size

    def index(self, i):
        part, piece = divmod(operator.index(i), self.memory.shape[0] // self.rows)
        rows = self.memory.slice(piece * self.rows, self.rows)
        return rows.slice(part * self.columns, self.columns, 1)


LOCK = threading.RLock()
CHANGED = threading.Condition(LOCK)


class Barrier:
    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            CHANGED.notify_all()
        assert self.pending >= 0, "more arrivals than a barrier counts"


def allocate_shared_memory(dtype, shape, layout=None, value=None):
    if dtype is int64:
        bars = np.empty(shape, dtype=object)
        for place in np.ndindex(*shape):
            bars[place] = Barrier()
        return Memory(bars, dtype)
    memory = Memory(np.full(shape, np.nan, np.float32), dtype)
    if value is not None:
        memory.store(value)
    return memory


def _barrier(memory: Memory) -> Barrier:
    return memory.array.reshape(-1)[0]


def init(memory, count):
    bar = _barrier(memory)
    bar.count = bar.pending = count


def arrive(memory, count=1, pred=True):
    if not pred:
        return
    with CHANGED:
        bar = _barrier(memory)
        bar.pending -= count
        bar.settle()


def expect(memory, size, pred=True):
    if not pred:
        return
    with CHANGED:
        bar = _barrier(memory)
        bar.bytes += operator.index(size)
        bar.pending -= 1
        bar.settle()


def wait(memory, phase, pred=True):
    if not pred:
        return
    bar, parity = _barrier(memory), operator.index(phase)
    assert parity in (0, 1), parity
    with CHANGED:
        if not CHANGED.wait_for(lambda: bar.phase != parity or FAILED, timeout=DEADLOCK_S):
            FAILED.append("deadlock: nobody arrives at a barrier")
        if FAILED:
            CHANGED.notify_all()
            raise RuntimeError(FAILED[0])


class Descriptor:
    def __init__(self, base, shape, strides, block_shape, layout):
        self.base, self.strides, self.layout = base, strides, layout
        self.bounds = shape
        self.dtype = DTYPES[base.dtype]
        size = math.prod(block_shape) * base.element_size()
        self.block_type = types.SimpleNamespace(shape=list(block_shape), nbytes=size)

    def read(self, at: list[int]) -> np.ndarray:
        """Zeros outside of the bounds; addresses wrap around."""
        block = self.block_type.shape
        address, inside = np.zeros(block, np.uint64), np.ones(block, bool)
        for axis, (start, stride, bound) in enumerate(
            zip(at, self.strides, self.bounds, strict=True)
        ):
            index = (start + np.arange(block[axis])).reshape(
                [-1 if i == axis else 1 for i in range(len(block))]
            )
            inside &= (index >= 0) & (index < bound)
            step = np.uint64(stride * self.base.element_size() % 2**64)
            with np.errstate(over="ignore"):
                address = address + index.astype(np.uint64) * step
        cells = self.base.as_strided(
            (self.base.untyped_storage().nbytes() // self.base.element_size(),), (1,), 0
        )
        cells = cells.float() if cells.itemsize == 1 else cells  # 8-bit floats cannot be indexed
        places = (address // np.uint64(self.base.element_size())).astype(
            np.int64
        ) + self.base.storage_offset()
        result = np.zeros(block, np.float32)
        result[inside] = cells[torch.from_numpy(places[inside])].float().numpy()
        return result

    def write(self, at: list[int], values: np.ndarray) -> None:
        """A block of two dimensions, within the bounds."""
        rows, columns = self.block_type.shape
        assert at[0] + rows <= self.bounds[0]
        assert at[1] + columns <= self.bounds[1]
        whole = self.base.as_strided(self.bounds, self.strides)
        part = whole[at[0] : at[0] + rows, at[1] : at[1] + columns]
        part.copy_(torch.from_numpy(np.ascontiguousarray(values)))


COPIES: "queue.SimpleQueue[tuple]" = queue.SimpleQueue()


def async_copy_global_to_shared(descriptor, at, barrier, memory, pred=True):
    if not pred:
        return
    memory.array[...] = np.nan  # until it has come
    COPIES.put((descriptor, [operator.index(i) for i in at], _barrier(barrier), memory))


COPYING_THREADS = 128


def copy_by_threads(memory, pointers):
    """cp.async of every thread, which all arrive when their own copies have come."""
    memory.array[...] = np.nan
    FLIGHT.gathered = [*getattr(FLIGHT, "gathered", []), (pointers, memory)]


def arrive_when_copied(barrier, increment_count):
    assert not increment_count
    for pointers, memory in FLIGHT.gathered:
        COPIES.put((pointers, None, _barrier(barrier), memory))
    FLIGHT.gathered = []


def async_copy_shared_to_global(descriptor, at, memory):
    """Reads its buffer now and when it is waited for, and it must not have changed in between."""
    leaving = getattr(FLIGHT, "leaving", [])
    place = [operator.index(i) for i in at]
    FLIGHT.leaving = [*leaving, (descriptor, place, memory, memory.array.copy())]


def store_wait(pendings):
    leaving = getattr(FLIGHT, "leaving", [])
    count = len(leaving) - pendings
    for descriptor, at, memory, early in leaving[:count]:
        assert np.array_equal(early, memory.array), "a buffer changed while it was copied"
        descriptor.write(at, early)
    FLIGHT.leaving = leaving[count:] if count > 0 else leaving


def _copy_forever():
    waiting: list[tuple] = []
    while True:
        waiting.append(COPIES.get())
        while not COPIES.empty():
            waiting.append(COPIES.get())
        random.shuffle(waiting)
        while waiting and COPIES.empty():
            source, at, bar, memory = waiting.pop()
            gathered = isinstance(source, Pointer)
            data = load(source).array if gathered else source.read(at)
            with CHANGED:
                memory.array[...] = data
                bar.bytes -= 0 if gathered else source.block_type.nbytes
                bar.pending -= COPYING_THREADS if gathered else 0
                bar.settle()


threading.Thread(target=_copy_forever, daemon=True).start()


class Product:
    """A product in flight."""

    def __init__(self, a, b, acc, use_acc):
        before = acc.early if isinstance(acc, Product) else acc.array
        self.operands, self.acc = (a, b), before if use_acc else 0.0
        self.layout, self.early, self.result = acc.layout, self.compute(), None

    def compute(self):
        with np.errstate(all="ignore"):
            return (self.operands[0].array @ self.operands[1].array + self.acc).astype(np.float32)

    def finish(self):
        late = self.compute()
        assert np.array_equal(self.early, late, equal_nan=True), (
            "an operand changed while a product ran"
        )
        self.result = Tensor(late, self.layout)


FLIGHT = threading.local()


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    FLIGHT.products = [*getattr(FLIGHT, "products", []), Product(a, b, acc, use_acc)]
    return FLIGHT.products[-1]


def warpgroup_mma_wait(outstanding, values):
    flying = getattr(FLIGHT, "products", [])
    done = flying[: len(flying) - outstanding]
    FLIGHT.products = flying[len(flying) - outstanding :] if outstanding else []
    for product in done:
        product.finish()
    # One that still flies can only be added to: it has no numbers yet.
    results = tuple(
        value.result if isinstance(value, Product) and value.result is not None else value
        for value in values
    )
    return results[0] if len(results) == 1 else results


def mma_v2(a, b, acc):
    with np.errstate(all="ignore"):
        return Tensor((a.array @ b.array + acc.array).astype(np.float32), acc.layout)


PROGRAM = types.SimpleNamespace(id=0, count=1)
FAILED: list[str] = []


def warp_specialize(parts, warps, registers):
    def run(function, arguments):
        try:
            FLIGHT.products, FLIGHT.leaving = [], []
            function(*arguments)
            assert not FLIGHT.products, "a product is never waited for"
            assert not FLIGHT.leaving, "a copy to memory is never waited for"
        except BaseException as problem:  # noqa: BLE001
            with CHANGED:
                FAILED.append(f"{type(problem).__name__}: {problem}")
                CHANGED.notify_all()

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if FAILED:
        raise RuntimeError(FAILED[0])


def steps(*bounds):
    """A range; of tensors, if a bound is one."""
    numbers = range(*map(operator.index, bounds))
    return map(Tensor, numbers) if any(isinstance(bound, Tensor) for bound in bounds) else numbers


class Kernel:
    """What @gluon.jit makes of a function: callable within a kernel, launched with [grid]."""

    def __init__(self, function):
        self.function = function
        self.__name__ = function.__name__
        self.arg_names = list(inspect.signature(function).parameters)
        function.__globals__["range"] = steps

    def __get__(self, instance, owner):
        return (
            self
            if instance is None
            else lambda *arguments, **named: self(instance, *arguments, **named)
        )

    def __call__(self, *arguments, **named):
        return self.function(*arguments, **named)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg=0, launch_pdl=False, **constants):
            FAILED.clear()
            passed = [_passed(argument) for argument in arguments]
            for program in range(grid[0]):
                PROGRAM.id, PROGRAM.count = program, grid[0]
                self.function(*passed, **constants)

        return launch


def _passed(argument):
    if isinstance(argument, torch.Tensor):
        return Pointer(argument)
    return (
        Tensor(argument)
        if isinstance(argument, int | float) and not isinstance(argument, bool)
        else argument
    )


def _elementwise(function):
    def apply(*values):
        layout = next((v.layout for v in values if isinstance(v, Tensor) and v.layout), None)
        with np.errstate(all="ignore"):
            return Tensor(function(*map(_array, values)), layout)

    return apply


def _reduction(function):
    return lambda value, axis: Tensor(function(value.array, axis), Layout(value.layout))


language = types.ModuleType("triton.experimental.gluon.language")
language.__dict__.update(
    constexpr=constexpr, tensor=Tensor, shared_memory_descriptor=Memory, int32=int32, int64=int64, float32=float32,
    int8=int8, bfloat16=bfloat16, float8e4nv=float8e4nv, float16=bfloat16, load=load, store=store,
    allocate_shared_memory=allocate_shared_memory,
    NVMMADistributedLayout=Layout, NVMMASharedLayout=Layout, DotOperandLayout=Layout, BlockedLayout=Layout,
    SliceLayout=Layout, DistributedLinearLayout=Layout, static_assert=lambda fact: None,
    static_range=range, warp_specialize=warp_specialize, thread_barrier=lambda: None,
    program_id=lambda axis: Tensor(PROGRAM.id), num_programs=lambda axis: Tensor(PROGRAM.count),
    zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape, np.float32), layout, dtype),
    full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value, np.float32), layout, dtype),
    arange=lambda start, end, layout: Tensor(np.arange(start, end), layout),
    convert_layout=lambda value, layout, assert_trivial=False: Tensor(value.array, layout, value.dtype),
    join=join, inline_asm_elementwise=inline_asm_elementwise,
    to_tensor=lambda value: value if isinstance(value, Tensor) else Tensor(value),
    cdiv=lambda a, b: (a + (b - 1)) // b,
    where=_elementwise(np.where), maximum=_elementwise(np.maximum), minimum=_elementwise(np.minimum),
    atomic_add=atomic_add, split=split, exp=_elementwise(np.exp), SwizzledSharedLayout=Layout,
    exp2=_elementwise(np.exp2), log2=_elementwise(np.log2), max=_reduction(np.max), sum=_reduction(np.sum),
)  # fmt: skip


def jit(function=None, *, do_not_specialize=()):
    """With options or without; what is specialised changes no number."""
    return jit if function is None else Kernel(function)


gluon = types.ModuleType("triton.experimental.gluon")
gluon.__dict__.update(
    jit=jit, constexpr_function=lambda function: function, language=language, __path__=[]
)
hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
hopper.__dict__.update(
    mbarrier=types.SimpleNamespace(
        init=init, wait=wait, expect=expect, arrive=arrive, MBarrierLayout=Layout
    ),
    tma=types.SimpleNamespace(
        async_copy_global_to_shared=async_copy_global_to_shared,
        store_wait=store_wait,
        async_copy_shared_to_global=async_copy_shared_to_global,
    ),
    async_copy=types.SimpleNamespace(
        async_copy_global_to_shared=copy_by_threads, mbarrier_arrive=arrive_when_copied
    ),
    fence_async_shared=lambda: None,
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
)
ampere = types.ModuleType("triton.experimental.gluon.language.nvidia.ampere")
ampere.mma_v2 = mma_v2
host = types.ModuleType("triton.experimental.gluon.nvidia.hopper")
host.TensorDescriptor = Descriptor
language.__path__ = []
sys.modules.update(
    {
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": types.ModuleType("nvidia"),
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": types.ModuleType("nvidia"),
        "triton.experimental.gluon.nvidia.hopper": host,
    }
)
triton.experimental.gluon = gluon
triton.language.core._aggregate = lambda cls: cls
