"""Readers of config.json with a text_config and a vision_config.

    split_config(config) -> (config of the decoder, VisionSpec)

As in `models.families`, a reader takes the fields that it understands and refuses the others by name. No torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import activation_of, divide
from cairn.models.spec import ModelSpec, Rope
from cairn.models.vision.qwen_families import DECODERS, FLAT, QWEN_READERS, TOKENS
from cairn.models.vision.spec import ProjectorSpec, TowerSpec, VisionSpec

# What a Llama is where its config does not say, as the reference fills it in.
LLAMA_SIZES = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
# Fields of a tower that change nothing here.
UNUSED = {
    "projection_dim",
    "initializer_factor",
    "vocab_size",
    "vision_use_head",
    "use_base_siglip",
}
UNUSED |= {"size", "max_image_size", "head_dim", "tie_word_embeddings"}
# Fields that SmolVLM's text_config carries and no decoder reads.
NOISE = {"_flash_attn_2_enabled", "neftune_noise_alpha", "perceiver_config", "use_resampler"}
NOISE |= {"pixel_shuffle_factor", "qk_layer_norms"}
REFUSED = {  # what would have to be built, where a family is known and not whole
    "gemma3n": "its tower is a convolutional network",
    "gemma4": "tokens of a picture see each other both ways",
    "qwen3_vl_moe": "experts that are stored in one tensor, beside rows for several layers",
    "qwen3_5": "a state beside the cache",
    "llava_next": "pictures in tiles of several shapes",
    "llava_onevision": "pictures in tiles of several shapes",
    "mllama": "cross-attention to pictures",
    "idefics2": "a resampler between tower and decoder",
    "internvl": "a tower with scaled residuals",
}


def has_vision(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("vision_config"), Mapping)


def split_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], VisionSpec]:
    """The decoder's config and the rest."""
    kind = str(config.get("model_type"))
    if kind not in READERS:
        why = f": it needs {REFUSED[kind]}" if kind in REFUSED else ""
        raise UnsupportedModel(
            f"pictures of model_type {kind!r} are not supported{why}",
            hint=f"models that see: {', '.join(sorted(READERS))}",
        )
    fields = Fields(config)
    fields.seen.add("_pad_token_id")
    text = {k: v for k, v in _text_config(fields).items() if k not in NOISE}
    vision = Fields(fields.take("vision_config", dict), "vision_config")
    if fields.take("tie_word_embeddings", bool, kind in TIED):
        # The whole model's word; a head in the file says otherwise.
        text["tie_word_embeddings"] = True
    for name in ("quantization_config", "dtype", "torch_dtype"):
        if name in config:
            text.setdefault(name, config[name])
    if text.get("model_type", "llama") == "llama":
        text = LLAMA_SIZES | text
    spec = READERS[kind](fields, vision, text)
    decoder = str(text.get("model_type"))
    text["model_type"] = DECODERS.get(decoder, decoder)
    fields.finish()
    vision.seen |= UNUSED
    vision.finish()
    return text, spec


def _text_config(fields: Fields) -> dict[str, Any]:
    """The decoder's fields, which older checkpoints of Qwen-VL have beside `vision_config`."""
    if "text_config" in fields.config or fields.config.get("model_type") not in FLAT:
        return fields.take("text_config", dict, {})
    own = ("vision_config", "model_type", "architectures", *TOKENS)
    text = {key: value for key, value in fields.config.items() if key not in own}
    fields.seen |= set(text)
    return {**text, "model_type": f"{fields.config['model_type']}_text"}


