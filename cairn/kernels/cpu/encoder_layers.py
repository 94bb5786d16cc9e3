"""All layers of a text encoder in one call of the compiled kernels, in float32, on CPUs with NEON.

    lengths 9 30 31 200  --chunks of whole texts-->  [200] [30 31] [9]  --each thread takes the next one-->  done

A thread takes its texts through every layer, so threads meet once for a batch and not in every product. The numbers of
a text do not depend on the texts beside it. Plain form: the modules of `models/encoder`, by torch.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import ON_ARM, library, obstacle
from cairn.kernels.cpu.packed_product import pool

SIDE = 8  # of a tile of sums (`float_tiles.h`): sizes are multiples of it
CHUNK_ROWS = 128  # at most, unless one text has more: what they need stays in the cache of a core
ALONE_ROWS = 64  # a longer text that is alone is torch's, whose products occupy every core


class Affine(NamedTuple):
    """A matrix [N, K] and its bias [N], or the weight and the bias of a norm."""

    weight: Tensor
    bias: Tensor


class LayerWeights(NamedTuple):
    qkv: Affine  # q, k and v side by side
    out: Affine
    up: Affine
    down: Affine
    attention_norm: Affine
    feed_forward_norm: Affine


class _Weights(ctypes.Structure):
    _fields_ = (
        ("tiles", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_int32), ("columns", ctypes.c_int32),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Weights) for name in ("qkv", "out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "norm_bias", "feed_norm", "feed_norm_bias")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("count", "hidden", "inner", "heads", "head_dim")),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float),
    )  # fmt: skip


def has_encoder_layers(*sizes: int) -> bool:
    """Whether there are kernels here for layers of these widths."""
    return ON_ARM and not any(size % SIDE for size in sizes) and obstacle() is None


class EncoderLayers:
    """x = norm(x + attention(x)); x = norm(x + down(gelu(up(x)))), for each layer.

    Holds a copy of the matrices in the order of its tiles.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], heads: int, head_dim: int, scale: float, eps: float
    ) -> None:
        self._held: list[Tensor] = []  # what the structures point to
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        inner, hidden = layers[0].up.weight.shape
        where, count = ctypes.addressof(self._layers), len(layers)
        self._model = _Model(where, count, hidden, inner, heads, head_dim, scale, eps)
        self._encode = library().cairn_encode

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held)

    def covers(self, lengths: Sequence[int]) -> bool:
        return len(lengths) > 1 or lengths[0] <= ALONE_ROWS or torch.get_num_threads() == 1

    def __call__(self, x_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        """Written into `x_TD`."""
        if not x_TD.is_contiguous() or x_TD.dtype != torch.float32:
            raise ValueError(f"x is {x_TD.dtype} with strides {x_TD.stride()}, not float32 in rows")
        threads = pool()
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        chunks = np.array(chunks_of(lengths, threads.threads), dtype=np.int32)
        model, addresses = ctypes.byref(self._model), (bounds.ctypes.data, chunks.ctypes.data)
        where = [ctypes.c_void_p(address) for address in (*addresses, x_TD.data_ptr())]
        if self._encode(threads.address, model, *where[:2], len(chunks), where[2]):
            raise MemoryError(f"no memory for the states of texts of up to {max(lengths)} tokens")
        return x_TD

    def _layer(self, layer: LayerWeights) -> _Layer:
        products = (layer.qkv, layer.out, layer.up, layer.down)
        norms = (layer.attention_norm, layer.feed_forward_norm)
        vectors = [self._address(vector) for norm in norms for vector in norm]
        return _Layer(*map(self._weights, products), *vectors)

    def _weights(self, given: Affine) -> _Weights:
        columns, depth = given.weight.shape
        tiles = given.weight.detach().unflatten(0, (-1, SIDE)).transpose(1, 2)
        return _Weights(self._address(tiles), self._address(given.bias), depth, columns)

    def _address(self, tensor: Tensor) -> int:
        held = tensor.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()


def chunks_of(lengths: Sequence[int], threads: int) -> list[tuple[int, int]]:
    """Texts [first, last) that one thread computes together; the most rows first, so that the last to end is short."""
    most = min(CHUNK_ROWS, -(-sum(lengths) // threads))
    chunks, rows = [[0, 0]], [0]
    for at, length in enumerate(lengths):
        if rows[-1] and rows[-1] + length > most:
            chunks.append([at, at])
            rows.append(0)
        chunks[-1][1] = at + 1
        rows[-1] += length
    order = sorted(range(len(chunks)), key=lambda at: -rows[at])
    return [(chunks[at][0], chunks[at][1]) for at in order]
