"""Qwen-VL: towers with rotary positions for patches of any grid, and decoders whose positions have three axes.

    qwen2_vl     LayerNorm, every patch sees its picture
    qwen2_5_vl   RMSNorm, gated; patches see windows of the picture, but for a few layers
    qwen3_vl     learned positions beside the rotary ones, and rows that the decoder adds in its first layers

No torch.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import activation_of, divide
from cairn.models.spec import ModelSpec, Rope
from cairn.models.vision.spec import ProjectorSpec, TowerSpec, VisionSpec

FLAT = ("qwen2_vl", "qwen2_5_vl")  # have the decoder's fields beside vision_config in old files
TOKENS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
# The text models that these decoders are, but for their rotary positions.
DECODERS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def _qwen2_vl(fields: Fields, vision: Fields, text: dict[str, Any]) -> VisionSpec:
    width = vision.take("embed_dim", int, 1280)
    out = vision.take("hidden_size", int, 3584)
    shape = _shape(
        vision,
        "qwen2_vl",
        width,
        vision.take("mlp_ratio", int, 4) * width,
        norm="layer",
        gated=False,
        activation=activation_of(vision, "hidden_act", "quick_gelu"),
    )
    return _vision(fields, vision, text, _tower(vision, shape, 14), out)


def _qwen2_5_vl(fields: Fields, vision: Fields, text: dict[str, Any]) -> VisionSpec:
    width = vision.take("hidden_size", int, 3584)
    out = vision.take("out_hidden_size", int, 3584)
    inner = vision.take("intermediate_size", int, 3420)
    activation = activation_of(vision, "hidden_act", "silu")
    shape = _shape(
        vision, "qwen2_5_vl", width, inner, norm="rms", gated=True, activation=activation
    )
    window = vision.take("window_size", int, 112)
    merge = vision.take("spatial_merge_size", int, 2)
    patch = vision.take("patch_size", int, 14)
    full = vision.take_list("fullatt_block_indexes", int, [7, 15, 23, 31])
    side = window // merge // patch * merge
    if side < 1:
        raise UnsupportedModel(
            f"vision_config: windows of {window} pixels for patches of {patch}",
            hint="a window holds at least one cell of patches",
        )
    tower = _tower(vision, shape, 14, window=side, full_layers=tuple(full))
    apart = vision.take("tokens_per_second", (int, float), 4)
    spec = _vision(fields, vision, text, tower, out)
    return msgspec.structs.replace(spec, tokens_per_second=float(apart))


def _qwen3_vl(fields: Fields, vision: Fields, text: dict[str, Any]) -> VisionSpec:
    text.setdefault("head_dim", 128)
    width = vision.take("hidden_size", int, 1152)
    out = vision.take("out_hidden_size", int, 3584)
    shape = _shape(
        vision,
        "qwen3_vl",
        width,
        vision.take("intermediate_size", int, 4304),
        norm="layer",
        gated=False,
        activation=activation_of(vision, "hidden_act", "gelu_pytorch_tanh"),
    )
    table = vision.take("num_position_embeddings", int, 2304)
    deep = tuple(vision.take_list("deepstack_visual_indexes", int, [8, 16, 24]))
    tower = _tower(vision, shape, 16, table=int(table**0.5), deep_layers=deep, patch_bias=True)
    if tower.table**2 != table or any(not 0 <= layer < shape.layers for layer in deep):
        raise UnsupportedModel(
            f"vision_config: {table} positions, and rows behind layers {list(deep)} of {shape.layers}",
            hint="positions are a square, and the layers are there",
        )
    start = fields.take("vision_start_token_id", int, 151652)
    end = fields.take("vision_end_token_id", int, 151653)
    spec = _vision(fields, vision, text, tower, out)
    return msgspec.structs.replace(spec, step_tokens=(start, end))


QWEN_READERS: dict[str, Callable[[Fields, Fields, dict[str, Any]], VisionSpec]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}


def _shape(vision: Fields, family: str, width: int, intermediate: int, **rest: Any) -> ModelSpec:
    heads = vision.take("num_heads", int, 16)
    theta = Fields(vision.take("rope_parameters", dict, {}), "rope_parameters")
    rope = Rope(theta=theta.take("rope_theta", float, 10_000.0))
    theta.seen.add("rope_type")
    theta.finish()
    return ModelSpec(
        family=family,
        vocab=1,
        hidden=width,
        layers=vision.take("depth", int, 27 if family == "qwen3_vl" else 32),
        heads=heads,
        kv_heads=heads,
        head_dim=divide(width, heads),
        intermediate=intermediate,
        context=1,
        norm_eps=1e-6,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions="rope",
        rope=rope,
        **rest,
    )


def _tower(vision: Fields, shape: ModelSpec, patch: int, **rest: Any) -> TowerSpec:
    channels = vision.take("in_channels", int, vision.take("in_chans", int, 3))
    patch = vision.take("patch_size", int, vision.take("spatial_patch_size", int, patch))
    if channels != 3 or patch < 1 or shape.head_dim % 4:
        raise UnsupportedModel(
            f"vision_config: {channels} channels, patches of {patch} pixels, heads of {shape.head_dim}",
            hint="pictures of three channels, and heads that four divides, are supported",
        )
    frames = vision.take("temporal_patch_size", int, 2)
    settings: dict[str, Any] = {"patch_bias": False, **rest}
    return TowerSpec(shape, patch, patch, positions="axial", frames=frames, **settings)


def _vision(
    fields: Fields,
    vision: Fields,
    text: dict[str, Any],
    tower: TowerSpec,
    out: int,
) -> VisionSpec:
    fields.seen |= set(TOKENS)
    old = tower.shape.family != "qwen3_vl"
    text.setdefault("rms_norm_eps", 1e-5 if old else 1e-6)
    text.setdefault("rope_theta", 1e6 if old else 5e5)
    hidden = Fields(text, "text_config").take("hidden_size", int)
    if out != hidden:
        raise UnsupportedModel(
            f"vision_config: rows of {out}, and a decoder of width {hidden}",
            hint="the two have to be the same",
        )
    merge = vision.take("spatial_merge_size", int, 2)
    return VisionSpec(
        tower.shape.family,
        tower,
        ProjectorSpec("cells", hidden=hidden, merge=merge),
        fields.take("image_token_id", int, 151655),
        axes=True,
        video_token=fields.take("video_token_id", int, 151656),
    )
