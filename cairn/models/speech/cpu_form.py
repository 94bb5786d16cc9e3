"""Whisper by our own kernels, on CPUs with NEON or AVX2: the encoder in a few calls, a step of the decoder in one.

encoder    a window of sound has 1500 places, so products are nearly all the work. Convolutions are products whose rows
           overlap. Files store matrices in float16; NEON multiplies them so, twice as many in an instruction
decoder    always in float32, with the weights as they are stored: a step takes as long as reading them
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.kernels.cpu.compiled import ON_ARM
from cairn.kernels.cpu.encoder_layers import EncoderLayers, EncoderShape, LayerWeights
from cairn.kernels.cpu.speech_layers import DecoderLayers, DecoderShape, DecoderWeights
from cairn.kernels.cpu.tiled import Affine, TiledMap, has_tiles
from cairn.models.speech.spec import WhisperSpec

if TYPE_CHECKING:
    from cairn.models.speech.model import Texts, Whisper, WhisperLayer, WhisperNorm

HALF_NOTE = (
    "its encoder multiplies in float16, as its files store it; --dtype float32 does not"
    if ON_ARM
    else "its matrices stay in float16, as its files store them, and are multiplied in float32"
)


def has_compiled_form(spec: WhisperSpec, dtype: torch.dtype) -> bool:
    return has_tiles(dtype, (spec.hidden, spec.intermediate, spec.hidden // spec.heads))


class TiledSound(NamedTuple):
    """Keys and values of each window for every layer of the decoder, as its kernels read them."""

    windows: list[Tensor]

    def rows(self, index_B: Tensor) -> "TiledSound":
        return TiledSound([self.windows[at] for at in index_B.tolist()])


class CompiledWhisper:
    """Compiled Whisper with matrices of a dtype; the parameters of the model are released."""

    def __init__(self, model: "Whisper", dtype: torch.dtype, eps: float) -> None:
        spec, width = model.spec, model.spec.hidden // model.spec.heads
        encoder = cast("list[WhisperLayer]", list(model.encoder))
        decoder = cast("list[WhisperLayer]", list(model.decoder))
        self.spec, self.positions_SD = spec, model.sound_positions.float()
        self.norm, self.eps = _norm(model.encoder_norm), eps
        self.convolutions = [
            TiledMap(_convolution(part, dtype)) for part in (model.conv1, model.conv2)
        ]
        self.encoder = EncoderLayers(
            [_encoder_weights(block, dtype) for block in encoder],
            EncoderShape(spec.heads, width, width**-0.5, eps, "pre"),
        )
        self.keys = [TiledMap(_affine(block.look_kv, dtype)) for block in decoder]
        self.decoder = DecoderLayers(
            [_decoder_weights(block, dtype) for block in decoder],
            model.embedding.detach().to(dtype),
            model.text_positions,
            _norm(model.decoder_norm),
            DecoderShape(spec.heads, width, spec.frames, width**-0.5, eps),
        )
        _release(model)

    @property
    def nbytes(self) -> int:
        parts = (*self.convolutions, self.encoder, *self.keys, self.decoder)
        return sum(part.nbytes for part in parts)

    def encode(self, mel_BMN: Tensor) -> Tensor:
        return torch.stack([self._encode(mel_MN) for mel_MN in mel_BMN.float()])

    def _encode(self, mel_MN: Tensor) -> Tensor:
        """Encode a window to [S, D]. A convolution reads three frames, starting at the previous one."""
        (bins, frames), hidden = mel_MN.shape, self.spec.hidden
        padded_NM = F.pad(mel_MN.t(), (0, 0, 1, 1)).contiguous()
        heard_ND = F.pad(self.convolutions[0](padded_NM, frames, bins, gelu=True), (0, 0, 1, 1))
        heard_SD = self.convolutions[1](heard_ND, (frames + 1) // 2, 2 * hidden, gelu=True)
        x_SD = self.encoder(heard_SD.add_(self.positions_SD), [len(heard_SD)])
        return F.layer_norm(x_SD, (hidden,), *self.norm, self.eps)

    def listen(self, mel_BMN: Tensor) -> TiledSound:
        windows = []
        for mel_MN in mel_BMN.float():
            hidden_SD, sound = self._encode(mel_MN), self.decoder.sound()
            for layer, keys in enumerate(self.keys):
                kv_SE = keys(hidden_SD, len(hidden_SD), self.spec.hidden)
                self.decoder.write_sound(kv_SE, sound, layer)
            windows.append(sound)
        return TiledSound(windows)

    def read(
        self,
        tokens_BS: Tensor,
        texts: "Texts",
        sound: TiledSound,
        slots: Sequence[int] | None,
        last_only: bool,
    ) -> Tensor:
        slots = range(len(tokens_BS)) if slots is None else slots
        windows = [sound.windows[slot] for slot in slots]
        return self.decoder.read(tokens_BS, texts.layers, windows, slots, texts.length, last_only)


def _release(model: "Whisper") -> None:
    """Matrices of which there is a copy in tiles now."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Conv1d):
            part.weight = nn.Parameter(part.weight.to("meta"), requires_grad=False)
    nothing = model.embedding.new_empty(0, model.spec.hidden)  # keeps the device and the type
    model.embedding = nn.Parameter(nothing, requires_grad=False)


def _convolution(part: nn.Conv1d, dtype: torch.dtype) -> Affine:
    """[D, M, 3] as a matrix whose rows are three places, one behind the other."""
    assert part.bias is not None
    return Affine(part.weight.detach().transpose(1, 2).flatten(1).to(dtype), part.bias)


def _affine(part: nn.Linear, dtype: torch.dtype) -> Affine:
    return Affine(part.weight.detach().to(dtype), part.bias)


def _norm(part: "WhisperNorm") -> Affine:
    return Affine(part.weight.float(), part.bias.float())


def _encoder_weights(block: "WhisperLayer", dtype: torch.dtype) -> LayerWeights:
    products = (block.qkv, block.out, block.up, block.down)
    norms = (block.attention_norm, block.feed_forward_norm)
    return LayerWeights(*(_affine(part, dtype) for part in products), *map(_norm, norms))


def _decoder_weights(block: "WhisperLayer", dtype: torch.dtype) -> DecoderWeights:
    products = (block.qkv, block.out, block.look_q, block.look_out, block.up, block.down)
    norms = (block.attention_norm, block.look_norm, block.feed_forward_norm)
    return DecoderWeights(*(_affine(part, dtype) for part in products), *map(_norm, norms))
