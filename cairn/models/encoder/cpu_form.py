"""The fast forms of an encoder on a CPU.

with NEON or AVX2    all layers of a batch in one call of our kernels, for BERT and RoBERTa
elsewhere            the first product of each feed-forward is fused with its GELU, by oneDNN
"""

import torch
from torch import Tensor, nn

from cairn.kernels.cpu.encoder_layers import EncoderLayers, EncoderShape, LayerWeights
from cairn.kernels.cpu.tiled import Affine, has_tiles
from cairn.models.encoder.model import Encoder, EncoderLayer, LayerNorm
from cairn.models.linear.fused_gelu import FusedGelu, has_fused_gelu
from cairn.models.linear.maps import Linear


def give_cpu_forms(model: nn.Module) -> bool:
    """Give the model what is fastest here; False: nothing is, and the plain form runs."""
    if not isinstance(model, Encoder) or model.embedding.weight.device.type != "cpu":
        return False
    shape = model.spec.shape
    if shape.activation != "gelu" or shape.gated or not shape.mlp_bias:
        return False
    layers = [layer for layer in model.layers if isinstance(layer, EncoderLayer)]
    if _has_compiled(model):
        model.compiled = _compiled(model, layers)
        return True
    if not has_fused_gelu(model.embedding.weight):
        return False
    for layer in layers:
        inner = layer.feed_forward.inner
        layer.fused_up = FusedGelu(inner.joined(), _bias(inner))
    return True


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
        and has_tiles(model.embedding.weight.dtype, sizes)
    )


def _compiled(model: Encoder, layers: list[EncoderLayer]) -> EncoderLayers:
    """Compile the layers with packed matrices and release those of the modules."""
    shape = model.spec.shape
    described = EncoderShape(shape.heads, shape.head_dim, shape.scale, shape.norm_eps, "post")
    compiled = EncoderLayers([_layer_weights(layer) for layer in layers], described)
    for layer in layers:
        for part in _products(layer):
            part.release()
    return compiled


def _products(layer: EncoderLayer) -> list[Linear]:
    attention, feed_forward = layer.attention, layer.feed_forward
    return [attention.qkv, attention.out, feed_forward.inner, feed_forward.down]


def _layer_weights(layer: EncoderLayer) -> LayerWeights:
    products = [Affine(part.joined(), _bias(part)) for part in _products(layer)]
    norms = [_norm(norm) for norm in (layer.attention_norm, layer.feed_forward_norm)]
    return LayerWeights(*products, *norms)


def _bias(linear: Linear) -> Tensor:
    return torch.cat([owner.bias for owner in linear.owners()]).detach()  # type: ignore[misc]


def _norm(norm: LayerNorm | None) -> Affine:
    if norm is None or norm.bias is None:
        raise TypeError("the kernel norms both sums of a layer, with a bias")
    return Affine(norm.weight, norm.bias)
