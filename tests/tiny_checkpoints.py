"""Tiny random checkpoints of every supported family, written by `transformers`, the oracle.

Sizes are odd on purpose: no two dimensions of a model are equal by accident, heads do not divide the hidden size
where the family allows that, and context and window are short enough to be exceeded in a test.
"""

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = dict(
    vocab_size=211, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=160,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)  # fmt: skip


def _sizes(**changes: Any) -> dict[str, Any]:
    return SIZES | changes


def _without(*names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in _sizes(**changes).items() if k not in names}


_LATENT: dict[str, Any] = dict(
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
)
_DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
)
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_sizes()),
    "llama-biases": lambda: transformers.LlamaConfig(
        **_sizes(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama-one-kv-head": lambda: transformers.LlamaConfig(
        **_without("head_dim", num_key_value_heads=1)
    ),
    "llama-linear": lambda: transformers.LlamaConfig(
        **_sizes(), rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **_sizes(max_position_embeddings=24),
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **_sizes(),
        rope_parameters={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 20, "rope_theta": 500000.0,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**_sizes(), sliding_window=12),
    "mistral-full": lambda: transformers.MistralConfig(**_sizes(), sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**_without("head_dim")),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **_without("head_dim"), use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_sizes(tie_word_embeddings=True)),
    "qwen3-yarn": lambda: transformers.Qwen3Config(
        **_sizes(),
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40,
            "rope_theta": 1000000.0,
        },
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_sizes(num_hidden_layers=4), num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "qwen3_moe-plain-topk": lambda: transformers.Qwen3MoeConfig(
        **_sizes(), num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24,
        decoder_sparse_step=2,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_sizes(), num_local_experts=5, num_experts_per_tok=2
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=211, n_embd=48, n_layer=3, n_head=4, n_positions=160, bos_token_id=1,
        eos_token_id=2,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_sizes(num_hidden_layers=4), sliding_window=10, query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0, final_logit_softcapping=2.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_sizes(num_hidden_layers=7), sliding_window=8, query_pre_attn_scalar=20,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **_without("head_dim", "num_key_value_heads"), q_lora_rank=None, **_LATENT,
        topk_method="greedy", n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
    ),
    "deepseek_v2-groups": lambda: transformers.DeepseekV2Config(
        **_without("head_dim", "num_key_value_heads"), q_lora_rank=20, **_LATENT,
        topk_method="group_limited_greedy", n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
        n_group=3, topk_group=2, routed_scaling_factor=3.0,
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40,
            "rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_without("head_dim", num_key_value_heads=6), q_lora_rank=20, **_LATENT,
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2,
        num_mtp_layers=0,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_sizes(num_hidden_layers=4), num_local_experts=5, num_experts_per_tok=2, sliding_window=9,
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 40, "rope_theta": 150000.0,
        },
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_sizes(num_hidden_layers=4), **_DELTA, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=20, mlp_only_layers=[1],
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_sizes(num_hidden_layers=4), **_DELTA),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **_sizes(num_hidden_layers=4), **_DELTA, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=20,
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **_without("head_dim", "rms_norm_eps", num_hidden_layers=4), num_dense_layers=1, num_experts=6,
        layer_types=["conv", "full_attention", "conv", "full_attention"], num_experts_per_tok=2,
        moe_intermediate_size=24, routed_scaling_factor=1.5,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **_without("head_dim", "rms_norm_eps", num_hidden_layers=4), block_multiple_of=8,
        layer_types=["conv", "full_attention", "conv", "full_attention"], conv_bias=True,
    ),
}  # fmt: skip
SPARSE_NAMES = [name for name in CONFIGS if name.startswith(("deepseek", "gpt_oss"))]
RECURRENT_NAMES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe"]
FAMILY_NAMES = [name for name in CONFIGS if name not in (*SPARSE_NAMES, *RECURRENT_NAMES)]


@functools.cache
def reference(name: str) -> transformers.PreTrainedModel:
    """The oracle: float32, eager attention, weights large enough to make the logits differ."""
    torch.manual_seed(len(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(
            CONFIGS[name](), attn_implementation="eager"
        )
    with torch.no_grad():
        for name_of, buffer in model.named_buffers():
            if name_of.endswith("e_score_correction_bias"):  # a weight in all but name
                buffer.add_(torch.randn_like(buffer) * 0.3)
        for parameter in model.parameters():
            # Norms and biases start as ones and zeros, which would hide one that is not applied.
            noise = torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.3)
            parameter.add_(noise)
    return model.eval()


@functools.cache
def folder(name: str) -> Path:
    """The reference's checkpoint on disk; one copy per process."""
    path = Path(_root().name) / name
    reference(name).save_pretrained(path)
    return path


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cairn-tiny-")
