"""All layers of an encoder in one call of the compiled kernels, on CPUs with NEON or AVX2.

    lengths 9 30 31 200  --chunks of whole texts-->  [200] [30 31] [9]  --each thread takes the next one-->  done

A thread takes its texts through every layer, so threads meet once for a batch and not in every product; of few texts
they share each layer. The numbers of a text do not depend on the texts beside it. Products are in float32. Weights in
float16 are widened on x86; NEON multiplies and attends with factors in float16 then. Norms are in float32. Plain form:
the modules of `models/encoder` and `models/speech`, by torch.
"""

import ctypes
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import library
from cairn.kernels.cpu.packed_product import pool
from cairn.kernels.cpu.tiled import Affine, Held, Weights

CHUNK_ROWS = 128  # at most, unless one text has more: what they need stays in the cache of a core
# For each thread; of fewer the last would keep one thread at work and the others waiting.
FEW_CHUNKS = 2
NO_CHUNKS = np.zeros((0, 2), dtype=np.int32)


class LayerWeights(NamedTuple):
    qkv: Affine  # q, k and v side by side
    out: Affine
    up: Affine
    down: Affine
    attention_norm: Affine
    feed_forward_norm: Affine


class EncoderShape(NamedTuple):
    heads: int
    head_dim: int
    scale: float  # of scores
    eps: float  # of norms
    norms: Literal["post", "pre"]


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Weights) for name in ("qkv", "out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "norm_bias", "feed_norm", "feed_norm_bias")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("count", "hidden", "inner", "heads", "head_dim")),
        ("is_pre", ctypes.c_int32), ("is_half", ctypes.c_int32),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float),
    )  # fmt: skip


class EncoderLayers:
    """post: x = norm(x + attention(x)), x = norm(x + down(gelu(up(x)))); pre: norms stand before the products.

    Holds its own copy of the matrices, in the order of its tiles.
    """

    def __init__(self, layers: Sequence[LayerWeights], shape: EncoderShape) -> None:
        self._held = Held()
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        inner, hidden = layers[0].up.weight.shape
        half = layers[0].up.weight.dtype == torch.float16
        self._model = _Model(
            *(ctypes.addressof(self._layers), len(layers), hidden, inner),
            *(shape.heads, shape.head_dim, shape.norms == "pre", half, shape.scale, shape.eps),
        )
        self._encode = library().cairn_encode

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def __call__(self, x_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T, D] in float32; written into `x_TD` if it is that."""
        x_TD, threads = x_TD.float().contiguous(), pool()
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        planned = chunks_of(lengths, threads.threads)
        few = threads.threads > 1 and len(planned) < FEW_CHUNKS * threads.threads
        chunks = NO_CHUNKS if few else np.array(planned, dtype=np.int32)
        at = [ctypes.c_void_p(where) for where in (bounds.ctypes.data, chunks.ctypes.data)]
        model, x = ctypes.byref(self._model), ctypes.c_void_p(x_TD.data_ptr())
        if self._encode(threads.address, model, at[0], len(lengths), at[1], len(chunks), x):
            raise MemoryError(f"no memory for the states of texts of up to {max(lengths)} tokens")
        return x_TD

    def _layer(self, layer: LayerWeights) -> _Layer:
        products = (layer.qkv, layer.out, layer.up, layer.down)
        norms = (layer.attention_norm, layer.feed_forward_norm)
        return _Layer(
            *(self._held.weights(*part) for part in products),
            *(address for norm in norms for address in self._held.norm(norm)),
        )


def chunks_of(lengths: Sequence[int], threads: int) -> list[tuple[int, int]]:
    """Texts [first, last) that one thread computes together; the most rows first, so that the last to end is short."""
    most = min(CHUNK_ROWS, -(-sum(lengths) // (threads * FEW_CHUNKS)))
    chunks, rows = [[0, 0]], [0]
    for at, length in enumerate(lengths):
        if rows[-1] and rows[-1] + length > most:
            chunks.append([at, at])
            rows.append(0)
        chunks[-1][1] = at + 1
        rows[-1] += length
    order = sorted(range(len(chunks)), key=lambda at: -rows[at])
    return [(chunks[at][0], chunks[at][1]) for at in order]
