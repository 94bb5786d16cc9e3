"""The layers of Whisper's encoder in one call of our kernels, on CPUs with NEON.

A window of sound has 1500 places, so the products of the encoder are nearly all the work. Files store their matrices in
float16; multiplied so, they are twice as many in an instruction, and the rest of the model stays in float32.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from cairn.kernels.cpu.encoder_layers import (
    Affine,
    EncoderLayers,
    EncoderShape,
    LayerWeights,
    has_encoder_layers,
)
from cairn.models.speech.spec import WhisperSpec

if TYPE_CHECKING:
    from cairn.models.speech.model import Block


def has_compiled_encoder(spec: WhisperSpec, dtype: torch.dtype) -> bool:
    return has_encoder_layers(dtype, (spec.hidden, spec.intermediate, spec.hidden // spec.heads))


def compiled_encoder(
    blocks: Iterable["Block"], spec: WhisperSpec, dtype: torch.dtype, eps: float
) -> EncoderLayers:
    """With matrices of this type; those of the blocks are given back."""
    held = list(blocks)
    width = spec.hidden // spec.heads
    made = EncoderLayers(
        [_weights(block, dtype) for block in held],
        EncoderShape(spec.heads, width, width**-0.5, eps, "pre"),
    )
    for block in held:
        for part in (block.qkv, block.out, block.up, block.down):
            part.weight = nn.Parameter(part.weight.to("meta"), requires_grad=False)
    return made


def _weights(block: "Block", dtype: torch.dtype) -> LayerWeights:
    products = (block.qkv, block.out, block.up, block.down)
    norms = (block.attention_norm, block.feed_forward_norm)
    return LayerWeights(
        *(Affine(part.weight.to(dtype), part.bias) for part in products),
        *(Affine(norm.weight, norm.bias) for norm in norms),
    )
