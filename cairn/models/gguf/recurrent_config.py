"""Conversion of GGUF metadata of recurrent and hybrid models to config.json.

One function per architecture, as in `config`.
"""

from collections.abc import Callable

from cairn.models.gguf.decoder_config import Config, kind, partly_rotated, rope
from cairn.models.gguf.keys import GGUFKeys
from cairn.models.gguf.sparse_config import sigmoid_gate


def _lfm2(keys: GGUFKeys, model_type: str) -> Config:
    """Layers without heads of keys are convolutions."""
    hidden, heads, layers = keys.hidden(), keys.integer("attention.head_count"), keys.layers()
    counts = keys.raw("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) != layers or len({*counts} - {0}) != 1:
        raise keys.bad("attention.head_count_kv", counts, f"a number or 0 for each of {layers}")
    return kind(model_type) | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "intermediate_size": keys.integer("feed_forward_length"),
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "max_position_embeddings": keys.integer("context_length"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        **rope(keys, 1e6, hidden // heads),
    }


def _lfm2_dense(keys: GGUFKeys) -> Config:
    return _lfm2(keys, "lfm2") | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(keys: GGUFKeys) -> Config:
    sigmoid_gate(keys)
    return _lfm2(keys, "lfm2_moe") | {
        "num_dense_layers": keys.dense_layers(),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _delta(keys: GGUFKeys, model_type: str) -> Config:
    """Delta nets but for every fourth layer, in the words of state-space models; the file says no other widths."""
    keys.raw("rope.dimension_sections")  # of positions with three axes, which are one in a text
    layers, every = keys.layers(), keys.integer("full_attention_interval", 4)
    kinds = [
        "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
    ]
    values, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % values:
        raise keys.bad("ssm.inner_size", inner, f"a multiple of {values} heads")
    dense = keys.raw("feed_forward_length") is not None
    return partly_rotated(keys, model_type, dense) | {
        "hidden_act": "silu",
        "layer_types": kinds,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
    }


def _experts(keys: GGUFKeys) -> Config:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


def _qwen3_next(keys: GGUFKeys) -> Config:
    config = _delta(keys, "qwen3_next") | _experts(keys)
    return config | {"norm_topk_prob": keys.value("expert_weights_norm") is not False}


def _qwen3_5(keys: GGUFKeys) -> Config:
    return _delta(keys, "qwen3_5_text")


def _qwen3_5_moe(keys: GGUFKeys) -> Config:
    return _delta(keys, "qwen3_5_moe_text") | _experts(keys)


RECURRENT: dict[str, Callable[[GGUFKeys], Config]] = {
    "lfm2": _lfm2_dense,
    "lfm2moe": _lfm2_moe,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
}
