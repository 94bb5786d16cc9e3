"""T5 (arXiv:1910.10683): an encoder reads a text both ways, a decoder writes another and looks at the first.

    source [S] -encoder-> memory [S, D] -keys, values of each layer-> Memory, once
    answer [T] -decoder: itself up to here, then the memory-> logits [T, V]

Positions are biases: how far a key lies from a query falls into a bucket, and each head adds the bucket's number to the
score. The first layer of each stack holds them for all. Scores are not scaled. One text at a time, written to be read.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.activation import ACTIVATIONS
from cairn.models.cpu_half_precision import HalfPrecisionLinear, attention, linear
from cairn.models.text_to_text.spec import T5Spec


class EncoderMemory(NamedTuple):
    """Keys and values of the encoded text, for each layer of the decoder: [H, S, C]."""

    layers: list[tuple[Tensor, Tensor]]


class DecodedTokens:
    """Keys and values of the answer so far, for each layer of the decoder: [H, T, C]."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def extend(self, layer: int, k_HTC: Tensor, v_HTC: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            keys, values = self.layers[layer]
            k_HTC, v_HTC = torch.cat((keys, k_HTC), 1), torch.cat((values, v_HTC), 1)
        self.layers[layer] = k_HTC, v_HTC
        return k_HTC, v_HTC


class T5Attention(nn.Module):
    def __init__(self, spec: T5Spec) -> None:
        super().__init__()
        width, self.heads = spec.heads * spec.head_dim, spec.heads
        self.q = HalfPrecisionLinear(spec.hidden, width, bias=False)
        self.k = HalfPrecisionLinear(spec.hidden, width, bias=False)
        self.v = HalfPrecisionLinear(spec.hidden, width, bias=False)
        self.o = HalfPrecisionLinear(width, spec.hidden, bias=False)

    def split(self, y_TE: Tensor) -> Tensor:
        """[H, T, C]."""
        return y_TE.unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def keys(self, x_SD: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.k(x_SD)), self.split(self.v(x_SD))

    def forward(self, x_TD: Tensor, kept: tuple[Tensor, Tensor], bias_HTS: Tensor | None) -> Tensor:
        k_HSC, v_HSC = kept
        y_HTC = attention(
            self.split(self.q(x_TD))[None], k_HSC[None], v_HSC[None], attn_mask=bias_HTS, scale=1.0
        )[0]
        return self.o(y_HTC.transpose(0, 1).flatten(1))


class T5FeedForward(nn.Module):
    def __init__(self, spec: T5Spec) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[spec.activation], spec.gated
        self.gate = (
            HalfPrecisionLinear(spec.hidden, spec.intermediate, bias=False) if spec.gated else None
        )
        self.up = HalfPrecisionLinear(spec.hidden, spec.intermediate, bias=False)
        self.down = HalfPrecisionLinear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_TD)))
        return self.down(self.activation(self.gate(x_TD)) * self.up(x_TD))


