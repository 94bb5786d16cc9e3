"""Conversion of GGUF metadata to the equivalent Hugging Face config.json.

One function per architecture, here, in `sparse_config` (experts) and in `recurrent_config` (states); defaults are those
of llama.cpp, which wrote the file. `GGUFKeys` refuses what no function reads. This module reads no weights.
"""

import math
from collections.abc import Callable

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.gguf.decoder_config import (
    Config,
    attention_bias,
    decoder,
    gemma_attention,
    kind,
    partly_rotated,
    windows,
)
from cairn.models.gguf.header import GGUFHeader
from cairn.models.gguf.keys import LONG_FACTORS, SHORT_FACTORS, GGUFKeys, shortened, shortest
from cairn.models.gguf.recurrent_config import RECURRENT
from cairn.models.gguf.sparse_config import SPARSE


def hf_config(header: GGUFHeader, rope_factors: dict[str, list[float]]) -> Config:
    """`rope_factors`: what the file's tensors of `ROPE_FACTORS` hold."""
    _refuse_all_but_whole_models(header)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _TRANSLATIONS:
        raise UnsupportedModel(
            f"{header.path} holds a model of the architecture {shortened(architecture)}",
            hint=f"GGUF files of these can be read: {', '.join(_TRANSLATIONS)}",
        )
    keys = GGUFKeys(header, architecture, rope_factors)
    config = _TRANSLATIONS[architecture](keys) | {
        "vocab_size": keys.vocabulary(),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_special_tokens(header),
    }
    keys.refuse_unread()
    return config


def _refuse_all_but_whole_models(header: GGUFHeader) -> None:
    metadata = header.metadata
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UnsupportedModel(
            f"{header.path} is a GGUF file of the type {shortened(kind)}, not a model",
            hint="give the file of the model itself",
        )
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel(
            f"{header.path} is one of the {shortened(parts)} parts of a model",
            hint="join them first: llama-gguf-split --merge <first part> <whole>.gguf",
        )
    if (version := metadata.get("general.quantization_version", 2)) != 2:
        raise UnsupportedModel(
            f"{header.path} has quantisation version {shortened(version)}; 2 is read",
            hint="quantise it again with a current llama.cpp",
        )


