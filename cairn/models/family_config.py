"""Which fields does config.json have for a spec? The inverse of the readers in `families`, family by family.

What a family cannot say is not this module's business: `export.to_hf` reads the config back and refuses a difference.
"""

from collections.abc import Callable
from typing import Any

from cairn.models.family_fields import ACTIVATION_NAMES
from cairn.models.spec import (
    Activation,
    DeltaSizes,
    Experts,
    ModelSpec,
    Rope,
    ShortConvSizes,
)

Config = dict[str, Any]


def _gpt2_config(spec: ModelSpec) -> Config:
    return {
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.intermediate,
        "n_positions": spec.context,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": _their_activation(spec.activation, "gelu_new"),
    }


def config_of(spec: ModelSpec) -> Config:
    """The fields of a spec's family."""
    if spec.family == "gpt2":
        return _gpt2_config(spec)
    config = _llama_config(spec) | FAMILY_CONFIGS[spec.family](spec)
    if "rope_parameters" in config:
        del config["rope_theta"], config["rope_scaling"]
    return config


def _llama_config(spec: ModelSpec) -> Config:
    """What all descendants of Llama share."""
    trained = spec.rope.original_context if spec.rope.kind == "dynamic" else spec.context
    return {
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": trained,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": _their_activation(spec.activation, "gelu_pytorch_tanh"),
        "rope_theta": spec.rope.theta,
        "rope_scaling": _rope_scaling(spec.rope),
    }


def _their_activation(activation: Activation, tanh_name: str) -> str:
    if activation == "gelu_tanh":
        return tanh_name
    if activation == "clamped_silu":
        return "silu"
    return next(name for name, ours in ACTIVATION_NAMES.items() if ours == activation)


def _rope_scaling(rope: Rope) -> Config | None:
    if rope.kind == "default":
        return None
    scaling: Config = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale or None,
            "mscale_all_dim": rope.mscale_all_dim or None,
            "truncate": rope.truncate,
        }
    if rope.kind == "longrope":
        scaling |= {
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
        }
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = rope.original_context
    return {key: value for key, value in scaling.items() if value is not None}


def _rope_parameters(rope: Rope) -> Config:
    """All about rotary positions in one field, as newer configs have it."""
    return (_rope_scaling(rope) or {"rope_type": "default"}) | {"rope_theta": rope.theta}


# -- pieces that several families share ---------------------------------------------------------


def _window(spec: ModelSpec) -> int | None:
    return max(spec.windows, default=0) or None


def _always_a_window(spec: ModelSpec) -> Config:
    """For families whose reference makes the mask of a window even where no layer has one."""
    return {"sliding_window": _window(spec) or 4096}


def _layer_types(spec: ModelSpec) -> Config:
    windowed = [bool(spec.window(i)) for i in range(spec.layers)]
    kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    return {"sliding_window": _window(spec), "layer_types": kinds}


def _biases(spec: ModelSpec) -> Config:
    return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def _partial(spec: ModelSpec) -> Config:
    return {"partial_rotary_factor": (spec.rope.rotated or spec.head_dim) / spec.head_dim}


def _choice(experts: Experts) -> Config:
    """Which experts are chosen: by the scores, or by the scores and a bias that balances them."""
    return {"topk_method": "noaux_tc"} if experts.choice_bias else {}


def _experts(spec: ModelSpec) -> Experts:
    return spec.experts or Experts(count=1, per_token=1, intermediate=1)


def _routed(spec: ModelSpec) -> Config:
    """Experts in DeepSeek's words."""
    experts = _experts(spec)
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate,
        "n_shared_experts": experts.shared_intermediate // experts.intermediate,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.renormalize,
        "first_k_dense_replace": len(experts.dense_layers),
    }


# -- families -----------------------------------------------------------------------------------


def _mixtral(spec: ModelSpec) -> Config:
    experts = _experts(spec)
    return {
        "sliding_window": _window(spec),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    } | _choice(experts)


