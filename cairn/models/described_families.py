"""Families that say the same as Llama's and a few fields more, each read in a few lines.

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
    layer_windows,
    llama_like,
    rope_from,
    rope_of,
    windows_by_type,
)
from cairn.models.spec import Experts, ModelSpec, Rope


def _read(fields: Fields, family: str, theta: float = 1e4, **rest: Any) -> ModelSpec:
    """`rest`: what differs from Llama, and the defaults that do."""
    context = fields.take("max_position_embeddings", int)
    if "rope" not in rest:
        rest |= rope_of(fields, context, theta)
    eps = fields.take("rms_norm_eps", float, rest.pop("eps", 1e-5))
    return llama_like(fields, family, norm_eps=eps, **rest)


def _head_dim(fields: Fields, default: int = 0) -> int:
    """`default`: where the field is absent; a null one is the width divided by the heads."""
    default = 0 if "head_dim" in fields.config else default
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    return fields.take("head_dim", int, default) or hidden // max(heads, 1)


def partial_rope(
    fields: Fields, share: float, theta: float = 1e4, head_dim: int = 0
) -> dict[str, Any]:
    """Rotary positions of some of a head's columns; the share stands beside the others or among them."""
    context = fields.take("max_position_embeddings", int)
    share = fields.take("partial_rotary_factor", float, share)
    theta = fields.take("rope_theta", float, theta)
    parameters = fields.take("rope_parameters", dict, {})
    settings = dict(fields.take("rope_scaling", dict, {}) or parameters)
    share = Fields(settings, "rope_parameters").take("partial_rotary_factor", float, share)
    settings.pop("partial_rotary_factor", None)
    rope = rope_of(Fields({"rope_parameters": settings}), context, theta)
    size = _head_dim(fields, head_dim)
    rotated = int(size * share)
    rotated = 0 if rotated == size else rotated
    return rope | {"rope": msgspec.structs.replace(rope["rope"], rotated=rotated)}


