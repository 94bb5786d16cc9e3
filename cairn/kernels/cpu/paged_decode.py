"""Attention of a step over keys and values in pages, by the compiled kernels: one call for a layer.

    qkv [T, E * C] -norm, rotate-> k and v go to their slots, q attends -> [T, H * C]

For sequences with a token each or with several, which see what stands before them, in float32. A token has the same
bits in both. On a CPU the same in torch is a dozen operations, which for a small model take longer than what they
compute. Soft-caps and sinks are not known here.
"""

import ctypes

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import library
from cairn.kernels.cpu.packed_product import pool


class _Heads(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int32), ("kv_heads", ctypes.c_int32), ("size", ctypes.c_int32),
        ("window", ctypes.c_int32), ("scale", ctypes.c_float), ("eps", ctypes.c_float),
        ("norm", ctypes.c_void_p),
    )  # fmt: skip


class _Sequences(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_void_p), ("lengths", ctypes.c_void_p), ("tables", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p), ("count", ctypes.c_int32), ("page_size", ctypes.c_int32),
        ("table_stride", ctypes.c_int64),
    )  # fmt: skip


class DecodeHeads:
    """The heads of one layer."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        size: int,
        scale: float,
        window: int = 0,
        norm_EC: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """`norm_EC`: weights of an RMS norm of each head of q and of k, in this order."""
        self.norm_EC = None if norm_EC is None else norm_EC.detach().float().contiguous()
        address = None if self.norm_EC is None else self.norm_EC.data_ptr()
        self.struct = _Heads(heads, kv_heads, size, window, scale, eps, address)
        self.reference, self.width = ctypes.byref(self.struct), heads * size
        self._attend = library().cairn_attend

    def attend(
        self,
        qkv_TE: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        sequences: "Sequences",
        group: int,
        cache: tuple[int, int],
    ) -> Tensor:
        """`angles`: cosines and signed sines, [T, .., C]. `cache`: where keys and values of this layer begin."""
        cosine, sine = (None, None) if angles is None else (part.contiguous() for part in angles)
        out_TN = qkv_TE.new_empty(qkv_TE.shape[0], self.width)
        self._attend(
            pool().address,
            self.reference,
            ctypes.byref(sequences.array[group]),
            ctypes.c_void_p(qkv_TE.data_ptr()),
            ctypes.c_void_p(cache[0]),
            ctypes.c_void_p(cache[1]),
            ctypes.c_void_p(None if cosine is None else cosine.data_ptr()),
            ctypes.c_void_p(None if sine is None else sine.data_ptr()),
            ctypes.c_void_p(out_TN.data_ptr()),
        )
        return out_TN


class Sequences:
    """Locations of the keys of a step's sequences in each cache group."""

    def __init__(
        self,
        slots_GT: Tensor,
        lengths_B: Tensor,
        tables_GBP: Tensor,
        page_size: int,
        bounds_B1: Tensor | None = None,
    ) -> None:
        """`lengths_B`: with the tokens of this step. `bounds_B1`: whose tokens they are; None: one of each."""
        given = (slots_GT, lengths_B, tables_GBP)
        # Whose addresses are used.
        self._kept = slots, lengths, tables = [_rows(part) for part in given]
        self._bounds = None if bounds_B1 is None else _rows(bounds_B1)
        bounds = None if self._bounds is None else self._bounds.data_ptr()
        groups, fixed = range(len(slots)), (bounds, len(lengths), page_size, tables.stride(1))
        places = [(slots.stride(0) * g * 4, tables.stride(0) * g * 4) for g in groups]
        first, length, table = slots.data_ptr(), lengths.data_ptr(), tables.data_ptr()
        self.array = (_Sequences * len(groups))(
            *((first + s, length, table + t, *fixed) for s, t in places)
        )


def _rows(numbers: Tensor) -> Tensor:
    """The numbers as int32 with contiguous rows."""
    numbers = numbers.int()
    return numbers if numbers.stride(-1) == 1 else numbers.contiguous()


def fits(cache: Tensor) -> bool:
    """Return whether the kernel supports a cache [layer, key or value, block, token, head, column]."""
    return cache.dtype == torch.float32 and cache.device.type == "cpu" and cache.shape[1] == 2
