"""The fast form of an encoder on a CPU: the first product of each feed-forward is fused with its GELU."""

import torch
from torch import nn

from cairn.models.encoder.model import Encoder, EncoderLayer
from cairn.models.linear.fused_gelu import FusedGelu, has_fused_gelu


def give_cpu_forms(model: nn.Module) -> bool:
    """Fuse what can be fused; False: nothing can, and the plain form is what runs."""
    if not isinstance(model, Encoder) or not has_fused_gelu(model.embedding.weight):
        return False
    shape = model.spec.shape
    if shape.activation != "gelu" or shape.gated or not shape.mlp_bias:
        return False
    for layer in model.layers:
        if isinstance(layer, EncoderLayer):
            inner = layer.feed_forward.inner
            bias_N = torch.cat([owner.bias for owner in inner.owners()])  # type: ignore[misc]
            layer.fused_up = FusedGelu(inner.joined(), bias_N)
    return True
