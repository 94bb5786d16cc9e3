"""Tiny GGUF files, converted from `transformers` checkpoints as llama.cpp converts them.

Names come from the tables of the `gguf` package and keys from its writer, so that a test which
reads such a file does not ask `cairn` what a GGUF file looks like. The changes to values (rotary
rows, 1 + w, transposition, stacked experts) are written here forwards; `cairn` has them backwards.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_NO_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6,
}  # fmt: skip
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

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
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**SIZES),
    "dots1": lambda: transformers.Dots1Config(
        **SIZES, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **{key: value for key, value in _NO_HEAD_DIM.items() if key != "rms_norm_eps"}, norm_eps=1e-5,
        layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
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


LLAMAS = ("llama", "granite", "smollm3")  # whose rows of q and k are interleaved


def checkpoint(name: str) -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    """A random model, and its tensors under the names that a checkpoint on the Hub has."""
    torch.manual_seed(len(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(
            CONFIGS[name](), attn_implementation="eager"
        )
    with torch.no_grad():
        for parameter in model.parameters():  # norms of one and biases of zero would hide mistakes
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    return model.eval(), dict(hub_tensors(model.config, model.state_dict()))


def hub_tensors(
    config: transformers.PretrainedConfig, state: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`transformers` 5 keeps experts stacked and gate beside up; checkpoints have neither."""
    mixtral = config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    block = ".block_sparse_moe." if mixtral else ".mlp."
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".mlp.experts." not in name:
            yield name.replace(".mlp.", block), tensor
            continue
        prefix = name.replace(".mlp.", block).rpartition(".")[0]
        for number, expert in enumerate(tensor):
            if name.endswith("down_proj"):
                yield f"{prefix}.{number}.{down}.weight", expert
            else:
                first, second = expert.chunk(2)
                yield f"{prefix}.{number}.{gate}.weight", first
                yield f"{prefix}.{number}.{up}.weight", second


def convert(
    config: transformers.PretrainedConfig,
    tensors: dict[str, torch.Tensor],
    path: Path,
    matrices: Type = Type.F32,
    stacked: bool = True,
    metadata: dict[str, object] | None = None,
) -> Path:
    """Write a GGUF file, its matrices of one type, its experts in one tensor (as since 2024)."""
    architecture = _architecture(config)
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_keys(writer, config)
    for key, value in (metadata or {}).items():
        write_key(writer, key, value)
    for name, values in _stored_tensors(config, architecture, tensors, stacked):
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
    names |= {"hunyuan_v1_dense": "hunyuan-dense", "gpt_oss": "gpt-oss"}
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
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_key_value_heads
    if config.model_type == "lfm2":
        writer.add_head_count_kv([heads * (kind != "conv") for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if writer.arch in LLAMAS:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.head_dim)
    _write_rope_keys(writer, config)
    _write_family_keys(writer, config)


def _write_rope_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if config.model_type != "gemma2":  # its conversion leaves the default out
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_family_keys(writer: GGUFWriter, config: transformers.PretrainedConfig) -> None:
    if config.model_type in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "granite":
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
    if config.model_type in ("gemma2", "gemma3_text", "olmo3", "phi3", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind != "full_attention" for kind in config.layer_types])
    if config.model_type == "dots1":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _stored_tensors(
    config: transformers.PretrainedConfig,
    architecture: gguf.MODEL_ARCH,
    tensors: dict[str, torch.Tensor],
    stacked: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, values in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            prefix, number, rest = found.groups()
            prefix = prefix.replace("model.", "").replace("block_sparse_moe", "feed_forward")
            prefix = prefix if "feed_forward" in prefix else f"model.{prefix}"
            stacks.setdefault(f"{prefix}.{rest}", {})[int(number)] = values
            continue
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        known = known + ".weight" if known.endswith("sinks") else known
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        yield stored, _change(config, architecture, name, values)
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
    if name.endswith("conv.conv.weight"):
        return values.squeeze(1)
    if config.model_type == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight$", name):
        return values.T
    return values


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    frequencies = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    wavelengths = 2 * torch.pi / frequencies
    original, low, high = (
        rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    )  # fmt: skip
    smooth = (original / wavelengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    blended[wavelengths < original / high] = 1.0
    blended[wavelengths > original / low] = rope["factor"]
    return blended
