"""Fields of a config.json that several families share, written from a spec. The inverse of `family_fields`."""

from typing import Any

from cairn.models.family_fields import ACTIVATION_NAMES
from cairn.models.spec import Activation, Experts, ModelSpec, Rope

Config = dict[str, Any]


def activation_name(activation: Activation, tanh_name: str) -> str:
    if activation == "gelu_tanh":
        return tanh_name
    if activation == "clamped_silu":
        return "silu"
    return next(name for name, ours in ACTIVATION_NAMES.items() if ours == activation)


def rope_scaling(rope: Rope) -> Config | None:
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


def rope_parameters(rope: Rope) -> Config:
    """All about rotary positions in one field, as newer configs have it."""
    return (rope_scaling(rope) or {"rope_type": "default"}) | {"rope_theta": rope.theta}


def largest_window(spec: ModelSpec) -> int | None:
    return max(spec.windows, default=0) or None


def always_a_window(spec: ModelSpec) -> Config:
    """Fields for families whose reference implementation builds a window mask even without windowed layers."""
    return {"sliding_window": largest_window(spec) or 4096}


def layer_types(spec: ModelSpec) -> Config:
    windowed = [bool(spec.window(i)) for i in range(spec.layers)]
    kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    return {"sliding_window": largest_window(spec), "layer_types": kinds}


def biases(spec: ModelSpec) -> Config:
    return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def partial_rotary(spec: ModelSpec) -> Config:
    return {"partial_rotary_factor": (spec.rope.rotated or spec.head_dim) / spec.head_dim}


def expert_choice(experts: Experts) -> Config:
    """Fields of the routing method: by scores, or by scores with a balancing bias."""
    return {"topk_method": "noaux_tc"} if experts.choice_bias else {}


def experts_of(spec: ModelSpec) -> Experts:
    return spec.experts or Experts(count=1, per_token=1, intermediate=1)


def routed_experts(spec: ModelSpec) -> Config:
    """Experts in DeepSeek's words."""
    experts = experts_of(spec)
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


def mixer_types(spec: ModelSpec) -> Config:
    names = {"attention": "full_attention", "delta": "linear_attention", "short_conv": "conv"}
    return {"layer_types": [names[spec.mixer_of(layer)] for layer in range(spec.layers)]}
