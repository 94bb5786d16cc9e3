"""Whisper: an encoder of sound and a decoder of text that looks at it.

    mel [B, bins, 3000] -two convolutions-> [B, 1500, D] -layers-> sound [B, 1500, D] -keys, values-> Sound, once
    tokens [B, S] -embed-> -layers: itself, then the sound-> logits [B, S, V]

Every text looks at exactly 1500 places of sound, so their keys and values have a fixed place for each row and need no
pages. `Texts` holds the keys of the tokens so far, one row for each window of sound; rows grow together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.cpu_half_precision import Conv1d, HalfPrecisionLinear, attention, linear
from cairn.models.linear.fused_gelu import FusedGelu, has_fused_gelu
from cairn.models.speech.cpu_form import CompiledWhisper, TiledSound, has_compiled_form
from cairn.models.speech.spec import WhisperSpec

EPS = 1e-5


class Sound(NamedTuple):
    """Keys and values of the encoded sound, for each layer of the decoder: [B, H, 1500, C]."""

    layers: list[tuple[Tensor, Tensor]]

    def rows(self, index_B: Tensor) -> "Sound":
        return Sound([(k[index_B], v[index_B]) for k, v in self.layers])


Sounds = Sound | TiledSound


def joined(parts: Sequence[Sounds]) -> Sounds:
    """Rows behind rows, all of one form."""
    tiled = [part for part in parts if isinstance(part, TiledSound)]
    if tiled:
        return TiledSound([window for part in tiled for window in part.windows])
    layers = zip(*(part.layers for part in parts if isinstance(part, Sound)), strict=True)
    pairs = [zip(*layer, strict=True) for layer in layers]
    return Sound([(torch.cat(keys), torch.cat(values)) for keys, values in pairs])


class Texts:
    """Keys and values of the tokens that the decoder has read, for each of its layers."""

    def __init__(self, spec: WhisperSpec, rows: int, weight: Tensor) -> None:
        shape = (2, rows, spec.heads, spec.context, spec.hidden // spec.heads)
        self.layers = [weight.new_empty(shape) for _ in range(spec.decoder_layers)]
        self.length = 0

    def extend(self, layer: int, k_BHSC: Tensor, v_BHSC: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k_BHSC.shape[2]
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = k_BHSC
        values[:, :, self.length : end] = v_BHSC
        return keys[:, :, :end], values[:, :, :end]


class WhisperNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)


class WhisperLayer(nn.Module):
    """A layer of the encoder, or of the decoder, which looks at the sound as well."""

    def __init__(self, spec: WhisperSpec, looks: bool) -> None:
        super().__init__()
        width = spec.hidden
        self.heads = spec.heads
        self.attention_norm = WhisperNorm(width)
        self.qkv = HalfPrecisionLinear(width, 3 * width)
        self.out = HalfPrecisionLinear(width, width)
        if looks:
            self.look_norm = WhisperNorm(width)
            self.look_q = HalfPrecisionLinear(width, width)
            self.look_kv = HalfPrecisionLinear(width, 2 * width)
            self.look_out = HalfPrecisionLinear(width, width)
        self.feed_forward_norm = WhisperNorm(width)
        self.up = HalfPrecisionLinear(width, spec.intermediate)
        self.down = HalfPrecisionLinear(spec.intermediate, width)
        self.fused_up: FusedGelu | None = None  # on a CPU, in place of `up` and its GELU

    def split(self, x_BSE: Tensor, parts: int) -> list[Tensor]:
        """Joined heads apart, [B, H, S, C] each."""
        return [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in x_BSE.chunk(parts, -1)
        ]

    def feed_forward(self, x_BSD: Tensor) -> Tensor:
        normed_BSD = self.feed_forward_norm(x_BSD)
        if self.fused_up is None:
            return x_BSD + self.down(F.gelu(self.up(normed_BSD)))
        return x_BSD + self.down(self.fused_up(normed_BSD))

    def encode(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(self.attention_norm(x_BSD)), 3)
        return self.feed_forward(x_BSD + self.out(_attended(q, k, v)))

    def decode(self, x_BSD: Tensor, layer: int, texts: Texts, sound: Sound) -> Tensor:
        q, k, v = self.split(self.qkv(self.attention_norm(x_BSD)), 3)
        keys, values = texts.extend(layer, k, v)
        x_BSD = x_BSD + self.out(_attended(q, keys, values, causal=True))
        (q,) = self.split(self.look_q(self.look_norm(x_BSD)), 1)
        return self.feed_forward(x_BSD + self.look_out(_attended(q, *sound.layers[layer])))


class Whisper(nn.Module):
    """Built empty, on the meta device; `speech.load` fills it."""

    def __init__(self, spec: WhisperSpec) -> None:
        super().__init__()
        self.spec = spec
        self.conv1 = Conv1d(spec.bins, spec.hidden, 3, padding=1)
        self.conv2 = Conv1d(spec.hidden, spec.hidden, 3, stride=2, padding=1)
        self.sound_positions = nn.Parameter(torch.empty(spec.frames, spec.hidden))
        self.encoder = nn.ModuleList(WhisperLayer(spec, False) for _ in range(spec.encoder_layers))
        self.encoder_norm = WhisperNorm(spec.hidden)
        self.embedding = nn.Parameter(torch.empty(spec.vocab, spec.hidden))
        self.text_positions = nn.Parameter(torch.empty(spec.context, spec.hidden))
        self.decoder = nn.ModuleList(WhisperLayer(spec, True) for _ in range(spec.decoder_layers))
        self.decoder_norm = WhisperNorm(spec.hidden)
        self.compiled: CompiledWhisper | None = None  # all of it, on some CPUs

    @property
    def forms(self) -> list[CompiledWhisper]:
        """Weights that are stored outside of the parameters."""
        return [] if self.compiled is None else [self.compiled]

    def fuse(self, stored: torch.dtype) -> None:
        """The fast forms, where there are some; once the weights are there. `stored`: the type of compiled matrices."""
        if self.embedding.device.type == "cpu" and has_compiled_form(self.spec, stored):
            self.compiled = CompiledWhisper(self, stored, EPS)
        elif has_fused_gelu(self.embedding):
            for block in [*self.encoder, *self.decoder]:
                up = block.up
                block.fused_up = FusedGelu(up.weight, up.bias)  # type: ignore[arg-type, union-attr]

    def texts(self, rows: int) -> Texts:
        """Decoder state; float32 with compiled layers, which compute in float32."""
        like = self.embedding if self.compiled is None else self.embedding.float()
        return Texts(self.spec, rows, like)

    def listen(self, mel_BMN: Tensor) -> Sounds:
        """Encode the audio to the keys and values that the decoder attends to."""
        if self.compiled is not None:
            return self.compiled.listen(mel_BMN)
        hidden_BSD = self.encode(mel_BMN.to(self.embedding.dtype))
        layers = []
        for block in self.decoder:
            k, v = block.split(block.look_kv(hidden_BSD), 2)  # type: ignore[operator]
            layers.append((k.contiguous(), v.contiguous()))
        return Sound(layers)

    def encode(self, mel_BMN: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled.encode(mel_BMN)
        x_BDS = F.gelu(self.conv2(F.gelu(self.conv1(mel_BMN))))
        x_BSD = x_BDS.transpose(1, 2) + self.sound_positions
        for block in self.encoder:
            x_BSD = block.encode(x_BSD)  # type: ignore[operator]
        return self.encoder_norm(x_BSD)

    def read(
        self,
        tokens_BS: Tensor,
        texts: Texts,
        sound: Sounds,
        last_only: bool = False,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits behind each of these tokens, or behind the last ones, which continue the texts; [B, S, V] in float32.

        `slots` are the rows of texts and sound that these tokens belong to; None, and without compiled layers: all.
        """
        if isinstance(sound, TiledSound):
            assert self.compiled is not None
            logits_BSV = self.compiled.read(tokens_BS, texts, sound, slots, last_only)
            texts.length += tokens_BS.shape[1]
            return logits_BSV
        places_S = slice(texts.length, texts.length + tokens_BS.shape[1])
        x_BSD = F.embedding(tokens_BS, self.embedding) + self.text_positions[places_S]
        for at, block in enumerate(self.decoder):
            x_BSD = block.decode(x_BSD, at, texts, sound)  # type: ignore[operator]
        texts.length += tokens_BS.shape[1]
        x_BSD = x_BSD[:, -1:] if last_only else x_BSD
        return linear(self.decoder_norm(x_BSD), self.embedding).float()


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """[B, S, H * C]; a causal query sees the keys up to its own, which is the last of them."""
    mask_SN = None
    if causal and q.shape[2] > 1:
        ones_SN = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask_SN = ones_SN.tril(k.shape[2] - q.shape[2])
    y_BHSC = attention(q, k, v, attn_mask=mask_SN)
    return y_BHSC.transpose(1, 2).flatten(2)