class T5Layer(nn.Module):
    """A layer of the encoder, or of the decoder, which looks at the encoded text as well."""

    def __init__(self, spec: T5Spec, looks: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(spec)
        self.attention = T5Attention(spec)
        self.look_norm = _norm(spec) if looks else None
        self.look = T5Attention(spec) if looks else None
        self.feed_forward_norm = _norm(spec)
        self.feed_forward = T5FeedForward(spec)


class T5(nn.Module):
    """Built empty, on the meta device; `text_to_text.load` fills it."""

    def __init__(self, spec: T5Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Parameter(torch.empty(spec.vocab, spec.hidden))
        self.encoder = nn.ModuleList(T5Layer(spec, False) for _ in range(spec.encoder_layers))
        self.encoder_bias = nn.Parameter(torch.empty(spec.buckets, spec.heads))
        self.encoder_norm = _norm(spec)
        self.decoder = nn.ModuleList(T5Layer(spec, True) for _ in range(spec.decoder_layers))
        self.decoder_bias = nn.Parameter(torch.empty(spec.buckets, spec.heads))
        self.decoder_norm = _norm(spec)
        self.head = nn.Parameter(torch.empty(spec.vocab, spec.hidden))

    def encode(self, tokens_S: Tensor) -> Tensor:
        """The hidden states of a text, [S, D]."""
        x_SD = F.embedding(tokens_S, self.embedding)
        place_S = torch.arange(len(tokens_S), device=tokens_S.device)
        bias_HSS = self._bias(self.encoder_bias, place_S, place_S, both_ways=True)
        for block in self.encoder:
            assert isinstance(block, T5Layer)
            normed_SD = block.attention_norm(x_SD)
            attended = block.attention(normed_SD, block.attention.keys(normed_SD), bias_HSS)
            x_SD = x_SD + attended
            x_SD = x_SD + block.feed_forward(block.feed_forward_norm(x_SD))
        return self.encoder_norm(x_SD)

    def remember(self, tokens_S: Tensor) -> EncoderMemory:
        """Encode tokens to the keys and values that the decoder attends to."""
        return self.keys_of(self.encode(tokens_S))

    def keys_of(self, memory_SD: Tensor) -> EncoderMemory:
        """Cross-attention keys and values of encoded text for every decoder layer."""
        looks = [block.look for block in self.decoder]
        return EncoderMemory(
            [look.keys(memory_SD) for look in looks if isinstance(look, T5Attention)]
        )

    def read(self, tokens_T: Tensor, written: DecodedTokens, memory: EncoderMemory) -> Tensor:
        """Logits behind each of these tokens, which continue the answer; [T, V] in float32."""
        x_TD = F.embedding(tokens_T, self.embedding)
        end = written.length + len(tokens_T)
        key_N = torch.arange(end, device=tokens_T.device)
        query_T = key_N[written.length :]
        bias_HTN = self._bias(self.decoder_bias, query_T, key_N, both_ways=False)
        for at, block in enumerate(self.decoder):
            assert isinstance(block, T5Layer)
            normed_TD = block.attention_norm(x_TD)
            kept = written.extend(at, *block.attention.keys(normed_TD))
            x_TD = x_TD + block.attention(normed_TD, kept, bias_HTN)
            if block.look is not None and block.look_norm is not None:
                x_TD = x_TD + block.look(block.look_norm(x_TD), memory.layers[at], None)
            x_TD = x_TD + block.feed_forward(block.feed_forward_norm(x_TD))
        written.length = end
        hidden_TD = self.decoder_norm(x_TD)
        scale = self.spec.hidden**-0.5 if self.spec.scaled else 1.0
        return linear(hidden_TD * scale, self.head).float()

    def _bias(self, table_BH: Tensor, query_T: Tensor, key_N: Tensor, *, both_ways: bool) -> Tensor:
        """Attention bias [H, T, N]; minus infinity for keys that are masked in a decoder."""
        behind_TN = query_T[:, None] - key_N
        bucket_TN = buckets_of(behind_TN, self.spec.buckets, self.spec.farthest, both_ways)
        bias_HTN = table_BH[bucket_TN].permute(2, 0, 1)
        return bias_HTN if both_ways else bias_HTN.masked_fill(behind_TN < 0, -torch.inf)


def buckets_of(behind: Tensor, buckets: int, farthest: int, both_ways: bool) -> Tensor:
    """A bucket for each distance: one for each near one, then wider ones that grow with the logarithm."""
    first = torch.zeros_like(behind)
    if both_ways:
        buckets //= 2
        first = (behind < 0).long() * buckets
        behind = behind.abs()
    behind = behind.clamp(min=0)
    near = buckets // 2
    growth = torch.log(behind.clamp(min=1).float() / near) / math.log(farthest / near)
    far = (near + (growth * (buckets - near)).long()).clamp(max=buckets - 1)
    return first + torch.where(behind < near, behind, far)


@torch.no_grad()
def answer(model: T5, source: Sequence[int], most: int) -> Iterator[int]:
    """The likeliest tokens one after another, up to one that ends the answer, which is left out."""
    device = model.embedding.device
    memory, written = model.remember(torch.tensor(source, device=device)), DecodedTokens()
    last = model.spec.start_id
    for _ in range(most):
        logits_1V = model.read(torch.tensor([last], device=device), written, memory)
        last = int(logits_1V[-1].argmax())
        if last in model.spec.eos_ids:
            return
        yield last


def _norm(spec: T5Spec) -> nn.RMSNorm:
    return nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
