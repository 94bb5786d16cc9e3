"""The fast forms of an encoder on a CPU.

    with NEON    all layers of a batch in one call of our kernels, for BERT and RoBERTa in float32
    elsewhere    the first product of each feed-forward is fused with its GELU, by oneDNN
"""

import torch
from torch import Tensor, nn

from cairn.kernels.cpu.encoder_layers import Affine, EncoderLayers, LayerWeights, has_encoder_layers
from cairn.models.attend import Attend
from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.model import Encoder, EncoderLayer, LayerNorm
from cairn.models.linear.fused_gelu import FusedGelu, has_fused_gelu
from cairn.models.linear.maps import Linear


def give_cpu_forms(model: nn.Module) -> bool:
    """Give the model what is fastest here; False: nothing is, and the plain form runs."""
    if not isinstance(model, Encoder) or not has_fused_gelu(model.embedding.weight):
        return False
    shape = model.spec.shape
    if shape.activation != "gelu" or shape.gated or not shape.mlp_bias:
        return False
    layers = [layer for layer in model.layers if isinstance(layer, EncoderLayer)]
    if _has_compiled(model):
        model.compiled = CompiledLayers(model, layers)
        return True
    for layer in layers:
        inner = layer.feed_forward.inner
        layer.fused_up = FusedGelu(inner.joined(), _bias(inner))
    return True


class CompiledLayers:
    """All layers by one call; holds a second copy of their matrices, because torch computes what this does not cover."""

    def __init__(self, model: Encoder, layers: list[EncoderLayer]) -> None:
        shape = model.spec.shape
        weights = [_layer_weights(layer) for layer in layers]
        self.layers = EncoderLayers(
            weights, shape.heads, shape.head_dim, shape.scale, shape.norm_eps
        )

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor | None:
        """Written into `x_TD`; None: not by this form."""
        fits = isinstance(attend, Bidirectional) and not attend.plain
        if not fits or torch.is_grad_enabled() or not self.layers.covers(attend.lengths):
            return None
        return self.layers(x_TD, attend.lengths)


def _has_compiled(model: Encoder) -> bool:
    """Layers of BERT and RoBERTa: norms behind, biases everywhere, no rotation and no window."""
    spec, shape = model.spec, model.spec.shape
    sizes = (shape.hidden, shape.intermediate, shape.head_dim)
    return (
        spec.norms == "post"
        and spec.norm_bias
        and spec.first_norm
        and shape.positions == "learned"
        and shape.qkv_bias
        and shape.out_bias
        and shape.kv_heads == shape.heads
        and not (shape.qk_norm or any(shape.windows) or shape.attention_softcap)
        and has_encoder_layers(*sizes)
    )


def _layer_weights(layer: EncoderLayer) -> LayerWeights:
    attention, feed_forward = layer.attention, layer.feed_forward
    products = (attention.qkv, attention.out, feed_forward.inner, feed_forward.down)
    norms = (layer.attention_norm, layer.feed_forward_norm)
    return LayerWeights(*map(_product, products), *map(_norm, norms))


def _product(given: Linear) -> Affine:
    return Affine(given.joined(), _bias(given))


def _bias(given: Linear) -> Tensor:
    return torch.cat([owner.bias for owner in given.owners()]).detach()  # type: ignore[misc]


def _norm(given: LayerNorm | None) -> Affine:
    if given is None or given.bias is None:
        raise TypeError("the kernel norms both sums of a layer, with a bias")
    return Affine(given.weight, given.bias)
