"""An encoder's weights: under which names checkpoints in Hugging Face's format store them, and into the model.

Tensors of heads that are not used here (the masked language model's, the pooler of a model without a classifier) are
left in the file; anything else that has no place is an error.
"""

import re

import torch

from cairn.core.errors import WeightsError
from cairn.models.build import ModelBuild, Slot
from cairn.models.checkpoint_names import TensorLocation
from cairn.models.encoder.model import Encoder
from cairn.models.encoder.spec import EncoderSpec
from cairn.models.safetensors_file import TensorSource
from cairn.models.weights import fill_shares, read_source

BERT = {
    "embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "type_embedding": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "attention.qkv.q": "attention.self.query",
    "attention.qkv.k": "attention.self.key",
    "attention.qkv.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.inner.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
MODERNBERT = {
    "embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "norm": "final_norm",
    "attention.qkv.q": "attn.Wqkv",
    "attention.qkv.k": "attn.Wqkv",
    "attention.qkv.v": "attn.Wqkv",
    "attention.out": "attn.Wo",
    "attention_norm": "attn_norm",
    "feed_forward.inner.gate": "mlp.Wi",
    "feed_forward.inner.up": "mlp.Wi",
    "feed_forward.down": "mlp.Wo",
    "feed_forward_norm": "mlp_norm",
}
PARTS = {"q": (0, 3), "k": (1, 3), "v": (2, 3), "gate": (0, 2), "up": (1, 2)}
STYLES = {"bert": (BERT, "encoder.layer."), "roberta": (BERT, "encoder.layer.")}
STYLES |= {"modernbert": (MODERNBERT, "layers.")}
PREFIXES = ("", "bert.", "roberta.", "camembert.", "model.")
HEADS = re.compile(r"(^|\.)(position_ids$|(pooler|cls|lm_head|classifier|head|decoder)\.)")
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def load_encoder(spec: EncoderSpec, tensors: TensorSource, build: ModelBuild) -> Encoder:
    """A model with a checkpoint's weights; `build` says where and in which type."""
    model = Encoder(spec, build._replace(device="meta"))
    slots = list(model.slots())
    where = _locate(spec, slots, tensors)
    with torch.no_grad():
        shares = {slot.name: read_source(slot, where[slot.name], tensors) for slot in slots}
        fill_shares(model, shares, build.device)
    return model.requires_grad_(False).eval()


def source_of(family: str, slot: str) -> TensorLocation:
    """The tensor of a slot, without the prefix that checkpoints of a whole architecture have."""
    names, layers = STYLES[family]
    path, _, kind = slot.rpartition(".")
    prefix = ""
    if inside := LAYER.fullmatch(path):
        prefix, path = f"{layers}{inside[1]}.", inside[2]
    stored = names[path]
    joined = list(names.values()).count(stored) > 1
    part, parts = PARTS[path.rpartition(".")[2]] if joined else (0, 1)
    return TensorLocation(f"{prefix}{stored}.{kind}", part=part, parts=parts)


def prefix_of(tensors: TensorSource, family: str) -> str:
    """Prefix of the encoder's tensor names."""
    embedding = source_of(family, "embedding.weight").tensor
    present = set(tensors.names())
    matching = next((prefix for prefix in PREFIXES if prefix + embedding in present), None)
    if matching is None:
        raise WeightsError(
            f"the checkpoint has no tensor {embedding}",
            hint="the weights do not belong to this config.json, or the download is incomplete",
        )
    return matching


def _locate(
    spec: EncoderSpec, slots: list[Slot], tensors: TensorSource
) -> dict[str, TensorLocation]:
    """Source tensor of each slot; missing or unexpected tensors raise."""
    family, present = spec.shape.family, set(tensors.names())
    prefix = prefix_of(tensors, family)
    where = {}
    for slot in slots:
        place, rows = source_of(family, slot.name), slot.shape[0]
        name = _spelled(prefix + place.tensor, present)
        if place.parts > 1:  # all parts of a tensor are equally large
            place = place._replace(start=rows * place.part, rows=rows * place.parts)
        where[slot.name] = place._replace(tensor=name)
    needed = {place.tensor for place in where.values()}
    if missing := sorted(needed - present):
        raise WeightsError(
            f"{len(missing)} of {len(needed)} tensors are missing, such as {missing[0]}",
            hint="the weights do not belong to this config.json, or the download is incomplete",
        )
    extra = sorted(name for name in present - needed if not HEADS.search(name))
    if extra:
        raise WeightsError(
            f"{len(extra)} tensors have no place in a {family} encoder of {spec.shape.layers} "
            f"layers, such as {extra[0]}",
            hint="the config.json does not describe these weights",
        )
    return where


def _spelled(name: str, present: set[str]) -> str:
    """The oldest checkpoints call the two vectors of a norm gamma and beta."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    old = old.replace("LayerNorm.bias", "LayerNorm.beta")
    return old if name not in present and old in present else name
