"""Products with matrices that stay packed as a checkpoint has them, by the compiled kernels.

    y = x @ w.T + bias       with an RMS norm of x before it, and a gate or a sum onto y behind it, in one call

x is rounded to 16 bits, 256 values to a scale (`dot.h`). `rows` dequantises single rows: the lookup of an embedding, or
a tile for a product in float32.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import library, load_kind

# Codes of GGUF's block types that have a kernel; the numbers are the format's.
TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23,
}  # fmt: skip
# Rows of levels and behind them scales in float32, of checkpoints that are no GGUF files (`blocks.h`).
LEVELS = {"LEVELS_8": 1000, "LEVELS_4": 1001}
UNPACKED_FIRST = ("Q2_K", "Q3_K", "IQ4_XS")  # types whose dot products are those of unpacked rows
GATES = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
COLUMNS = 32  # a row has whole blocks of at least so many values


class Blocks(NamedTuple):
    """The rows of one matrix [N, K] as bytes, perhaps a view of a mapped file."""

    kind: str  # a key of TYPES or LEVELS
    bytes_NB: Tensor  # uint8, contiguous
    columns: int
    mapped: bool = False  # a view of a mapped file, which was not written to
    group: int = 0  # values that share a scale, of LEVELS


class _Part(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("rows", ctypes.c_int32),
        ("row_bytes", ctypes.c_int64), ("group", ctypes.c_int32),
    )  # fmt: skip


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_void_p), ("count", ctypes.c_int32), ("columns", ctypes.c_int32),
        ("bias", ctypes.c_void_p), ("gate", ctypes.c_int32), ("add", ctypes.c_int32),
    )  # fmt: skip


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class Pool:
    """Threads of this process that share the rows of a product; as many as torch has when it is made."""

    def __init__(self, threads: int) -> None:
        self.threads, self.library = threads, library()
        self.library.cairn_pool_new.restype = ctypes.c_void_p
        self.address = ctypes.c_void_p(self.library.cairn_pool_new(threads))
        self._end = weakref.finalize(self, _free, self.library, self.address, os.getpid())


def _free(owner: ctypes.CDLL, address: ctypes.c_void_p, process: int) -> None:
    if os.getpid() == process:  # a forked process has the memory, and none of the threads
        owner.cairn_pool_free(address)


class _Pools(threading.local):
    """Thread-local pools, so that engines of one process do not wait for each other."""

    pool: Pool | None = None


_POOLS = _Pools()


def pool() -> Pool:
    held, threads = _POOLS.pool, torch.get_num_threads()
    if held is None or held.threads != threads:
        _POOLS.pool = held = Pool(threads)
    return held


def _forget_pools() -> None:
    global _POOLS
    _POOLS = _Pools()


os.register_at_fork(after_in_child=_forget_pools)  # which has none of their threads


class NormWeight:
    """The weights of an RMS norm that runs before a product, or behind one."""

    def __init__(self, weight_K: Tensor, eps: float) -> None:
        self.weight_K = weight_K.detach().float().contiguous()
        self.struct = _Norm(self.weight_K.data_ptr(), eps)
        self.reference = ctypes.byref(self.struct)
        self._add_normed = library().cairn_add_normed

    def add_normed(self, y_MK: Tensor, onto_MK: Tensor) -> None:
        """onto += norm(y), both in rows without gaps."""
        rows, columns = y_MK.shape
        y, onto = ctypes.c_void_p(y_MK.data_ptr()), ctypes.c_void_p(onto_MK.data_ptr())
        self._add_normed(self.reference, y, rows, columns, onto)


class PackedMatrix:
    """Matrices of one input side by side, each packed in its own way."""

    def __init__(self, blocks: Sequence[Blocks]) -> None:
        self.blocks = list(blocks)
        self.columns = blocks[0].columns
        self.part_rows = [len(one.bytes_NB) for one in blocks]
        self.outputs = sum(self.part_rows)
        self._parts = (_Part * len(blocks))(*map(_part, blocks))
        self._no_norm = ctypes.byref(_Norm(None, 0.0))
        self._made: dict[tuple[int, bool, int], tuple[_Matrix, Tensor | None]] = {}
        for one in blocks:
            load_kind(_kernel_of(one))
        owner = library()
        self._product, self._rows = owner.cairn_product, owner.cairn_rows

    @property
    def nbytes(self) -> int:
        return sum(one.bytes_NB.nbytes for one in self.blocks)

    def product(
        self,
        x_MK: Tensor,
        bias_N: Tensor | None = None,
        gate: str | None = None,
        norm: NormWeight | None = None,
        onto_MN: Tensor | None = None,
    ) -> Tensor:
        """[M, N], or of a gate [M, N / 2]; `onto_MN` is added to in place, and returned."""
        x_MK, rows = x_MK.contiguous(), x_MK.shape[0]
        width = self.part_rows[0] if gate else self.outputs
        y_MN = x_MK.new_empty(rows, width) if onto_MN is None else onto_MN
        matrix = self.struct_of(bias_N, gate, onto_MN is not None)
        failed = self._product(
            pool().address,
            ctypes.byref(matrix),
            self._no_norm if norm is None else norm.reference,
            ctypes.c_void_p(x_MK.data_ptr()),
            rows,
            ctypes.c_void_p(y_MN.data_ptr()),
        )
        if failed:
            raise MemoryError(f"no memory for {rows} rows of {self.columns} activations")
        return y_MN

    def rows(self, part: int, rows_R: Tensor, out_RK: Tensor | None = None) -> Tensor:
        """Rows of one part in float32."""
        rows_R = rows_R.long().contiguous()
        if out_RK is None:
            out_RK = torch.empty(len(rows_R), self.columns)
        self._rows(
            pool().address,
            ctypes.byref(self._parts[part]),
            self.columns,
            ctypes.c_void_p(rows_R.data_ptr()),
            len(rows_R),
            ctypes.c_void_p(out_RK.data_ptr()),
        )
        return out_RK

    def let_go(self) -> None:
        """Pages of a mapped file that were read leave this process; the system's cache has them when they are read."""
        advise = getattr(ctypes.CDLL(None), "madvise", None)  # None: another system
        for bytes_NB in (one.bytes_NB for one in self.blocks if one.mapped):
            first = -(-bytes_NB.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = bytes_NB.data_ptr() + bytes_NB.nbytes - first
            if advise is not None and size > 0:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)

    def part_address(self, part: int) -> int:
        """Address of a part for the compiled kernels; this object keeps it alive."""
        return ctypes.addressof(self._parts[part])

    def struct_of(self, bias_N: Tensor | None, gate: str | None, add: bool) -> _Matrix:
        """Arguments of the compiled matmul; this object keeps them alive."""
        key = (0 if bias_N is None else bias_N.data_ptr(), add, GATES[gate] if gate else 0)
        if key not in self._made:
            parts = ctypes.addressof(self._parts)
            made = _Matrix(parts, len(self.blocks), self.columns, key[0] or None, key[2], add)
            self._made[key] = made, bias_N  # which keeps the bias alive
        return self._made[key][0]


def _part(blocks: Blocks) -> _Part:
    rows, size = blocks.bytes_NB.shape
    code = TYPES.get(blocks.kind) or LEVELS[blocks.kind]
    return _Part(blocks.bytes_NB.data_ptr(), code, rows, size, blocks.group)


def _kernel_of(blocks: Blocks) -> str:
    """The name of its dot products in `dot_neon.h`."""
    if blocks.kind in LEVELS and blocks.group > 32:
        return f"GROUPED({blocks.kind}, {64 if blocks.group == 64 else 'PIECE'})"
    return "UNPACKED" if blocks.kind in (*UNPACKED_FIRST, *LEVELS) else blocks.kind


def suits_many_rows(kind: str) -> bool:
    """Return whether packed matmuls with many rows are faster than torch in float32."""
    return bool(library().cairn_suits_many_rows(TYPES.get(kind, 0)))
