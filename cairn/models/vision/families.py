"""Which model does a config.json with a text_config and a vision_config describe?

    split_config(config) -> (config of the decoder, VisionSpec)

As in `models.families`, a reader takes the fields that it understands and refuses the others by name. No torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import activation_of, divide
from cairn.models.spec import ModelSpec, Rope
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
    "gemma3": "tokens of a picture see each other both ways",
    "paligemma": "tokens of a picture see each other both ways",
    "gemma3n": "its tower is a convolutional network",
    "gemma4": "tokens of a picture see each other both ways",
    "qwen2_vl": "rotary positions of three axes",
    "qwen2_5_vl": "rotary positions of three axes",
    "qwen3_vl": "rotary positions of three axes, and rows that are added in several layers",
    "qwen3_vl_moe": "rotary positions of three axes, and rows that are added in several layers",
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
    text = {k: v for k, v in fields.take("text_config", dict, {}).items() if k not in NOISE}
    vision = Fields(fields.take("vision_config", dict), "vision_config")
    if fields.take("tie_word_embeddings", bool, False):
        text.setdefault("tie_word_embeddings", True)
    for name in ("quantization_config", "dtype", "torch_dtype"):
        if name in config:
            text.setdefault(name, config[name])
    if text.get("model_type", "llama") == "llama":
        text = LLAMA_SIZES | text
    spec = READERS[kind](fields, vision, text)
    fields.finish()
    vision.seen |= UNUSED
    vision.finish()
    return text, spec


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
    wanted = "default" if tower.class_token else "full"
    if strategy != wanted:
        raise UnsupportedModel(
            f"config.json: vision_feature_select_strategy is {strategy!r}, of a {kind}",
            hint=f"for this tower it is {wanted!r}",
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


READERS: dict[str, Callable[[Fields, Fields, Mapping[str, Any]], VisionSpec]] = {
    "llava": _llava,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}


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
    given: dict[str, Any] = dict(
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
    return ModelSpec(**given | rest)


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
