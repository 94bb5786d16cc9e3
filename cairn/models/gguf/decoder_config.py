"""Fields shared by GGUF architectures: decoder sizes, windows, RoPE.

Defaults are those of llama.cpp, which wrote the file. `config` has what each architecture says besides.
"""

import math

import numpy as np

from cairn.core.errors import UnsupportedModel
from cairn.models.gguf.keys import ROPE_FREQUENCIES, GGUFKeys, shortened

Config = dict[str, object]

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def kind(model_type: str) -> Config:
    return {"model_type": model_type, "architectures": [CLASSES[model_type]]}


def decoder(
    keys: GGUFKeys,
    model_type: str,
    theta: float | None = 10_000.0,
    rotated: int | None = None,
    dense: bool = True,
) -> Config:
    """`rotated`: columns of a head that are; by default all. `dense`: there are feed-forwards that are no experts."""
    hidden, heads = keys.hidden(), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    wanted = {"attention.value_length": head_dim, "rope.dimension_count": rotated or head_dim}
    for key, columns in wanted.items():
        if (size := keys.integer(key, columns)) != columns:
            raise UnsupportedModel(
                f"{keys.path} has {keys.prefix}{key} = {size} with keys of {head_dim}",
                hint="only models that rotate whole heads of one size can be read",
            )
    width = {"intermediate_size": keys.integer("feed_forward_length")} if dense else {}
    return kind(model_type) | {
        "hidden_size": hidden,
        "num_hidden_layers": keys.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **width,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        **rope(keys, theta, head_dim),
    }


def partly_rotated(keys: GGUFKeys, model_type: str, dense: bool = True) -> Config:
    """Some of a head's columns are rotated."""
    head_dim = keys.integer(
        "attention.key_length", keys.hidden() // keys.integer("attention.head_count")
    )
    rotated = keys.integer("rope.dimension_count", head_dim)
    config = decoder(keys, model_type, rotated=rotated, dense=dense)
    return config | {"partial_rotary_factor": rotated / head_dim}


def with_scaling(config: Config, **more: object) -> Config:
    """`config` with further fields of rope_scaling, where positions are stretched."""
    scaling = config["rope_scaling"]
    return config | {"rope_scaling": {**scaling, **more}} if isinstance(scaling, dict) else config


def attention_bias(keys: GGUFKeys) -> Config:
    return {"attention_bias": keys.biased("attn_q", "attn_k", "attn_v", "attn_output")}


def gemma_attention(keys: GGUFKeys, config: Config, layers_of_27b: int) -> Config:
    """The largest Gemma scales queries by hidden size per head; only its depth tells it apart."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == layers_of_27b:
        scalar = keys.hidden() // keys.integer("attention.head_count")
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def windows(keys: GGUFKeys, window: int | None, period: int) -> Config:
    """Every `period`-th layer sees everything, unless the file says for each layer."""
    layers = keys.layers()
    pattern = keys.raw("attention.sliding_window_pattern")
    pattern = period if pattern is None else pattern
    if isinstance(pattern, list) and len(pattern) == layers:
        sliding = [bool(layer) for layer in pattern]
    elif isinstance(pattern, int) and pattern >= 1:
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        raise keys.bad("attention.sliding_window_pattern", pattern, f"{layers} flags or a period")
    kinds = ["sliding_attention" if on and window else "full_attention" for on in sliding]
    return {"sliding_window": window, "layer_types": kinds}


def rope(keys: GGUFKeys, theta: float | None, head_dim: int) -> Config:
    base = keys.number("rope.freq_base", theta)
    scaling = _rope_scaling(keys)
    if ROPE_FREQUENCIES not in keys.rope_factors:
        return {"rope_theta": base, "rope_scaling": scaling}
    if scaling is not None:
        raise UnsupportedModel(
            f"{keys.path} scales rotary positions twice: {scaling} and a tensor",
            hint="convert the model again with a current llama.cpp",
        )
    return {"rope_theta": base, "rope_scaling": _llama3_scaling(keys, base, head_dim)}


def _rope_scaling(keys: GGUFKeys) -> Config | None:
    kind = keys.value("rope.scaling.type")
    factor = keys.optional_number("rope.scaling.factor") or 1.0
    original = keys.optional_integer("rope.scaling.original_context_length")
    if kind == "none" or (kind in (None, "linear") and factor == 1.0):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{keys.path} has {keys.prefix}rope.scaling.type = {shortened(kind)}",
            hint="none, linear and yarn can be read",
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or keys.integer("context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(keys: GGUFKeys, theta: float, head_dim: int) -> Config | None:
    """Llama 3's rule survives only as its result, a divisor per frequency: find it again."""
    found = keys.rope_factors[ROPE_FREQUENCIES]
    if found and all(factor == 1.0 for factor in found):
        return None
    possible = len(found) == head_dim // 2 and all(factor >= 1.0 for factor in found)
    factor = max(found, default=1.0)
    expected = _llama3_factors(theta, head_dim, factor) if possible else []
    if not possible or not np.allclose(found, expected, rtol=1e-4, atol=0):
        raise UnsupportedModel(
            f"{keys.path} has rope_freqs.weight = {shortened(found)}, which is not Llama 3's",
            hint="only its scaling (low 1, high 4, original 8192) can be told from the factors",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Divisor of each rotary frequency under Llama 3 scaling: 1 for short wavelengths, `factor` for long ones."""
    low, high, original = 1.0, 4.0, 8192
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
