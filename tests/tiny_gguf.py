"""Tiny GGUF files, converted from `transformers` checkpoints as llama.cpp converts them.

Names come from the tables of the `gguf` package and keys from its writer, so that a test which
reads such a file does not ask `cairn` what a GGUF file looks like. The changes to values (rotary
rows, 1 + w, transposition, stacked experts) are written here forwards; `cairn` has them backwards.
"""

import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.torch import load_file

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_NO_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e6,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")
} | {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DELTA: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
DELTA_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_NO_EPS = {key: value for key, value in _NO_HEAD_DIM.items() if key != "rms_norm_eps"}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True}),
    "llama-biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=_LLAMA3),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_NO_HEAD_DIM),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES | {"head_dim": 128}),
    "qwen3-yarn": lambda: transformers.Qwen3Config(**SIZES, rope_parameters=_YARN),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=16, query_pre_attn_scalar=32,
        attn_logit_softcapping=20.0, final_logit_softcapping=10.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7}, sliding_window=16, query_pre_attn_scalar=32,
        rope_parameters=_GEMMA3_ROPE,
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SIZES, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES | {"num_hidden_layers": 4}),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo3": lambda: transformers.Olmo3Config(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=16
    ),
    "phi3": lambda: transformers.Phi3Config(**_NO_HEAD_DIM, sliding_window=16),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_NO_HEAD_DIM, sliding_window=None, original_max_position_embeddings=32, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        },
    ),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**SIZES),
    "dots1": lambda: transformers.Dots1Config(**SIZES, **_EXPERTS),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, **_EXPERTS | {"n_group": 3, "topk_group": 2}, use_qk_norm=True, attention_bias=True, num_mtp_layers=0,
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=6, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=2,
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **SIZES, num_local_experts=6, num_experts_per_tok=2, rotary_dim=16,
    ),
    "ministral3": lambda: transformers.Ministral3Config(
        **SIZES, rope_parameters=_YARN | {
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **_LATENT, **_EXPERTS | {"norm_topk_prob": False, "n_group": 3, "topk_group": 2}, q_lora_rank=None,
        topk_method="group_limited_greedy",
        rope_parameters=_YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_LATENT, **_EXPERTS | {"n_group": 3, "topk_group": 2}, num_key_value_heads=4, q_lora_rank=20,
        num_mtp_layers=0, scoring_func="sigmoid",
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **_NO_EPS, norm_eps=1e-5, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **_NO_EPS, norm_eps=1e-5, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=24,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**DELTA, **DELTA_EXPERTS),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**DELTA),
    "exaone4-windows": lambda: transformers.Exaone4Config(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=16, sliding_window_pattern=4
    ),
    "glm4": lambda: transformers.Glm4Config(**SIZES),
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "exaone4": lambda: transformers.Exaone4Config(
        **SIZES, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**SIZES, attention_out_bias=True),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=160, n_embd=64, n_layer=3, n_head=4, n_positions=128,
        bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


LLAMAS = ("llama", "granite", "smollm3", "mistral3")  # whose rows of q and k are interleaved


def random_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    biases = [value for name, value in model.named_buffers() if name.endswith("bias")]
    with torch.no_grad():
        for value in (*model.parameters(), *biases):  # ones and zeros would hide mistakes
            if value.is_floating_point():
                value.add_(torch.randn_like(value) * (0.1 if value.ndim > 1 else 0.3))
    return model.eval()


def checkpoint(name: str) -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    """A random model, and its tensors under the names that a checkpoint on the Hub has."""
    torch.manual_seed(len(name))
    model = random_model(CONFIGS[name]())
    return model, hub_tensors(model)


