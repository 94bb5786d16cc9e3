"""Shared parts of the Gluon attention kernels: buffer rings between warps, tile order, copy completion.

    Ring           one warp fills buffers by TMA, others use them; two barriers for each buffer keep them apart
    TileSchedule   all tiles of all heads, in the order in which programs take them

Nothing here computes. On the host: the descriptors that such copies need.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

TILE = gl.constexpr(128)  # rows of a tile: 64 for each of two warpgroups
HALF = gl.constexpr(64)
BILLION = gl.constexpr(1 << 30)
REGISTERS = 240  # of a computing thread; a copying one has 24
AVERAGE_REGISTERS = 168  # of three warpgroups
CACHED_BYTES = 24 << 20  # half of the L2 cache of an H200


@aggregate
class Ring:
    """The step-th use of the ring is of buffer step % SIZE."""

    memory: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, memory, full, free, SIZE):
        self.memory, self.full, self.free = memory, full, free
        self.SIZE = gl.constexpr(SIZE)

    @gluon.jit
    def at(self, step):
        return self.memory.index(step % self.SIZE)

    @gluon.jit
    def filled(self, step):
        """The barrier that copies into this buffer arrive at."""
        return self.full.index(step % self.SIZE)

    @gluon.jit
    def begin(self, step, BYTES: gl.constexpr):
        """The filling warp: wait until nobody uses the buffer any more, and say how much will come."""
        mbarrier.wait(self.free.index(step % self.SIZE), step // self.SIZE % 2 ^ 1)
        mbarrier.expect(self.full.index(step % self.SIZE), BYTES)

    @gluon.jit
    def wait(self, step, pred=True):
        mbarrier.wait(self.full.index(step % self.SIZE), step // self.SIZE % 2, pred=pred)

    @gluon.jit
    def release(self, step):
        mbarrier.arrive(self.free.index(step % self.SIZE), count=1)


@gluon.jit
def barriers(SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Make none that nobody uses: the compiler gives the memory of such a one to the numbers that it hands to other
    warps, and the hardware may initialise it behind them (the rule `barriers` of `tooling.lint` looks for it)."""
    made = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def buffers(descriptor, SIZE: gl.constexpr):
    """SIZE times what the descriptor describes."""
    shape: gl.constexpr = descriptor.block_type.shape
    return gl.allocate_shared_memory(descriptor.dtype, [SIZE] + shape, descriptor.layout)  # noqa: RUF005


@gluon.jit
def make_ring(descriptor, SIZE: gl.constexpr, USERS: gl.constexpr):
    """Each buffer is released by USERS warpgroups."""
    return Ring(buffers(descriptor, SIZE), barriers(SIZE, 1), barriers(SIZE, USERS), SIZE)


@aggregate
class Tile:
    """TILE rows of one sequence and one head."""

    start: gl.tensor  # of the sequence
    length: gl.tensor
    padded: gl.tensor  # where the sequence starts if each begins a tile of its own
    row0: gl.tensor  # in the sequence
    head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, start, length, padded, row0, head):
        self.start, self.length, self.padded, self.row0, self.head = (
            start,
            length,
            padded,
            row0,
            head,
        )