def _special_tokens(header: GGUFHeader) -> Config:
    """A turn or a message that ends (eot, eom) ends generation too, as a second eos id does."""

    def token(name: str) -> int | None:
        value = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    ends = [token(name) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    found: Config = {"bos_token_id": token("bos"), "pad_token_id": token("padding")}
    found["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    return {name: value for name, value in found.items() if value is not None}


def _llama(keys: GGUFKeys) -> Config:
    """Mistral and Mixtral are llamas to llama.cpp: a window, or experts, tell them apart."""
    config = decoder(keys, "llama") | {"hidden_act": "silu"}
    window = keys.optional_integer("attention.sliding_window")
    experts, used = keys.optional_integer("expert_count"), keys.raw("expert_used_count")
    if experts:
        used = keys.integer("expert_used_count")
        config |= kind("mixtral") | {"num_local_experts": experts, "num_experts_per_tok": used}
    elif used:
        raise keys.bad("expert_used_count", used, "0, as there are no experts")
    if window:
        return config | kind("mixtral" if experts else "mistral") | {"sliding_window": window}
    mlp_bias = {"mlp_bias": keys.biased("ffn_gate", "ffn_up", "ffn_down")}
    return config if experts else config | attention_bias(keys) | mlp_bias


def _qwen2(keys: GGUFKeys) -> Config:
    return decoder(keys, "qwen2") | {"hidden_act": "silu"}


def _qwen3(keys: GGUFKeys) -> Config:
    return decoder(keys, "qwen3") | {"hidden_act": "silu"} | attention_bias(keys)


def _gemma(keys: GGUFKeys) -> Config:
    return decoder(keys, "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: GGUFKeys) -> Config:
    config = decoder(keys, "gemma2")
    window = keys.integer("attention.sliding_window", 4096)
    return (
        config
        | gemma_attention(keys, config, layers_of_27b=46)
        | windows(keys, window, period=2)
        | {
            "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        }
    )


def _gemma3(keys: GGUFKeys) -> Config:
    config = decoder(keys, "gemma3_text", theta=None)
    window = keys.optional_integer("attention.sliding_window")
    return (
        config
        | gemma_attention(keys, config, layers_of_27b=62)
        | windows(keys, window, period=6)
        | {
            "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": keys.optional_number("final_logit_softcapping"),
        }
    )


def _gpt2(keys: GGUFKeys) -> Config:
    heads = keys.integer("attention.head_count")
    if (shared := keys.integer("attention.head_count_kv", heads)) != heads:
        raise keys.bad("attention.head_count_kv", shared, f"{heads}, the number of heads")
    return kind("gpt2") | {
        "n_embd": keys.hidden(),
        "n_layer": keys.layers(),
        "n_head": heads,
        "n_inner": keys.integer("feed_forward_length"),
        "n_positions": keys.integer("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _granite(keys: GGUFKeys) -> Config:
    config = decoder(keys, "granite") | {"hidden_act": "silu"} | attention_bias(keys)
    return config | {
        "mlp_bias": keys.biased("ffn_gate", "ffn_up", "ffn_down"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale"),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _smollm3(keys: GGUFKeys) -> Config:
    """llama.cpp leaves out the positions of every fourth layer, without a key that says so."""
    config = decoder(keys, "smollm3") | {"hidden_act": "silu"} | attention_bias(keys)
    mlp_bias = keys.biased("ffn_gate", "ffn_up", "ffn_down")
    return config | {"mlp_bias": mlp_bias, "no_rope_layer_interval": 4}


def _olmo2(keys: GGUFKeys) -> Config:
    """OLMo 3 is an OLMo 2 to llama.cpp: windows tell them apart."""
    window = keys.optional_integer("attention.sliding_window")
    config = decoder(keys, "olmo3" if window else "olmo2") | {"hidden_act": "silu"}
    return config | windows(keys, window, period=4) if window else config


def _phi3(keys: GGUFKeys) -> Config:
    """Some of a head's columns may be rotated, and by longrope: a divisor for each frequency, of two sets."""
    window = keys.optional_integer("attention.sliding_window")
    config = partly_rotated(keys, "phi3") | {"hidden_act": "silu", "sliding_window": window}
    context = keys.integer("context_length")
    original = keys.optional_integer("rope.scaling.original_context_length") or context
    names = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
    found = {
        name: [shortest(x) for x in keys.rope_factors[tensor]]
        for name, tensor in names.items()
        if tensor in keys.rope_factors
    }
    if not found:
        return config
    if len(found) == 1:
        raise WeightsError(
            f"{keys.path} has {next(iter(found))} of longrope without the other",
            hint="the file is damaged or was converted wrongly: fetch it again",
        )
    if original < 2:
        raise keys.bad("rope.scaling.original_context_length", original, "at least 2")
    amplitude = keys.optional_number("rope.scaling.attn_factor") or 1.0
    stretch = max(context / original, 1.0)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original))
    if abs(amplitude - usual) > 1e-4:
        raise keys.bad("rope.scaling.attn_factor", amplitude, f"{usual:.4f}, that of longrope")
    scaling = {"rope_type": "longrope", **found}
    return config | {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _hunyuan_dense(keys: GGUFKeys) -> Config:
    """A base that was stretched is stored as it came out."""
    return decoder(keys, "hunyuan_v1_dense") | {"hidden_act": "silu"} | attention_bias(keys)


def _glm4(keys: GGUFKeys) -> Config:
    return partly_rotated(keys, "glm4") | {"hidden_act": "silu"} | attention_bias(keys)


def _exaone4(keys: GGUFKeys) -> Config:
    """EXAONE 4: all layers have RoPE without windows; with windows only the windowed layers have it."""
    window = keys.optional_integer("attention.sliding_window")
    config = decoder(keys, "exaone4") | {"hidden_act": "silu"}
    return config | windows(keys, window, period=4)


def _mistral3(keys: GGUFKeys) -> Config:
    """Ministral 3 stretches positions and scales queries by theirs; the decoder of Mistral Small 3 does neither.

    No key says mscale, which is 1 in every published config.
    """
    scale = keys.optional_number("attention.temperature_scale")
    all_dim = keys.optional_number("rope.scaling.yarn_log_multiplier")
    config = decoder(keys, "ministral3" if scale else "mistral") | {"hidden_act": "silu"}
    scaling, theta = config["rope_scaling"], config["rope_theta"]
    if not scale:
        return config | {"sliding_window": None}
    if not isinstance(scaling, dict):
        raise keys.bad("attention.temperature_scale", scale, "none, as positions are not stretched")
    parameters = {"mscale": 1.0, "mscale_all_dim": all_dim} if all_dim else {}
    parameters |= scaling | {"rope_theta": theta, "llama_4_scaling_beta": scale}
    del config["rope_scaling"], config["rope_theta"]
    return config | {"rope_parameters": parameters}


def _seed_oss(keys: GGUFKeys) -> Config:
    return decoder(keys, "seed_oss") | {
        "hidden_act": "silu",
        "attention_bias": keys.biased("attn_q", "attn_k", "attn_v"),
        "attention_out_bias": keys.biased("attn_output"),
        "mlp_bias": keys.biased("ffn_gate", "ffn_up", "ffn_down"),
    }


_TRANSLATIONS: dict[str, Callable[[GGUFKeys], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "granite": _granite,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "hunyuan-dense": _hunyuan_dense,
    "glm4": _glm4,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
    "mistral3": _mistral3,
    **SPARSE,
    **RECURRENT,
}