def _qwen(spec: ModelSpec) -> Config:
    window = _window(spec)
    fields: Config = {"sliding_window": window, "use_sliding_window": window is not None}
    if spec.family != "qwen2":
        fields["attention_bias"] = spec.qkv_bias
    if spec.family != "qwen3_moe":
        return fields | _layer_types(spec)
    experts = _experts(spec)
    return (
        fields
        | {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate,
            "norm_topk_prob": experts.renormalize,
            "mlp_only_layers": list(experts.dense_layers),
        }
        | _choice(experts)
    )


def _gemma(spec: ModelSpec) -> Config:
    scalar = spec.scale**-2
    config = _layer_types(spec) | _always_a_window(spec)
    config |= {
        "attention_bias": spec.qkv_bias,
        "hidden_activation": _their_activation(spec.activation, "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.logit_softcap or None,
    }
    if spec.rope_local:
        config["rope_local_base_freq"] = spec.rope_local.theta
    return config


def _phi3(spec: ModelSpec) -> Config:
    fields = _partial(spec) | {"sliding_window": _window(spec)}
    if spec.rope.kind == "longrope":
        fields["original_max_position_embeddings"] = spec.rope.original_context
    return fields


def _granite(spec: ModelSpec) -> Config:
    return _biases(spec) | {
        "embedding_multiplier": spec.embedding_scale,
        "attention_multiplier": spec.scale,
        "residual_multiplier": spec.residual_scale,
        "logits_scaling": spec.logit_divisor,
    }


def _granite4(spec: ModelSpec) -> Config:
    fields = _granite(spec) | {
        "layer_types": ["full_attention"] * spec.layers,
        "shared_intermediate_size": spec.intermediate,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 1,  # there are none; by default they would have to divide the width
        "position_embedding_type": None if spec.nope_layers else "rope",
    }
    del fields["mlp_bias"]
    return fields


def _smollm3(spec: ModelSpec) -> Config:
    rotates = [int(i not in spec.nope_layers) for i in range(spec.layers)]
    return (
        _biases(spec)
        | _layer_types(spec)
        | {
            "use_sliding_window": _window(spec) is not None,
            "no_rope_layers": rotates,
        }
    )


def _olmo3(spec: ModelSpec) -> Config:
    rope = {
        "full_attention": _rope_parameters(spec.rope),
        "sliding_attention": _rope_parameters(spec.rope_local or spec.rope),
    }
    fields = _layer_types(spec) | _always_a_window(spec)
    return fields | {"attention_bias": spec.qkv_bias, "rope_parameters": rope}


def _seed_oss(spec: ModelSpec) -> Config:
    return _biases(spec) | {"attention_out_bias": spec.out_bias}


def _glm4_moe(spec: ModelSpec) -> Config:
    return (
        _routed(spec)
        | _partial(spec)
        | {
            "attention_bias": spec.qkv_bias,
            "use_qk_norm": spec.qk_norm,
            "num_nextn_predict_layers": 0,
        }
    )


def _ministral3(spec: ModelSpec) -> Config:
    rope = _rope_parameters(spec.rope) | {"llama_4_scaling_beta": spec.rope.temperature}
    return {"sliding_window": _window(spec), "rope_parameters": rope}


def _minimax_m2(spec: ModelSpec) -> Config:
    experts = _experts(spec)
    return {
        "rotary_dim": spec.rope.rotated or spec.head_dim,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def _ernie4_5_moe(spec: ModelSpec) -> Config:
    experts = _experts(spec)
    sparse = [i for i in range(spec.layers) if i not in experts.dense_layers] or [spec.layers]
    return {
        "moe_num_experts": experts.count,
        "moe_k": experts.per_token,
        "moe_intermediate_size": experts.intermediate,
        "moe_num_shared_experts": experts.shared_intermediate // experts.intermediate,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
    }


def _deepseek(spec: ModelSpec) -> Config:
    latent, experts = spec.latent, _experts(spec)
    if latent is None:
        return {}
    fields = _routed(spec) | {
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_nope_head_dim": latent.unrotated,
        "qk_rope_head_dim": latent.rotated,
        "v_head_dim": latent.value,
        "head_dim": latent.rotated,  # what the reference calls so
    }
    if spec.family == "deepseek_v3":
        return fields | {"rope_interleave": latent.interleaved, "num_nextn_predict_layers": 0}
    del fields["norm_topk_prob"]  # the reference reads it nowhere
    return fields | {"topk_method": "group_limited_greedy" if experts.groups > 1 else "greedy"}


def _gpt_oss(spec: ModelSpec) -> Config:
    experts = _experts(spec)
    fields = _layer_types(spec) | _always_a_window(spec)
    return fields | {
        "attention_bias": spec.qkv_bias,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_limit": spec.activation_limit,
        "rope_parameters": _rope_parameters(spec.rope),  # absent, it would be stretched
    }


def _mixer_types(spec: ModelSpec) -> Config:
    names = {"attention": "full_attention", "delta": "linear_attention", "short_conv": "conv"}
    return {"layer_types": [names[spec.mixer_of(layer)] for layer in range(spec.layers)]}


def _qwen3_next(spec: ModelSpec) -> Config:
    delta = spec.delta or DeltaSizes(1, 1, 1, 1)
    config = _mixer_types(spec) | {
        "attention_bias": spec.qkv_bias,
        "rope_parameters": _rope_parameters(spec.rope) | _partial(spec),
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_width,
        "linear_value_head_dim": delta.value_width,
        "linear_conv_kernel_dim": delta.kernel,
    }
    if spec.experts is None:
        return config
    config |= {
        "num_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.per_token,
        "moe_intermediate_size": spec.experts.intermediate,
        "shared_expert_intermediate_size": spec.experts.shared_intermediate,
    }
    if spec.family == "qwen3_5_moe":  # its weights are always renormalised, and no layer is dense
        return config
    return config | {
        "norm_topk_prob": spec.experts.renormalize,
        "mlp_only_layers": list(spec.experts.dense_layers),
    }


def _lfm2(spec: ModelSpec) -> Config:
    sizes = spec.short_conv or ShortConvSizes()
    config = _mixer_types(spec) | {
        "norm_eps": spec.norm_eps,
        "conv_L_cache": sizes.kernel,
        "conv_bias": sizes.bias,
        "tie_embedding": spec.tied,
        "rope_parameters": _rope_parameters(spec.rope),
    }
    if spec.experts is None:
        return config | {"block_auto_adjust_ff_dim": False}
    return config | {
        "num_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.per_token,
        "moe_intermediate_size": spec.experts.intermediate,
        "num_dense_layers": len(spec.experts.dense_layers),
        "norm_topk_prob": spec.experts.renormalize,
        "use_expert_bias": spec.experts.choice_bias,
        "routed_scaling_factor": spec.experts.scale,
    }


FAMILY_CONFIGS: dict[str, Callable[[ModelSpec], Config]] = {
    "llama": _biases,
    "mistral": lambda spec: {"sliding_window": _window(spec)},
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "gemma": lambda spec: {"attention_bias": spec.qkv_bias},
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoehybrid": _granite4,
    "olmo2": lambda spec: {"attention_bias": spec.qkv_bias},
    "olmo3": _olmo3,
    "exaone4": _layer_types,
    "seed_oss": _seed_oss,
    "glm4": lambda spec: _partial(spec) | {"attention_bias": spec.qkv_bias},
    "glm4_moe": _glm4_moe,
    "dots1": lambda spec: _routed(spec) | _layer_types(spec) | {"attention_bias": spec.qkv_bias},
    "hunyuan_v1_dense": lambda spec: {"attention_bias": spec.qkv_bias},
    "ministral3": _ministral3,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_next,
    "qwen3_5_moe": _qwen3_next,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
}