def _llava(fields: Fields, vision: Fields, text: Mapping[str, Any]) -> VisionSpec:
    fields.seen |= {"image_seq_length", "ignore_index", "vocab_size", "hidden_size"}
    kind = vision.config.get("model_type", "clip_vision_model")
    layer = fields.take("vision_feature_layer", int, -2)
    strategy = fields.take("vision_feature_select_strategy", str, "default")
    if kind not in TOWERS:
        raise UnsupportedModel(
            f"vision_config: model_type {kind!r} is not supported",
            hint=f"towers of a {fields.config.get('model_type')}: {', '.join(TOWERS)}",
        )
    tower = TOWERS[kind](vision, layer)
    expected = "default" if tower.class_token else "full"
    if strategy != expected:
        raise UnsupportedModel(
            f"config.json: vision_feature_select_strategy is {strategy!r}, of a {kind}",
            hint=f"for this tower it is {expected!r}",
        )
    projector = ProjectorSpec(
        "mlp",
        hidden=_hidden(text),
        bias=fields.take("multimodal_projector_bias", bool, True),
        activation=activation_of(fields, "projector_hidden_act", "gelu"),
    )
    token = fields.take("image_token_id", int, fields.take("image_token_index", int, 32000))
    return VisionSpec("pixtral" if kind == "pixtral" else "llava", tower, projector, token)


def _idefics3(fields: Fields, vision: Fields, text: Mapping[str, Any]) -> VisionSpec:
    merge = fields.take("scale_factor", int, 2)
    tower = _siglip(vision, -1)
    tower = TowerSpec(tower.shape, tower.patch, tower.image, post_norm=True)
    projector = ProjectorSpec("shuffled", hidden=_hidden(text), bias=False, merge=merge)
    return VisionSpec("idefics3", tower, projector, fields.take("image_token_id", int, 128257))


def _gemma3(fields: Fields, vision: Fields, text: Mapping[str, Any]) -> VisionSpec:
    tower = msgspec.structs.replace(_siglip(vision, -1), post_norm=True)
    rows = fields.take("mm_tokens_per_image", int, 256)
    side = math.isqrt(max(rows, 1))
    if side * side != rows or tower.side % side:
        raise UnsupportedModel(
            f"config.json: {rows} tokens for {tower.side} x {tower.side} patches",
            hint="they have to be a square that divides the patches",
        )
    pooled = ProjectorSpec(
        "pooled",
        hidden=_hidden(text),
        bias=False,
        merge=tower.side // side,
        norm_eps=tower.shape.norm_eps,
    )
    token = fields.take("image_token_id", int, fields.take("image_token_index", int, 262_144))
    begin = fields.take("boi_token_id", int, fields.take("boi_token_index", int, 255_999))
    end = fields.take("eoi_token_id", int, fields.take("eoi_token_index", int, 256_000))
    return VisionSpec(
        "gemma3", tower, pooled, token, sees="piece", begin_token=begin, end_token=end
    )


def _paligemma(fields: Fields, vision: Fields, text: dict[str, Any]) -> VisionSpec:
    for name in ("use_bidirectional_attention", "num_image_tokens"):  # said by `sees` and the tower
        text.pop(name, None)
    fields.seen |= {"vocab_size", "hidden_size", "projection_dim", "ignore_index"}
    vision.seen |= {"num_image_tokens", "projector_hidden_act"}
    tower = msgspec.structs.replace(_siglip(vision, -1), post_norm=True)
    linear = ProjectorSpec("linear", hidden=_hidden(text))
    token = fields.take("image_token_id", int, fields.take("image_token_index", int, 256_000))
    return VisionSpec("paligemma", tower, linear, token, sees="prompt")


def _mistral3(fields: Fields, vision: Fields, text: Mapping[str, Any]) -> VisionSpec:
    tower = _pixtral(vision, fields.take("vision_feature_layer", int, -1))
    projector = ProjectorSpec(
        "merged_mlp",
        hidden=_hidden(text),
        bias=fields.take("multimodal_projector_bias", bool, False),
        activation=activation_of(fields, "projector_hidden_act", "gelu"),
        merge=fields.take("spatial_merge_size", int, 2),
        norm_eps=Fields(text, "text_config").take("rms_norm_eps", float, 1e-6),
    )
    token = fields.take("image_token_id", int, fields.take("image_token_index", int, 10))
    return VisionSpec("pixtral", tower, projector, token)


