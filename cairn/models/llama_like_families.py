"""Families without experts that say the same as Llama's and a few fields more, each read in a few lines.

What they compute differently are fields of `ModelSpec`; how their tensors are named and ordered is in
`checkpoint_names`. No torch.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import (
    everywhere,
    head_dim_of,
    layer_windows,
    partial_rope,
    read_like_llama,
    rope_from,
    rope_of,
    windows_by_type,
)
from cairn.models.spec import ModelSpec, Rope


def _granite(fields: Fields) -> ModelSpec:
    return read_like_llama(
        fields,
        "granite",
        eps=1e-6,
        mlp_bias=fields.take("mlp_bias", bool, False),
        **_multipliers(fields),
    )


def _multipliers(fields: Fields) -> dict[str, float]:
    """Granite's."""
    return {
        "embedding_scale": fields.take("embedding_multiplier", float, 1.0),
        "query_scale": fields.take_positive("attention_multiplier", float, 1.0),
        "residual_scale": fields.take("residual_multiplier", float, 1.0),
        "logit_divisor": fields.take_positive("logits_scaling", float, 1.0),
    }


def _smollm3(fields: Fields) -> ModelSpec:
    layers = range(fields.take("num_hidden_layers", int))
    every = fields.take_positive("no_rope_layer_interval", int, 4)
    rotates = fields.take_list("no_rope_layers", int, [int((i + 1) % every != 0) for i in layers])
    if len(rotates) < len(layers):
        raise UnsupportedModel(
            f"config.json: no_rope_layers has {len(rotates)} entries, num_hidden_layers is {len(layers)}",
            hint="there is one entry for each layer: compare it with the config of the original checkpoint",
        )
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, 0) if used else 0
    fields.seen |= {"sliding_window", "max_window_layers", "pretraining_tp"}
    nope = tuple(i for i, rotated in zip(layers, rotates, strict=False) if not rotated)
    windows = windows_by_type(fields, window, [bool(window) and i in nope for i in layers])
    return read_like_llama(
        fields,
        "smollm3",
        2e6,
        eps=1e-6,
        tied=fields.take("tie_word_embeddings", bool, True),
        mlp_bias=fields.take("mlp_bias", bool, False),
        nope_layers=nope,
        windows=windows if any(windows) else (),
    )


def _olmo2(fields: Fields) -> ModelSpec:
    return read_like_llama(
        fields, "olmo2", pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over="width"
    )


def _olmo3(fields: Fields) -> ModelSpec:
    """OLMo 2 with windows; only the layers that see everything are stretched."""
    window = fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)
    context = fields.take("max_position_embeddings", int)
    theta = fields.take("rope_theta", float, 5e5)
    settings = dict(fields.take("rope_parameters", dict, {}))
    scaling = fields.take("rope_scaling", dict, {})
    kinds = Fields(settings, "rope_parameters")
    full = kinds.take("full_attention", dict, {}) | scaling
    local = kinds.take("sliding_attention", dict, {})
    kinds.finish()
    rope = rope_of(Fields({"rope_parameters": full}), context, theta)
    rope_local = rope_from(Fields(local, "rope_parameters"), context, 5e5)
    return read_like_llama(
        fields,
        "olmo3",
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_over="width",
        windows=layer_windows(fields, window, every=4),
        rope_local=None if rope_local == rope["rope"] else rope_local,
        **rope,
    )


def _granite4(fields: Fields) -> ModelSpec:
    """The dense models of Granite 4: attention in every layer, and its shared expert alone."""
    layers = fields.take("num_hidden_layers", int)
    kinds = set(fields.take_list("layer_types", str, ["mamba"] * layers))
    if kinds - {"attention", "full_attention"}:
        raise UnsupportedModel(
            f"config.json: layer_types has {', '.join(sorted(kinds))}",
            hint="of Granite 4, the models whose layers all have attention are supported",
        )
    if fields.take("num_local_experts", int, 8):
        raise UnsupportedModel(
            f"config.json: num_local_experts is {fields.config.get('num_local_experts')!r}",
            hint="of Granite 4, the dense models are supported",
        )
    fields.take("num_experts_per_tok", int, 0)
    fields.seen |= {name for name in fields.config if name.startswith("mamba_")}
    fields.seen |= {"time_step_limit", "layers_block_type"}
    rotates = fields.take("position_embedding_type", str, "nope") == "rope"
    fields.neutral(normalization_function="rmsnorm")
    fields.seen.add("init_method")
    return read_like_llama(
        fields,
        "granitemoehybrid",
        eps=1e-6,
        intermediate=fields.take("shared_intermediate_size", int, 1024),
        nope_layers=() if rotates else tuple(range(layers)),
        **_multipliers(fields),
    )


def _exaone4(fields: Fields) -> ModelSpec:
    window = fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)
    usual = 1 if "sliding_window_pattern" in fields.config else 4  # a null one: no windows
    pattern = fields.take("sliding_window_pattern", (int, str), usual)
    every = len(pattern) if isinstance(pattern, str) else pattern
    windows = layer_windows(fields, window, max(every, 1))
    nope = tuple(i for i, window_size in enumerate(windows) if not window_size) if window else ()
    return read_like_llama(
        fields,
        "exaone4",
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        windows=windows if window else (),
        nope_layers=nope,
    )


