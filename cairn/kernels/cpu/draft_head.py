"""All passes of an EAGLE-3 head behind a step in one compiled call (`draft_head.h`).

    hidden states, tokens behind them -> drafts [B, K], and the chance of each among the tokens that the head knows

With `least`, no further pass is made once the chance that all drafts so far hold is below it in every sequence.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import library
from cairn.kernels.cpu.decoder_layer import DecoderLayer
from cairn.kernels.cpu.packed_product import Blocks, NormWeight, PackedMatrix, pool
from cairn.kernels.cpu.paged_decode import DecodeHeads, Sequences


class _Head(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layer", "fuse", "scores")),
        *((name, ctypes.c_void_p) for name in ("of_token", "of_hidden", "last")),
        *((name, ctypes.c_void_p) for name in ("packed_tokens", "tokens", "token_of")),
        *((name, ctypes.c_void_p) for name in ("frequency", "of_cosine", "of_sine")),
        *((name, ctypes.c_int32) for name in ("width", "normed_residual", "vocabulary")),
    )


class _Drafted(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("following", "positions", "ends", "lengths")),
        ("tapped", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("taps", "tokens", "passes")),
    )


class HeadParts(NamedTuple):
    """Parts of a draft head; linear maps with a bias are not supported."""

    fuse: PackedMatrix
    qkv: PackedMatrix
    out: PackedMatrix
    inner: PackedMatrix
    down: PackedMatrix
    scores: PackedMatrix
    of_token: NormWeight
    of_hidden: NormWeight
    before_inner: NormWeight
    last: NormWeight
    heads: DecodeHeads
    activation: str
    embedding: Blocks | Tensor  # packed, or float32 [V, D]
    token_of: Tensor  # of the target's vocabulary, for each of the head's own
    waves_3C: Tensor | None  # frequencies, and what cosines and sines are multiplied with
    normed_residual: bool


class Guesses(NamedTuple):
    drafts_BK: Tensor
    chances_BK: Tensor  # 0 of those that were not made
    made: int


class DraftHead:
    def __init__(self, parts: HeadParts) -> None:
        p = parts
        self.layer = DecoderLayer(
            _address(p.qkv.struct_of(None, None, False)),
            _address(p.out.struct_of(None, None, True)),
            _address(p.inner.struct_of(None, p.activation, False)),
            _address(p.down.struct_of(None, None, True)),
            before_inner=_address(p.before_inner.struct),
            heads=_address(p.heads.struct),
        )
        packed = PackedMatrix([p.embedding]) if isinstance(p.embedding, Blocks) else None
        waves = None if p.waves_3C is None else p.waves_3C.float().contiguous()
        token_of = p.token_of.int().contiguous()
        self._kept = parts, packed, waves, token_of  # whose addresses are used
        self.struct = _Head(
            _address(self.layer),
            _address(p.fuse.struct_of(None, None, False)),
            _address(p.scores.struct_of(None, None, False)),
            *(_address(norm.struct) for norm in (p.of_token, p.of_hidden, p.last)),
            None if packed is None else packed.part_address(0),
            p.embedding.data_ptr() if isinstance(p.embedding, Tensor) else None,
            token_of.data_ptr(),
            *((None, None, None) if waves is None else (wave.data_ptr() for wave in waves)),
            *(p.out.outputs, p.normed_residual, p.scores.outputs),
        )
        self._draft = library().cairn_draft

    def draft(
        self,
        tapped: Sequence[Tensor],
        following_T: Tensor,
        positions_T: Tensor,
        ends_B: Tensor,
        lengths_B: Tensor,
        sequences: Sequences,
        pages: tuple[int, int, int],
        passes: int,
        least: Sequence[float] | None = None,
    ) -> Guesses:
        """`ends_B`: the newest token of each sequence that holds, and `lengths_B` its tokens up to there.

        `pages`: where keys and values of the head's layer begin, and its cache group.
        """
        self.layer.keys, self.layer.values, self.layer.group = pages
        kept = [part.int().contiguous() for part in (following_T, positions_T, ends_B, lengths_B)]
        states = [part.contiguous() for part in tapped]
        taps = (ctypes.c_void_p * len(states))(*(part.data_ptr() for part in states))
        given = _Drafted(
            *(part.data_ptr() for part in kept),
            *(ctypes.addressof(taps), len(states), len(following_T), passes),
        )
        bars = None if least is None else (ctypes.c_float * max(len(least), 1))(*least)
        drafts_BK = torch.zeros(len(ends_B), passes, dtype=torch.int32)
        chances_BK = torch.zeros(len(ends_B), passes)
        made = self._draft(
            *(
                pool().address,
                ctypes.byref(self.struct),
                sequences.array,
                ctypes.byref(given),
                bars,
            ),
            *(ctypes.c_void_p(part.data_ptr()) for part in (drafts_BK, chances_BK)),
        )
        if made < 0:
            raise MemoryError(f"no memory for the drafts of {len(following_T)} tokens")
        return Guesses(drafts_BK, chances_BK, made)


def _address(struct: Any) -> int:
    return ctypes.addressof(struct)
