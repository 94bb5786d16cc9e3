"""Conversion of GGUF metadata of mixture-of-experts models to config.json.

One function per architecture, as in `config`.
"""

from collections.abc import Callable

import numpy as np

from cairn.models.gguf.decoder_config import (
    Config,
    attention_bias,
    decoder,
    kind,
    partly_rotated,
    rope,
    windows,
    with_scaling,
)
from cairn.models.gguf.keys import GGUFKeys

SIGMOID = 2  # llama.cpp's number of a way to weigh experts


def _qwen3moe(keys: GGUFKeys) -> Config:
    normalised = keys.value("expert_weights_norm")
    return (
        decoder(keys, "qwen3_moe")
        | attention_bias(keys)
        | {
            "hidden_act": "silu",
            "num_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "norm_topk_prob": normalised is not False,  # llama.cpp normalises unless told not to
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    )


def sigmoid_gate(keys: GGUFKeys) -> None:
    if (gating := keys.value("expert_gating_func")) != SIGMOID:
        raise keys.bad("expert_gating_func", gating, f"{SIGMOID}, sigmoid")


def _shared_and_routed(keys: GGUFKeys) -> Config:
    """Expert fields with DeepSeek's names, which GLM and dots.llm1 also use."""
    return {
        "hidden_act": "silu",
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.optional_integer("expert_shared_count") or 0,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.dense_layers(),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.value("expert_weights_norm") is True,
        "n_group": keys.optional_integer("expert_group_count") or 1,
        "topk_group": keys.optional_integer("expert_group_used_count") or 1,
    }


def _dots1(keys: GGUFKeys) -> Config:
    sigmoid_gate(keys)
    return decoder(keys, "dots1") | _shared_and_routed(keys)


def _glm4_moe(keys: GGUFKeys) -> Config:
    sigmoid_gate(keys)
    normed = any(name.endswith("attn_q_norm.weight") for name in keys.tensors)
    config = partly_rotated(keys, "glm4_moe") | _shared_and_routed(keys)
    return config | attention_bias(keys) | {"use_qk_norm": normed}


def _ernie4_5_moe(keys: GGUFKeys) -> Config:
    """The converter writes the width of the shared experts by a rule that holds for the published models."""
    width = keys.integer("expert_feed_forward_length")
    shared = keys.optional_integer("expert_shared_count") or 0  # the largest model has none
    together = keys.optional_integer("expert_shared_feed_forward_length") or width * shared
    if shared and together != width * shared:
        raise keys.bad("expert_shared_feed_forward_length", together, f"{width * shared}")
    return decoder(keys, "ernie4_5_moe") | {
        "hidden_act": "silu",
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared,
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        "moe_layer_start_index": keys.dense_layers(),
        "moe_layer_end_index": keys.layers() - 1,
    }


def _minimax_m2(keys: GGUFKeys) -> Config:
    sigmoid_gate(keys)
    config = partly_rotated(keys, "minimax_m2", dense=False)
    del config["partial_rotary_factor"]
    keys.integer("feed_forward_length")  # the experts' width once more
    return config | {
        "hidden_act": "silu",
        "rotary_dim": keys.integer("rope.dimension_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _deepseek2(keys: GGUFKeys) -> Config:
    """V2 weighs by softmax and V3 by sigmoid. No key says mscale, which llama.cpp takes for equal to mscale_all_dim."""
    third = keys.value("expert_gating_func") == SIGMOID
    config = kind("deepseek_v3" if third else "deepseek_v2") | _latent(keys)
    config |= _shared_and_routed(keys) | {
        "hidden_size": keys.hidden(),
        "num_hidden_layers": keys.layers(),
        "intermediate_size": keys.integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        **rope(keys, 10_000.0, keys.integer("rope.dimension_count")),
    }
    if not third:
        grouped = config["n_group"] != 1
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    multiplier = keys.optional_number("rope.scaling.yarn_log_multiplier")  # a tenth of it
    if multiplier is None:
        return config
    scale = float(str(np.float32(10 * multiplier)))
    return with_scaling(config, mscale=scale, mscale_all_dim=scale)


def _latent(keys: GGUFKeys) -> Config:
    """Widths of expanded heads stand under other keys since one plane per token is cached, in April 2025."""
    heads, rank = keys.integer("attention.head_count"), keys.integer("attention.kv_lora_rank")
    rotated = keys.integer("rope.dimension_count")
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        keys.integer(key)  # of the latents
    suffix = "_mla" if keys.value("attention.key_length_mla") is not None else ""
    width = keys.integer(f"attention.key_length{suffix}")
    if width <= rotated:
        raise keys.bad(f"attention.key_length{suffix}", width, f"more than {rotated} rotated ones")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.optional_integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": keys.integer(f"attention.value_length{suffix}"),
    }


def _gpt_oss(keys: GGUFKeys) -> Config:
    """Every second layer has a window; YaRN's bounds stay fractions, which no key says."""
    config = decoder(keys, "gpt_oss") | {
        "hidden_act": "silu",
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        **attention_bias(keys),
        **windows(keys, keys.integer("attention.sliding_window"), period=2),
    }
    return with_scaling(config, truncate=False)


SPARSE: dict[str, Callable[[GGUFKeys], Config]] = {
    "qwen3moe": _qwen3moe,
    "dots1": _dots1,
    "glm4moe": _glm4_moe,
    "ernie4_5-moe": _ernie4_5_moe,
    "minimax-m2": _minimax_m2,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}