def _seed_oss(fields: Fields) -> ModelSpec:
    fields.seen.add("residual_dropout")
    return read_like_llama(
        fields,
        "seed_oss",
        eps=1e-6,
        head_dim=head_dim_of(fields, 128),
        qkv_bias=fields.take("attention_bias", bool, True),
        out_bias=fields.take("attention_out_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def _glm4(fields: Fields) -> ModelSpec:
    return read_like_llama(
        fields,
        "glm4",
        eps=1.5625e-7,
        head_dim=head_dim_of(fields, 128),
        post_norms=True,
        qkv_bias=fields.take("attention_bias", bool, True),
        out_bias=False,
        **partial_rope(fields, 0.5, head_dim=128),
    )


def _phi3(fields: Fields) -> ModelSpec:
    context = fields.take("max_position_embeddings", int)
    original = fields.take_positive("original_max_position_embeddings", int, 4096)
    settings = fields.take("rope_parameters", dict, {})
    settings = dict(fields.take("rope_scaling", dict, {}) or settings)
    share = fields.take("partial_rotary_factor", float, 1.0)
    rope = Fields(settings, "rope_parameters")
    share = rope.take("partial_rotary_factor", float, share)
    theta = rope.take("rope_theta", float, fields.take("rope_theta", float, 1e4))
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    size = head_dim_of(fields)
    rotated = int(size * share)
    rope_settings: dict[str, Any] = dict(theta=theta, rotated=0 if rotated == size else rotated)
    if kind != "default":  # "su" and "yarn" are older names of it
        rope.take("original_max_position_embeddings", int, original)
        rope_settings |= dict(
            kind="longrope",
            original_context=original,
            factor=rope.take("factor", float, context / original),
            attention_factor=rope.take("attention_factor", float, None),
            short_factors=tuple(float(x) for x in rope.take_list("short_factor", (int, float), [])),  # type: ignore[arg-type]
            long_factors=tuple(float(x) for x in rope.take_list("long_factor", (int, float), [])),  # type: ignore[arg-type]
        )
    rope.finish()
    windows = everywhere(fields, fields.take("sliding_window", int, 0))
    return read_like_llama(fields, "phi3", rope=Rope(**rope_settings), windows=windows)


def _hunyuan(fields: Fields) -> ModelSpec:
    """A fixed alpha stretches the base once, whatever the name `dynamic` says."""
    fields.seen.add("eod_token_id")
    settings = dict(fields.take("rope_parameters", dict, {}))
    settings = dict(fields.take("rope_scaling", dict, {}) or settings)
    rope = Fields(settings, "rope_parameters")
    alpha, size = rope.take("alpha", float, 0.0), head_dim_of(fields)
    rest: dict[str, Any] = {"qk_norm": True, "qk_norm_rotated": True, "head_dim": size}
    kind = settings.get("rope_type", settings.get("type", "dynamic"))
    if alpha > 0 and kind != "dynamic":
        raise UnsupportedModel(
            f"rope_parameters: alpha {alpha:g} with rope_type {kind}",
            hint="alpha stretches the base of rope_type dynamic",
        )
    if alpha > 0 and size > 2:
        theta = rope.take("rope_theta", float, fields.take("rope_theta", float, 1e4))
        rest["rope"] = Rope(theta=theta * _power(alpha, size / (size - 2)))
        rope.seen |= {"type", "rope_type", "factor", "mscale", "mscale_all_dim"}
        rope.seen |= {"beta_fast", "beta_slow"}
        rope.finish()
    return read_like_llama(fields, "hunyuan_v1_dense", **rest)


def _power(base: float, exponent: float) -> float:
    """Infinite where it is too large; the check of a spec then names it."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _ministral3(fields: Fields) -> ModelSpec:
    context = fields.take("max_position_embeddings", int)
    settings = dict(fields.take("rope_parameters", dict, MINISTRAL_ROPE))
    settings = dict(fields.take("rope_scaling", dict, {}) or settings)
    settings.pop("max_position_embeddings", None)  # the reference reads it nowhere
    inner = Fields(settings, "rope_parameters")
    temperature = inner.take("llama_4_scaling_beta", float, 0.0)
    settings.pop("llama_4_scaling_beta", None)
    theta = fields.take("rope_theta", float, 1e4)
    rope = rope_of(Fields({"rope_parameters": settings}), context, theta)
    if temperature and rope["rope"].original_context:
        rope["rope"] = msgspec.structs.replace(rope["rope"], temperature=temperature)
    windows = everywhere(fields, fields.take("sliding_window", int, 0))
    return read_like_llama(
        fields, "ministral3", head_dim=head_dim_of(fields, 128), windows=windows, **rope
    )


MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DESCRIBED: dict[str, Callable[[Fields], ModelSpec]] = {
    "phi3": _phi3,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoehybrid": _granite4,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
    "glm4": _glm4,
    "hunyuan_v1_dense": _hunyuan,
    "ministral3": _ministral3,
}
