"""Writers of config.json by model family, the inverse of the readers in `families`.

What a family cannot say is not this module's business: `export.to_hf` reads the config back and refuses a difference.
"""

from collections.abc import Callable

from cairn.models.family_config_fields import (
    Config,
    activation_name,
    always_a_window,
    biases,
    expert_choice,
    experts_of,
    largest_window,
    layer_types,
    mixer_types,
    partial_rotary,
    rope_parameters,
    rope_scaling,
    routed_experts,
)
from cairn.models.spec import DeltaSizes, ModelSpec, ShortConvSizes


def _gpt2_config(spec: ModelSpec) -> Config:
    return {
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.intermediate,
        "n_positions": spec.context,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": activation_name(spec.activation, "gelu_new"),
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
    """Fields that all Llama-like families share."""
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
        "hidden_act": activation_name(spec.activation, "gelu_pytorch_tanh"),
        "rope_theta": spec.rope.theta,
        "rope_scaling": rope_scaling(spec.rope),
    }


def _mixtral(spec: ModelSpec) -> Config:
    experts = experts_of(spec)
    return {
        "sliding_window": largest_window(spec),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    } | expert_choice(experts)


def _qwen(spec: ModelSpec) -> Config:
    window = largest_window(spec)
    fields: Config = {"sliding_window": window, "use_sliding_window": window is not None}
    if spec.family != "qwen2":
        fields["attention_bias"] = spec.qkv_bias
    if spec.family != "qwen3_moe":
        return fields | layer_types(spec)
    experts = experts_of(spec)
    return (
        fields
        | {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate,
            "norm_topk_prob": experts.renormalize,
            "mlp_only_layers": list(experts.dense_layers),
        }
        | expert_choice(experts)
    )


def _gemma(spec: ModelSpec) -> Config:
    scalar = spec.scale**-2
    config = layer_types(spec) | always_a_window(spec)
    config |= {
        "attention_bias": spec.qkv_bias,
        "hidden_activation": activation_name(spec.activation, "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": spec.attention_softcap or None,
        "final_logit_softcapping": spec.logit_softcap or None,
    }
    if spec.rope_local:
        config["rope_local_base_freq"] = spec.rope_local.theta
    return config


def _phi3(spec: ModelSpec) -> Config:
    fields = partial_rotary(spec) | {"sliding_window": largest_window(spec)}
    if spec.rope.kind == "longrope":
        fields["original_max_position_embeddings"] = spec.rope.original_context
    return fields


def _granite(spec: ModelSpec) -> Config:
    return biases(spec) | {
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
        biases(spec)
        | layer_types(spec)
        | {
            "use_sliding_window": largest_window(spec) is not None,
            "no_rope_layers": rotates,
        }
    )


def _olmo3(spec: ModelSpec) -> Config:
    rope = {
        "full_attention": rope_parameters(spec.rope),
        "sliding_attention": rope_parameters(spec.rope_local or spec.rope),
    }
    fields = layer_types(spec) | always_a_window(spec)
    return fields | {"attention_bias": spec.qkv_bias, "rope_parameters": rope}


def _seed_oss(spec: ModelSpec) -> Config:
    return biases(spec) | {"attention_out_bias": spec.out_bias}


def _glm4_moe(spec: ModelSpec) -> Config:
    return (
        routed_experts(spec)
        | partial_rotary(spec)
        | {
            "attention_bias": spec.qkv_bias,
            "use_qk_norm": spec.qk_norm,
            "num_nextn_predict_layers": 0,
        }
    )


def _ministral3(spec: ModelSpec) -> Config:
    rope = rope_parameters(spec.rope) | {"llama_4_scaling_beta": spec.rope.temperature}
    return {"sliding_window": largest_window(spec), "rope_parameters": rope}


def _minimax_m2(spec: ModelSpec) -> Config:
    experts = experts_of(spec)
    return {
        "rotary_dim": spec.rope.rotated or spec.head_dim,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def _ernie4_5_moe(spec: ModelSpec) -> Config:
    experts = experts_of(spec)
    sparse = [i for i in range(spec.layers) if i not in experts.dense_layers] or [spec.layers]
    gap = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return {
        "moe_num_experts": experts.count,
        "moe_k": experts.per_token,
        "moe_intermediate_size": experts.intermediate,
        "moe_num_shared_experts": experts.shared_intermediate // experts.intermediate,
        "moe_layer_interval": gap,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
    }


def _deepseek(spec: ModelSpec) -> Config:
    latent, experts = spec.latent, experts_of(spec)
    if latent is None:
        return {}
    fields = routed_experts(spec) | {
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
    experts = experts_of(spec)
    fields = layer_types(spec) | always_a_window(spec)
    return fields | {
        "attention_bias": spec.qkv_bias,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_limit": spec.activation_limit,
        "rope_parameters": rope_parameters(spec.rope),  # absent, it would be stretched
    }


def _qwen3_next(spec: ModelSpec) -> Config:
    delta = spec.delta or DeltaSizes(1, 1, 1, 1)
    config = mixer_types(spec) | {
        "attention_bias": spec.qkv_bias,
        "rope_parameters": rope_parameters(spec.rope) | partial_rotary(spec),
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
    config = mixer_types(spec) | {
        "norm_eps": spec.norm_eps,
        "conv_L_cache": sizes.kernel,
        "conv_bias": sizes.bias,
        "tie_embedding": spec.tied,
        "rope_parameters": rope_parameters(spec.rope),
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
    "llama": biases,
    "mistral": lambda spec: {"sliding_window": largest_window(spec)},
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
    "exaone4": layer_types,
    "seed_oss": _seed_oss,
    "glm4": lambda spec: partial_rotary(spec) | {"attention_bias": spec.qkv_bias},
    "glm4_moe": _glm4_moe,
    "dots1": lambda spec: (
        routed_experts(spec) | layer_types(spec) | {"attention_bias": spec.qkv_bias}
    ),
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