@aggregate
class TileSchedule:
    """The longest tiles come first, and go round the programs like a snake: all end at about the same time."""

    tiles: gl.tensor  # the list of attention_schedule, unless lengths are equal
    count: gl.tensor  # tiles of a head
    sequences: gl.tensor
    length: gl.tensor  # of each sequence, if they are equal
    HEADS: gl.constexpr
    SECTION: (
        gl.constexpr
    )  # heads that go through all tiles before the next ones, so that the L2 cache has room
    DENSE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, count, sequences, length, HEADS, SECTION, DENSE):
        self.tiles, self.count, self.sequences, self.length = tiles, count, sequences, length
        self.HEADS, self.SECTION = gl.constexpr(HEADS), gl.constexpr(SECTION)
        self.DENSE = gl.constexpr(DENSE)

    @gluon.jit
    def rounds(self):
        """How many tiles this program computes."""
        total = self.count * self.HEADS
        full = total // gl.num_programs(0)
        return full + (self.place(full) < total).to(gl.int32)

    @gluon.jit
    def place(self, turn):
        """Forward in even rounds, backward in odd ones: who had the longest of one has the shortest of the next."""
        programs = gl.num_programs(0)
        forward = gl.program_id(0)
        return turn * programs + gl.where(turn % 2 == 0, forward, programs - 1 - forward)

    @gluon.jit
    def divided(self, place):
        """Which tile of which head."""
        per_section = gl.maximum(self.count, 1) * self.SECTION
        inside = place % per_section
        head = place // per_section * self.SECTION + inside % self.SECTION
        return inside // self.SECTION, head

    @gluon.jit
    def listed(self, place):
        """Where the tile stands in the list, and the head."""
        rank, head = self.divided(place)
        return self.tiles + 4 * (rank + 1), head  # pyrefly: ignore

    @gluon.jit
    def tile(self, turn):
        place = self.place(turn)
        if self.DENSE:
            rank, head = self.divided(place)
            per_sequence = self.count // self.sequences
            sequence = rank % self.sequences
            row0 = (per_sequence - 1 - rank // self.sequences) * TILE
            return Tile(
                sequence * self.length, self.length, sequence * per_sequence * TILE, row0, head
            )
        else:
            entry, head = self.listed(place)
            return load_tile(entry, head)  # pyrefly: ignore


@gluon.jit
def load_tile(entry, head):
    return Tile(gl.load(entry), gl.load(entry + 1), gl.load(entry + 3), gl.load(entry + 2), head)


@gluon.jit
def make_tile_schedule(
    tiles, sequences, length, HEADS: gl.constexpr, SECTION: gl.constexpr, DENSE: gl.constexpr
):
    if DENSE:
        count = sequences * gl.cdiv(length, TILE)
    else:
        count = gl.load(tiles)
    return TileSchedule(
        tiles, count, gl.to_tensor(sequences), gl.to_tensor(length), HEADS, SECTION, DENSE
    )


@gluon.jit
def copy_rows(descriptor, tile, row, column, barrier, buffer, RAGGED: gl.constexpr):
    """Rows of the tile's sequence. Ragged: the hardware fills with zeros what lies behind its end."""
    if RAGGED:  # dimensions 0 and 1 shift the rows so that the last of the sequence is the last of dimension 2
        at = [BILLION, tile.start + tile.length, BILLION - tile.length + row, column]
        tma.async_copy_global_to_shared(descriptor, at, barrier, buffer)
    else:
        tma.async_copy_global_to_shared(descriptor, [tile.start + row, column], barrier, buffer)


def shared_layout(shape: list[int], dtype: torch.dtype) -> Any:
    return _layout(tuple(shape), dtype)


@functools.lru_cache(
    maxsize=256
)  # a launch asks for several, and finding one takes longer than a short kernel
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    types = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.int8: gl.int8,
    }
    return gl.NVMMASharedLayout.get_default_for(list(shape), types[dtype])


def row_descriptor(x_THC: Tensor, rows: int) -> TensorDescriptor:
    tokens, heads, width = x_THC.shape
    block = [rows, width]
    layout = shared_layout(block, x_THC.dtype)
    return TensorDescriptor(x_THC, [tokens, heads * width], [x_THC.stride(0), 1], block, layout)


def ragged_descriptor(x_THC: Tensor, rows: int) -> TensorDescriptor:
    """Ends where a sequence does: see `copy_rows`. Addresses wrap at 2**64, where 2**30 * 2**34 elements are."""
    _, heads, width = x_THC.shape
    stride, block, most = x_THC.stride(0), [1, 1, rows, width], 0x7FFF0000
    return TensorDescriptor(
        x_THC, [most, most, BILLION.value, heads * width], [2**34 - stride, stride, stride, 1],
        block, shared_layout(block, x_THC.dtype),
    )  # fmt: skip


def described(shape: list[int], dtype: torch.dtype = torch.bfloat16) -> str:
    """The type of a descriptor, for the compiler."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8"}
    name = {**names, torch.float8_e4m3fn: "fp8e4nv"}[dtype]
    return f"tensordesc<{name}{shape},{shared_layout(shape, dtype)!r}>"


def section_of(kv_heads: int, width: int, tokens: int) -> int:
    """Key heads whose keys and values fit into the cache together: a divisor of all."""
    wanted = max(CACHED_BYTES // (4 * width * max(tokens, 1)), 1)
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= wanted)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
