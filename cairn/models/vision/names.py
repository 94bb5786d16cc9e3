"""Under which names do checkpoints store a tower, a projector and the decoder beside them?

    "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"  ->  tower       encoder.layers.0.mlp.fc1.weight
    "multi_modal_projector.linear_1.weight"                            ->  projector   linear_1.weight
    "language_model.model.layers.0.mlp.up_proj.weight"                 ->  text        model.layers.0.mlp.up_proj.weight

The same model is stored under several prefixes, by the version of the library that wrote it. Only names; no torch.
"""

import re
from typing import Literal, NamedTuple

from cairn.models.checkpoint_names import TensorLocation

Part = Literal["tower", "projector", "text"]
TOWER = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|vision_encoder|visual)\.(?:vision_model\.)?(.+)$"
)
PROJECTOR = re.compile(
    r"^(?:model\.)?(?:multi_modal_projector\.|connector\.|visual\.(?=merger\.|deepstack_merger_list\.))(.+)$"
)
TEXT = re.compile(r"^(?:language_model\.model|model\.language_model|model\.text_model)\.(.+)$")
HEAD = re.compile(r"^(?:language_model\.)?(lm_head\..+)$")
# Of the tower alone, for pooled vectors of whole pictures, which no decoder reads.
UNUSED = re.compile(r"(^head\.|position_ids$)")

LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class TowerStyle(NamedTuple):
    outside: dict[str, str]  # slots and what stands for them, kind included where it differs
    layer: str
    inside: dict[str, str]
    joined: bool = False  # q, k and v are stored in one tensor


SIGLIP = TowerStyle(
    outside={
        "patch_embedding": "embeddings.patch_embedding",
        "position_embedding": "embeddings.position_embedding",
        "class_token.weight": "embeddings.class_embedding",
        "pre_norm": "pre_layrnorm",  # as CLIP's checkpoints spell it
        "post_norm": "post_layernorm",
    },
    layer="encoder.layers.",
    inside={
        "attention_norm": "layer_norm1",
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.out": "self_attn.out_proj",
        "feed_forward_norm": "layer_norm2",
        "feed_forward.inner.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    },
)
PIXTRAL = TowerStyle(
    outside={"patch_embedding": "patch_conv", "pre_norm": "ln_pre"},
    layer="transformer.layers.",
    inside={
        "attention_norm": "attention_norm",
        "attention.qkv.q": "attention.q_proj",
        "attention.qkv.k": "attention.k_proj",
        "attention.qkv.v": "attention.v_proj",
        "attention.out": "attention.o_proj",
        "feed_forward_norm": "ffn_norm",
        "feed_forward.inner.gate": "feed_forward.gate_proj",
        "feed_forward.inner.up": "feed_forward.up_proj",
        "feed_forward.down": "feed_forward.down_proj",
    },
)
QKV = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v")


def _qwen(**feed_forward: str) -> TowerStyle:
    return TowerStyle(
        outside={"patch_embedding": "patch_embed.proj", "position_table": "pos_embed"},
        layer="blocks.",
        inside={
            "attention_norm": "norm1",
            **dict.fromkeys(QKV, "attn.qkv"),
            "attention.out": "attn.proj",
            "feed_forward_norm": "norm2",
            **{f"feed_forward.{slot}": f"mlp.{name}" for slot, name in feed_forward.items()},
        },
        joined=True,
    )


GATED = {"inner.gate": "gate_proj", "inner.up": "up_proj", "down": "down_proj"}
TOWERS = {
    "siglip": SIGLIP,
    "clip": SIGLIP,
    "pixtral": PIXTRAL,
    "qwen2_vl": _qwen(**{"inner.up": "fc1", "down": "fc2"}),
    "qwen2_5_vl": _qwen(**GATED),
    "qwen3_vl": _qwen(**{"inner.up": "linear_fc1", "down": "linear_fc2"}),
}
MLP = {"first": "linear_1", "second": "linear_2"}
PROJECTORS = {
    "mlp": MLP,
    "shuffled": {"map": "modality_projection.proj"},
    "linear": {"map": "linear"},
    "pooled": {"map.weight": "mm_input_projection_weight", "norm": "mm_soft_emb_norm"},
    "merged_mlp": MLP | {"merge": "patch_merger.merging_layer", "norm": "norm"},
    "cells": {"norm": "merger.ln_q", "first": "merger.mlp.0", "second": "merger.mlp.2"},
}
QWEN3_CELLS = {"norm": "norm", "first": "linear_fc1", "second": "linear_fc2"}
TRANSPOSED = ("mm_input_projection_weight",)
DEEP = re.compile(r"deep\.(\d+)\.(.+)")


def part_of(name: str) -> tuple[Part, str]:
    """Part of a stored tensor, and its name within the part; tensors without a prefix belong to the text model."""
    for pattern, part in ((PROJECTOR, "projector"), (TOWER, "tower")):
        if match := pattern.match(name):
            return part, match[1]  # type: ignore[return-value]
    if match := TEXT.match(name):
        return "text", f"model.{match[1]}"
    if match := HEAD.match(name):
        return "text", match[1]
    return "text", name


def tower_source(style: str, projector: str, slot: str, width: int) -> tuple[Part, TensorLocation]:
    """The tensor of a slot of `Tower`, without the prefix of its part; `width`: of the tower's layers."""
    if slot.startswith("projector."):
        return "projector", _of_projector(style, projector, slot.removeprefix("projector."))
    if deep := DEEP.fullmatch(slot):
        source = _named(deep[2], QWEN3_CELLS)
        return "projector", TensorLocation(f"deepstack_merger_list.{deep[1]}.{source.tensor}")
    names = TOWERS[style]
    if inside := LAYER.fullmatch(slot):
        source = _named(inside[2], names.inside)
        source = source._replace(tensor=f"{names.layer}{inside[1]}.{source.tensor}")
        path = inside[2].rpartition(".")[0]
        if names.joined and path in QKV:
            part = QKV.index(path)
            source = source._replace(part=part, parts=3, start=part * width, rows=3 * width)
        return "tower", source
    return "tower", _named(slot, names.outside)


def _of_projector(style: str, projector: str, slot: str) -> TensorLocation:
    names = PROJECTORS[projector]
    if style == "qwen3_vl":
        names = {slot: f"merger.{name}" for slot, name in QWEN3_CELLS.items()}
    source = _named(slot, names)
    return source._replace(transposed=source.tensor in TRANSPOSED)


def _named(slot: str, names: dict[str, str]) -> TensorLocation:
    path, _, kind = slot.rpartition(".")
    stored = names[slot] if slot in names else f"{names[path]}.{kind}"
    return TensorLocation(stored)