READERS: dict[str, Callable[[Fields, Fields, dict[str, Any]], VisionSpec]] = {
    "llava": _llava,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "mistral3": _mistral3,
    **QWEN_READERS,
}
TIED = ("gemma3", "paligemma", "mistral3")  # share embedding and head where nothing is said


def _clip(fields: Fields, layer: int) -> TowerSpec:
    activation = activation_of(fields, "hidden_act", "quick_gelu")
    shape = _shape(fields, "clip", layer, activation=activation, norm_eps=_eps(fields, 1e-5))
    return TowerSpec(
        shape, *_sizes(fields, 32, 224), patch_bias=False, class_token=True, pre_norm=True
    )


def _siglip(fields: Fields, layer: int) -> TowerSpec:
    activation = activation_of(fields, "hidden_act", "gelu_pytorch_tanh")
    shape = _shape(fields, "siglip", layer, activation=activation, norm_eps=_eps(fields, 1e-6))
    return TowerSpec(shape, *_sizes(fields, 16, 224))


def _pixtral(fields: Fields, layer: int) -> TowerSpec:
    theta = fields.take("rope_theta", float, 10_000.0)
    parameters = Fields(fields.take("rope_parameters", dict, {}), "rope_parameters")
    theta = parameters.take("rope_theta", float, theta)
    parameters.seen |= {"rope_type", "max_position_embeddings"}
    parameters.finish()
    shape = _shape(
        fields,
        "pixtral",
        layer,
        norm="rms",
        norm_eps=1e-5,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        gated=True,
        activation=activation_of(fields, "hidden_act", "gelu"),
        positions="rope",
        rope=Rope(theta=theta),
    )
    return TowerSpec(
        shape, *_sizes(fields, 16, 1024), positions="rotary", patch_bias=False, pre_norm=True
    )


TOWERS: dict[str, Callable[[Fields, int], TowerSpec]] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
}


def _shape(fields: Fields, family: str, layer: int, **rest: Any) -> ModelSpec:
    """The layers in front of the hidden states that are read: `layer` counts those as Python counts a list's items."""
    hidden = fields.take("hidden_size", int, 1024 if family == "pixtral" else 768)
    heads = fields.take("num_attention_heads", int, 16 if family == "pixtral" else 12)
    layers = fields.take("num_hidden_layers", int, 24 if family == "pixtral" else 12)
    used = layer if layer >= 0 else layers + 1 + layer
    if not 1 <= used <= layers or fields.take("num_channels", int, 3) != 3:
        raise UnsupportedModel(
            f"config.json: hidden states {layer} of a tower of {layers} layers and "
            f"{fields.config.get('num_channels', 3)} channels",
            hint="those behind one of the layers are supported, of pictures of three channels",
        )
    settings: dict[str, Any] = dict(
        family=family,
        vocab=1,
        hidden=hidden,
        layers=used,
        heads=heads,
        kv_heads=heads,
        head_dim=divide(hidden, heads),
        intermediate=fields.take("intermediate_size", int, 4096 if family == "pixtral" else 3072),
        context=1,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        positions="learned",
    )
    return ModelSpec(**settings | rest)


def _sizes(fields: Fields, patch: int, image: int) -> tuple[int, int]:
    patch, image = fields.take("patch_size", int, patch), fields.take("image_size", int, image)
    if patch < 1 or image < patch:
        raise UnsupportedModel(
            f"vision_config: patches of {patch} pixels in pictures of {image}",
            hint="compare it with the config of the original checkpoint",
        )
    return patch, image


def _eps(fields: Fields, default: float) -> float:
    return fields.take("layer_norm_eps", float, default)


def _hidden(text: Mapping[str, Any]) -> int:
    return Fields(text, "text_config").take("hidden_size", int)