def _granite(fields: Fields) -> ModelSpec:
    return _read(
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
    return _read(
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
    return _read(
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
    return _read(
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
    return _read(
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
    return _read(
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
    return _read(
        fields,
        "seed_oss",
        eps=1e-6,
        head_dim=_head_dim(fields, 128),
        qkv_bias=fields.take("attention_bias", bool, True),
        out_bias=fields.take("attention_out_bias", bool, False),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def _glm4(fields: Fields) -> ModelSpec:
    return _read(
        fields,
        "glm4",
        eps=1.5625e-7,
        head_dim=_head_dim(fields, 128),
        post_norms=True,
        qkv_bias=fields.take("attention_bias", bool, True),
        out_bias=False,
        **partial_rope(fields, 0.5, head_dim=128),
    )


def _sigmoid_experts(fields: Fields, **rest: Any) -> Experts:
    """DeepSeek's words: sigmoid scores, a bias for the choice, groups, shared experts, dense layers first."""
    width = fields.take("moe_intermediate_size", int, 1408)
    settings: dict[str, Any] = dict(
        count=fields.take("n_routed_experts", int, 128),
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=width,
        gate="sigmoid",
        choice_bias=True,
        scale=fields.take("routed_scaling_factor", float, 1.0),
        groups=fields.take_positive("n_group", int, 1),
        top_groups=fields.take_positive("topk_group", int, 1),
        shared_intermediate=width * fields.take("n_shared_experts", int, 1),
    )
    return Experts(**settings | rest)


def _first_dense(fields: Fields, default: int) -> tuple[int, ...]:
    return tuple(range(fields.take("first_k_dense_replace", int, default)))


def _glm4_moe(fields: Fields) -> ModelSpec:
    fields.seen |= {"num_nextn_predict_layers", "num_mtp_layers"}  # layers that are left out
    experts = _sigmoid_experts(
        fields,
        renormalize=fields.take("norm_topk_prob", bool, True),
        dense_layers=_first_dense(fields, 1),
    )
    return _read(
        fields,
        "glm4_moe",
        experts=experts,
        qk_norm=fields.take("use_qk_norm", bool, False),
        qkv_bias=fields.take("attention_bias", bool, False),
        out_bias=False,
        **partial_rope(fields, 0.5),
    )


def _dots1(fields: Fields) -> ModelSpec:
    layers = range(fields.take("num_hidden_layers", int))
    window = fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)
    first = fields.take("max_window_layers", int, 62)
    windows = windows_by_type(fields, window, [bool(window) and i >= first for i in layers])
    fields.neutral(scoring_func="noaux_tc", topk_method="noaux_tc", moe_layer_freq=1)
    if not window:
        fields.neutral(use_sliding_window=False)
    experts = _sigmoid_experts(
        fields,
        renormalize=fields.take("norm_topk_prob", bool, False),
        dense_layers=_first_dense(fields, 0),
    )
    return _read(
        fields,
        "dots1",
        eps=1e-6,
        experts=experts,
        qk_norm=True,
        windows=windows if any(windows) else (),
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
    size = _head_dim(fields)
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
    return _read(fields, "phi3", rope=Rope(**rope_settings), windows=windows)


def _hunyuan(fields: Fields) -> ModelSpec:
    """A fixed alpha stretches the base once, whatever the name `dynamic` says."""
    fields.seen.add("eod_token_id")
    settings = dict(fields.take("rope_parameters", dict, {}))
    settings = dict(fields.take("rope_scaling", dict, {}) or settings)
    rope = Fields(settings, "rope_parameters")
    alpha, size = rope.take("alpha", float, 0.0), _head_dim(fields)
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
    return _read(fields, "hunyuan_v1_dense", **rest)


def _power(base: float, exponent: float) -> float:
    """Infinite where it is too large; the check of a spec then names it."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _minimax_m2(fields: Fields) -> ModelSpec:
    """Published configs also have what the code of its authors can do besides, and layers that are left out."""
    fields.neutral(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        attn_type_list=[1] * fields.take("num_hidden_layers", int),  # 1: attention
        shared_intermediate_size=0,
        sliding_window=None,
        **dict.fromkeys(MINIMAX_BETAS, 1.0),
    )
    fields.seen |= {"mlp_intermediate_size", "shared_moe_mode"}  # of layers that it has none of
    fields.seen |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
    size = _head_dim(fields, 128)
    rotated = fields.take("rotary_dim", int, size)
    experts = Experts(
        count=fields.take("num_local_experts", int, 256),
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=fields.take("intermediate_size", int),
        gate="sigmoid",
        choice_bias=True,
    )
    return _read(
        fields,
        "minimax_m2",
        eps=1e-6,
        experts=experts,
        head_dim=size,
        qk_norm=True,
        qk_norm_over="width",
        **partial_rope(fields, rotated / size, 5e6, head_dim=128),
    )


def _ernie4_5_moe(fields: Fields) -> ModelSpec:
    layers = fields.take("num_hidden_layers", int)
    width = fields.take("moe_intermediate_size", int, 1536)
    every = fields.take_positive("moe_layer_interval", int, 1)
    first = fields.take("moe_layer_start_index", int, 1)
    last = fields.take("moe_layer_end_index", int, -1)
    last = layers - 1 if last == -1 else last
    fields.neutral(moe_gate="topk", moe_use_aux_free=True)
    # One keeps a sum of zero from dividing, one drops tokens in training, one counts layers that are left out.
    fields.seen |= {"moe_norm_min", "moe_capacity", "num_nextn_predict_layers"}
    dense = tuple(i for i in range(layers) if (i + 1) % every or not first <= i <= last)
    experts = Experts(
        count=fields.take("moe_num_experts", int, 64),
        per_token=fields.take("moe_k", int, 6),
        intermediate=width,
        choice_bias=True,
        shared_intermediate=width * fields.take("moe_num_shared_experts", int, 2),
        dense_layers=dense,
    )
    tied = fields.take("tie_word_embeddings", bool, True)
    return _read(fields, "ernie4_5_moe", 5e5, tied=tied, experts=experts)


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
    return _read(fields, "ministral3", head_dim=_head_dim(fields, 128), windows=windows, **rope)


MINIMAX_BETAS = tuple(
    f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")
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
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "hunyuan_v1_dense": _hunyuan,
    "ministral3": _ministral3,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
}
