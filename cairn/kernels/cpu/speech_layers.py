"""A step of a decoder of speech through all its layers in one call of the compiled kernels.

    sound [1500, D] --keys and values of each layer--> tiles, once for a window
    tokens [B, S] --embed, layers, logits--> [B, S, V]

Numbers are float32. Weights may be stored in float16, and so are the keys and values of the sound then; they are
widened in registers, because a step takes as long as reading its weights. Plain form: `models/speech/model.py`.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import speech_library
from cairn.kernels.cpu.packed_product import pool
from cairn.kernels.cpu.tiled import Affine, Held, Weights

WHOLE = 16  # places of sound are filled up to a multiple of it


class DecoderWeights(NamedTuple):
    """Weights of a layer; the first six have one dtype."""

    qkv: Affine
    out: Affine
    look: Affine  # queries to the sound
    look_out: Affine
    up: Affine
    down: Affine
    norm: Affine
    look_norm: Affine
    feed_forward_norm: Affine


class DecoderShape(NamedTuple):
    heads: int
    width: int  # of a head
    places: int  # of the sound
    scale: float  # of scores
    eps: float  # of norms


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Weights) for name in ("qkv", "out", "look", "look_out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "norm_bias", "look_norm")),
        *((name, ctypes.c_void_p) for name in ("look_norm_bias", "feed_norm", "feed_norm_bias")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p), ("vocabulary", Weights), ("positions", ctypes.c_void_p),
        ("norm", ctypes.c_void_p), ("norm_bias", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("count", "hidden", "inner", "heads", "width")),
        *((name, ctypes.c_int32) for name in ("context", "places", "is_half")),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float),
    )  # fmt: skip


class _Rows(ctypes.Structure):
    _fields_ = (
        ("texts", ctypes.c_void_p), ("sounds", ctypes.c_void_p), ("slots", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("all_slots", "rows", "tokens", "length")),
    )  # fmt: skip


class DecoderLayers:
    """Holds its own copy of the matrices, the embedding among them, in the order of its tiles."""

    def __init__(
        self,
        layers: Sequence[DecoderWeights],
        embedding_VD: Tensor,
        positions_ND: Tensor,
        norm: Affine,
        shape: DecoderShape,
    ) -> None:
        self._held = Held()
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self.shape, self.vocabulary, self.dtype = shape, len(embedding_VD), embedding_VD.dtype
        inner, hidden = layers[0].up.weight.shape
        self._model = _Model(
            ctypes.addressof(self._layers),
            self._held.weights(embedding_VD, None),
            self._held.address(positions_ND.float()),
            *self._held.norm(norm),
            *(len(layers), hidden, inner, shape.heads, shape.width, len(positions_ND)),
            *(shape.places, self.dtype == torch.float16, shape.scale, shape.eps),
        )
        owner = speech_library()
        self._sound, self._read = owner.cairn_speech_sound, owner.cairn_speech_read

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    def sound(self) -> Tensor:
        """Room for the keys and values of a window: [layers, heads * keys and values]."""
        places = -(-self.shape.places // WHOLE) * WHOLE
        numbers = 2 * self.shape.heads * places * self.shape.width
        return torch.empty(len(self._layers), numbers, dtype=self.dtype)

    def write_sound(self, kv_SE: Tensor, sound: Tensor, layer: int) -> None:
        """Keys and values of one layer, [places, 2 * hidden] in float32, side by side."""
        model, kv, to = ctypes.byref(self._model), kv_SE.data_ptr(), sound[layer].data_ptr()
        if self._sound(pool().address, model, ctypes.c_void_p(kv), ctypes.c_void_p(to)):
            raise MemoryError("no memory for the keys of a window of sound")

    def read(
        self,
        tokens_BS: Tensor,
        texts: Sequence[Tensor],
        sounds: Sequence[Tensor],
        slots: Sequence[int],
        length: int,
        last_only: bool,
    ) -> Tensor:
        """Logits behind each token, or the last of each row, [B, S, V].

        `texts` has the keys and values of each layer, [2, slots, H, context, C] in float32, of which row i has the slot
        slots[i]; `length` tokens were read before these.
        """
        (rows, count), tokens = tokens_BS.shape, tokens_BS.long().contiguous()
        self._check(tokens, texts, length + count)
        out = torch.empty(rows, 1 if last_only else count, self._model.vocabulary.columns)
        pointers = (ctypes.c_void_p * len(texts))(*(text.data_ptr() for text in texts))
        windows = (ctypes.c_void_p * rows)(*(sound.data_ptr() for sound in sounds))
        places = (ctypes.c_int32 * rows)(*slots)
        at = [ctypes.cast(array, ctypes.c_void_p) for array in (pointers, windows, places)]
        given = _Rows(*at, texts[0].shape[1], rows, count, length)
        failed = self._read(
            *(pool().address, ctypes.byref(self._model), ctypes.byref(given)),
            *(ctypes.c_void_p(tokens.data_ptr()), last_only, ctypes.c_void_p(out.data_ptr())),
        )
        if failed:
            raise MemoryError(f"no memory for {rows * count} rows of a decoder of speech")
        return out[..., : self.vocabulary]

    def _check(self, tokens: Tensor, texts: Sequence[Tensor], length: int) -> None:
        """Raise for arguments that would access memory out of bounds."""
        if length > self._model.context:
            raise ValueError(f"{length} tokens of text, and the model has {self._model.context}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary:
            raise ValueError(f"a token is outside of the vocabulary of {self.vocabulary}")
        if not all(text.dtype == torch.float32 and text.is_contiguous() for text in texts):
            raise ValueError("the texts of compiled layers are contiguous and in float32")

    def _layer(self, layer: DecoderWeights) -> _Layer:
        norms = [address for norm in layer[6:] for address in self._held.norm(norm)]
        return _Layer(*(self._held.weights(*part) for part in layer[:6]), *norms)
