"""Readers of config.json for DeepSeek and gpt-oss.

Both have experts; DeepSeek has latent attention, and gpt-oss sinks, alternating windows and biases everywhere.
"""

import math
from collections.abc import Callable
from typing import Any

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import layer_windows, llama_like, rope_of
from cairn.models.spec import CLAMPED_ALPHA, Experts, Latent, ModelSpec, Rope


def _deepseek(fields: Fields, family: str) -> ModelSpec:
    latent = _latent(fields, family)
    context = fields.take("max_position_embeddings", int)
    positions = rope_of(fields, context, 10_000.0)
    head_dim = latent.unrotated + latent.rotated
    # The reference reads head_dim as the rotated columns; qk_head_dim and kv heads follow from the others.
    heads = fields.take("num_attention_heads", int)
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads", "num_nextn_predict_layers"):
        fields.take(name, int, 0)
    fields.take(
        "num_mtp_layers", int, 0
    )  # layers beside the decoder's own, which predict further tokens
    return llama_like(
        fields,
        family,
        mixer="latent",
        latent=latent,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        query_scale=head_dim**-0.5 * _yarn_correction(positions["rope"]),
        experts=_deepseek_experts(fields, family),
        mlp_bias=fields.take("mlp_bias", bool, False),
        **positions,
    )


def _latent(fields: Fields, family: str) -> Latent:
    interleaved = fields.take("rope_interleave", bool, True) if family == "deepseek_v3" else True
    return Latent(
        rank=fields.take_positive("kv_lora_rank", int, 512),
        unrotated=fields.take("qk_nope_head_dim", int, 128),
        rotated=fields.take_positive("qk_rope_head_dim", int, 64),
        value=fields.take_positive("v_head_dim", int, 128),
        query_rank=fields.take("q_lora_rank", int, 0 if "q_lora_rank" in fields.config else 1536),
        interleaved=interleaved,
    )


def _yarn_correction(rope: Rope) -> float:
    """DeepSeek scales scores by the square of YaRN's amplitude, where a config has mscale_all_dim."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _deepseek_experts(fields: Fields, family: str) -> Experts:
    """V3 scores by sigmoid, chooses by score and bias and weighs without it; V2 has a softmax and no bias."""
    third = family == "deepseek_v3"
    intermediate = fields.take("moe_intermediate_size", int, 2048 if third else 1407)
    shared = fields.take("n_shared_experts", int, 1 if third else 2)
    dense = fields.take("first_k_dense_replace", int, 3 if third else 0)
    method = fields.take("topk_method", str, "noaux_tc" if third else "greedy")
    _expect(
        fields,
        "topk_method",
        method,
        ("noaux_tc",) if third else ("greedy", "group_limited_greedy"),
    )
    score = fields.take("scoring_func", str, "sigmoid" if third else "softmax")
    _expect(fields, "scoring_func", score, ("sigmoid",) if third else ("softmax",))
    _expect(fields, "moe_layer_freq", fields.take("moe_layer_freq", int, 1), (1,))
    fields.take("ep_size", int, 1)
    for name in ("aux_loss_alpha", "seq_aux"):  # of training
        fields.seen.add(name)
    renormalize = fields.take("norm_topk_prob", bool, third)
    groups = fields.take("n_group", int, 8 if third else 1)
    best = fields.take("topk_group", int, 4 if third else 1)
    if method == "greedy":
        groups = best = 1
    return Experts(
        count=fields.take("n_routed_experts", int, 256 if third else 64),
        per_token=fields.take("num_experts_per_tok", int, 8)
        if third
        else fields.take("num_experts_per_tok", int),
        intermediate=intermediate,
        gate="sigmoid" if third else "softmax",
        # V2's reference reads norm_topk_prob nowhere; no published config of it sets the field.
        renormalize=renormalize and third,
        scale=fields.take("routed_scaling_factor", float, 2.5 if third else 1.0),
        choice_bias=third,
        groups=groups,
        top_groups=best,
        shared_intermediate=intermediate * shared,
        dense_layers=tuple(range(dense)),
    )


def _gpt_oss(fields: Fields) -> ModelSpec:
    context = fields.take("max_position_embeddings", int, 131_072)
    fields.take("initial_context_length", int, 0)  # repeated in rope_scaling
    alpha = fields.take("swiglu_alpha", float, CLAMPED_ALPHA)
    _expect(fields, "swiglu_alpha", alpha, (CLAMPED_ALPHA,))
    _expect(fields, "hidden_act", fields.take("hidden_act", str, "silu"), ("silu",))
    per_token = fields.take("num_experts_per_tok", int, 4)
    fields.take("experts_per_token", int, per_token)
    intermediate = fields.take("intermediate_size", int)
    bias = fields.take("attention_bias", bool, True)
    experts = Experts(
        count=fields.take("num_local_experts", int, 128),
        per_token=per_token,
        intermediate=intermediate,
        logit_bias=True,
        biases=True,
    )
    return llama_like(
        fields,
        "gpt_oss",
        head_dim=fields.take("head_dim", int, 64),
        norm_eps=fields.take("rms_norm_eps", float, 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        activation="clamped_silu",
        activation_limit=fields.take_positive("swiglu_limit", float, 7.0),
        experts=experts,
        sinks=True,
        windows=layer_windows(fields, fields.take("sliding_window", int, 128), every=2),
        **_gpt_oss_rope(fields, context),
    )


def _gpt_oss_rope(fields: Fields, context: int) -> dict[str, Any]:
    """Stretched even where a config says nothing about it, or only the base."""
    if any(fields.config.get(name) for name in ("rope_parameters", "rope_scaling")):
        return rope_of(fields, context, 150_000.0)
    fields.seen |= {"rope_parameters", "rope_scaling"}
    theta = fields.take("rope_theta", float, 150_000.0)
    return rope_of(Fields({"rope_parameters": GPT_OSS_ROPE}), context, theta)


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _expect(fields: Fields, name: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        raise UnsupportedModel(
            f"{fields.what}: {name} is {value!r}",
            hint=f"supported: {', '.join(map(str, supported))}",
        )


SPARSE: dict[str, Callable[[Fields], ModelSpec]] = {
    "deepseek_v2": lambda fields: _deepseek(fields, "deepseek_v2"),
    "deepseek_v3": lambda fields: _deepseek(fields, "deepseek_v3"),
    "gpt_oss": _gpt_oss,
}