def hub_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """`transformers` 5 keeps experts stacked and gate beside up in memory; a checkpoint has what its authors wrote."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def convert(
    config: transformers.PretrainedConfig,
    tensors: dict[str, torch.Tensor],
    path: Path,
    matrices: Type = Type.F32,
    stacked: bool = True,
    metadata: dict[str, object] | None = None,
) -> Path:
    """Write a GGUF file, its matrices of one type, its experts in one tensor (as since 2024)."""
    stored = stored_tensors(config, tensors, stacked)
    return write(config, stored, path, matrices, metadata)


def write(
    config: transformers.PretrainedConfig,
    stored: Iterable[tuple[str, torch.Tensor]],
    path: Path,
    matrices: Type = Type.F32,
    metadata: dict[str, object] | None = None,
) -> Path:
    """`stored`: tensors by the names that they have in the file; `metadata` wins over the config."""
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_architecture(config)])
    _write_keys(writer, config)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        write_key(writer, key, value)
    for name, values in stored:
        kind = matrices if values.ndim > 1 else Type.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _architecture(config: transformers.PretrainedConfig) -> gguf.MODEL_ARCH:
    names = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2"}
    names |= {"hunyuan_v1_dense": "hunyuan-dense", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe"}
    names |= {"ernie4_5_moe": "ernie4_5-moe", "minimax_m2": "minimax-m2", "ministral3": "mistral3"}
    names |= {"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "lfm2_moe": "lfm2moe"}
    names |= {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
    names |= {"granitemoehybrid": "granite"}  # its dense models
    name = names.get(config.model_type, config.model_type.removesuffix("_text"))
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def write_key(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_name("tiny")
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if config.model_type == "gpt2":
        writer.add_block_count(config.n_layer)
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if (width := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    heads = 1 if writer.arch == "deepseek2" else config.num_key_value_heads
    if config.model_type in ("lfm2", "lfm2_moe"):
        writer.add_head_count_kv([heads * (kind != "conv") for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim and writer.arch != "deepseek2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if writer.arch in LLAMAS:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(
            head_dim or config.hidden_size // config.num_attention_heads
        )
    _write_rope_keys(writer, config)
    _write_family_keys(writer, config)


def _write_rope_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if config.model_type != "gemma2":  # its conversion leaves the default out
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        context, original = config.max_position_embeddings, config.original_max_position_embeddings
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
        writer.add_rope_scaling_orig_ctx_len(original)
        amplitude = (1 + math.log(context / original) / math.log(original)) ** 0.5
        writer.add_rope_scaling_attn_factors(amplitude)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if (
            scale := rope.get("mscale_all_dim")
        ) is not None:  # DeepSeek's is a tenth, for old files' sake
            writer.add_rope_scaling_yarn_log_mul(scale * (0.1 if "deepseek" in writer.arch else 1))
        if (beta := rope.get("llama_4_scaling_beta")) is not None:
            writer.add_attn_temperature_scale(beta)


def _write_family_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    if config.model_type in ("mixtral", "qwen3_moe", "gpt_oss", "minimax_m2", "lfm2_moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", 0) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "glm4":
        writer.add_rope_dimension_count(config.head_dim // 2)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    windows = ("gemma2", "gemma3_text", "olmo3", "phi3", "gpt_oss", "exaone4")
    if config.model_type in windows and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window is not None:
        writer.add_sliding_window_pattern([kind != "full_attention" for kind in config.layer_types])
    if config.model_type in ("dots1", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        _write_deepseek_experts(writer, config)
    if config.model_type in ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config.head_dim * share))
    if config.model_type.startswith("deepseek"):
        _write_latent_keys(writer, config)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        shared = config.intermediate_size // config.num_key_value_heads
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "lfm2_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch in ("qwen3next", "qwen35", "qwen35moe"):
        _write_delta_keys(writer, config)


def _write_deepseek_experts(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_latent_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _write_delta_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if writer.arch != "qwen35":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def stored_tensors(
    config: transformers.PretrainedConfig, tensors: dict[str, torch.Tensor], stacked: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """By their names in a file, with the values that a converter writes."""
    architecture = _architecture(config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, values in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            prefix, number, rest = found.groups()
            if rest.startswith("w"):  # the names that the tables of gguf have
                prefix = re.sub(
                    r"^model\.|block_sparse_moe",
                    lambda m: "feed_forward" * (m[0][0] == "b"),
                    prefix,
                )
            stacks.setdefault(f"{prefix}.{rest}", {})[int(number)] = values
            continue
        for known, part in _converted(config, name, values):
            stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert stored is not None, known
            yield stored, _change(config, architecture, name, part)
    for name, experts in stacks.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if stacked:
            yield stored, torch.stack([experts[number] for number in range(len(experts))])
        else:
            for number, values in experts.items():
                yield stored.replace("_exps", f".{number}"), values
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config.head_dim)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _converted(
    config: transformers.PretrainedConfig, name: str, values: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names that the tables of the package know, of tensors that a converter may have cut."""
    if name.endswith("kv_b_proj.weight"):
        parts = (config.qk_nope_head_dim, config.v_head_dim)
        keys, kept = values.view(config.num_attention_heads, sum(parts), -1).split(parts, 1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), kept
    elif name.endswith("shared_mlp.input_linear.weight"):  # Granite 4
        gate, up = values.chunk(2)
        yield name.replace("shared_mlp.input_linear", "mlp.gate_proj"), gate
        yield name.replace("shared_mlp.input_linear", "mlp.up_proj"), up
    elif name.endswith("in_proj_qkvz.weight"):
        heads, width = config.linear_num_key_heads, config.linear_key_head_dim
        gates = config.linear_num_value_heads // heads * config.linear_value_head_dim
        split = values.view(heads, -1, values.shape[1]).split((width, width, gates, gates), 1)
        q, k, v, z = (part.flatten(0, 1) for part in split)
        yield name.replace("qkvz", "qkv"), torch.cat((q, k, v))
        yield name.replace("qkvz", "z"), z
    else:
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        known = known.replace("shared_mlp.output_linear", "mlp.down_proj")
        known = known.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
        yield known + ".weight" if known.endswith("sinks") else known, values


def _tiled(config: transformers.PretrainedConfig, name: str, values: torch.Tensor) -> torch.Tensor:
    """Value heads in the order in which ggml repeats key heads: the first of each key head, the second, ..."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = torch.arange(heads).view(keys, -1).T.flatten()
    width = config.linear_value_head_dim
    if name.endswith("out_proj.weight"):
        return values.unflatten(1, (heads, width))[:, order].flatten(1)
    before = 2 * keys * config.linear_key_head_dim if re.search("conv1d|in_proj_qkv", name) else 0
    head, tail = values[:before], values[before:].unflatten(0, (heads, -1))
    return torch.cat((head, tail[order].flatten(0, 1)))


def _change(
    config: transformers.PretrainedConfig,
    architecture: gguf.MODEL_ARCH,
    name: str,
    values: torch.Tensor,
) -> torch.Tensor:
    if gguf.MODEL_ARCH_NAMES[architecture] in LLAMAS and re.search(
        r"[qk]_proj\.(weight|bias)$", name
    ):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if config.model_type.startswith("qwen3_5") and ".linear_attn." in name and "norm" not in name:
        values = _tiled(config, name, values)
    if name.endswith("A_log"):
        return -values.exp()
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return values.squeeze(1)
    plus_one = config.model_type.startswith(("qwen3_next", "qwen3_5"))
    if plus_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    if config.model_type == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight$", name):
        return values.T
    return values


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    frequencies = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    wavelengths = 2 * torch.pi / frequencies
    original, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    smooth = (original / wavelengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    blended[wavelengths < original / high] = 1.0
    blended[wavelengths > original / low] = rope["factor"]
    return blended
