"""Which model does a checkpoint's config.json describe?

    from_hf(config) -> ModelSpec

A family is a function that reads the fields it understands; `config_fields` refuses what nobody has read, because a
model that is computed almost right is worse than none. Defaults are those of `transformers`, which in old checkpoints
writes only what differs from them. No torch, and no tensor names: those are in `checkpoint_names`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.spec import Activation, Experts, ModelSpec, Rope

ACTIVATION_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    kind = config.get("model_type")
    reader = FAMILIES.get(str(kind))
    if reader is None:
        named = config.get("architectures") or []
        hint = f"supported model types: {', '.join(sorted(FAMILIES))}"
        if kind in ("gemma3", "gemma3n") and "text_config" in config:
            hint = "of Gemma 3, the text-only checkpoints (gemma3_text) are supported"
        raise UnsupportedModel(
            f"unknown architecture: model_type {kind!r}, architectures {list(named)}", hint=hint
        )
    fields = Fields(config)
    spec = reader(fields)
    fields.finish()
    return spec


# -- reading ----------------------------------------------------------------------------------


def _llama_like(fields: Fields, family: str, **rest: Any) -> ModelSpec:
    """What all descendants of Llama share; `rest` wins over what is read here."""
    heads = fields.take("num_attention_heads", int)
    hidden = fields.take("hidden_size", int)
    context = fields.take("max_position_embeddings", int)
    attention_bias = fields.take("attention_bias", bool, False)
    common: dict[str, Any] = dict(
        family=family,
        vocab=fields.take("vocab_size", int),
        hidden=hidden,
        layers=fields.take("num_hidden_layers", int),
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", int, heads),
        head_dim=fields.take("head_dim", int, 0) or _divide(hidden, heads),
        intermediate=fields.take("intermediate_size", int),
        context=context,
        tied=fields.take("tie_word_embeddings", bool, False),
        norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        bos_id=fields.take("bos_token_id", int, None),
        eos_ids=_eos_ids(fields),
    )
    if "activation" not in rest:
        rest["activation"] = _activation(fields, "hidden_act", "silu")
    if "rope" not in rest:
        rest |= _rope(fields, context)
    return ModelSpec(**(common | rest))


def _llama(fields: Fields) -> ModelSpec:
    return _llama_like(fields, "llama", mlp_bias=fields.take("mlp_bias", bool, False))


def _mistral(fields: Fields) -> ModelSpec:
    # An absent window is 4096 to the reference, a null one is none.
    window = fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)
    return _llama_like(fields, "mistral", windows=_everywhere(fields, window))


def _mixtral(fields: Fields) -> ModelSpec:
    experts = Experts(
        count=fields.take("num_local_experts", int, 8),
        per_token=fields.take("num_experts_per_tok", int, 2),
        intermediate=fields.take("intermediate_size", int),
    )
    window = fields.take("sliding_window", int, 0)
    return _llama_like(
        fields,
        "mixtral",
        experts=experts,
        windows=_everywhere(fields, window),
        norm_eps=fields.take("rms_norm_eps", float, 1e-5),
    )


def _qwen2(fields: Fields) -> ModelSpec:
    return _llama_like(fields, "qwen2", qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelSpec:
    head_dim = fields.take("head_dim", int, 128)
    windows = _qwen_windows(fields)
    return _llama_like(fields, "qwen3", head_dim=head_dim, qk_norm=True, windows=windows)


def _qwen3_moe(fields: Fields) -> ModelSpec:
    layers = range(fields.take("num_hidden_layers", int))
    dense = set(fields.take("mlp_only_layers", list, []))
    step = fields.take("decoder_sparse_step", int, 1)
    count = fields.take("num_experts", int, 0) or fields.take("num_local_experts", int, 128)
    fields.seen.add("num_local_experts")
    experts = Experts(
        count=count,
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=fields.take("moe_intermediate_size", int),
        renormalize=fields.take("norm_topk_prob", bool, False),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
    )
    window = fields.take("sliding_window", int, 0)
    if not fields.take("use_sliding_window", bool, False):
        window = 0
    fields.take("max_window_layers", int, 0)  # the reference reads it nowhere in this family
    windows = _everywhere(fields, window)
    return _llama_like(fields, "qwen3_moe", qk_norm=True, experts=experts, windows=windows)


def _gpt2(fields: Fields) -> ModelSpec:
    hidden, heads = fields.take("n_embd", int), fields.take("n_head", int)
    return ModelSpec(
        family="gpt2",
        vocab=fields.take("vocab_size", int),
        hidden=hidden,
        layers=fields.take("n_layer", int),
        heads=heads,
        kv_heads=heads,
        head_dim=_divide(hidden, heads),
        intermediate=fields.take("n_inner", int, 4 * hidden),
        context=fields.take("n_positions", int, 1024),
        tied=fields.take("tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=fields.take("layer_norm_epsilon", float, 1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=_activation(fields, "activation_function", "gelu_new"),
        gated=False,
        positions="learned",
        bos_id=fields.take("bos_token_id", int, None),
        eos_ids=_eos_ids(fields),
    )


def _gemma(fields: Fields, family: str, windows: tuple[int, ...], **rest: Any) -> ModelSpec:
    fields.take("hidden_act", str, "")  # superseded by hidden_activation in the reference
    return _llama_like(
        fields,
        family,
        tied=fields.take("tie_word_embeddings", bool, True),
        head_dim=fields.take("head_dim", int, 256),
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_plus_one=True,
        post_norms=True,
        windows=windows,
        query_scale=fields.take("query_pre_attn_scalar", (int, float), 256) ** -0.5,
        embedding_scale=fields.take("hidden_size", int) ** 0.5,
        **rest,
    )


def _gemma2(fields: Fields) -> ModelSpec:
    return _gemma(
        fields,
        "gemma2",
        _layer_windows(fields, fields.take("sliding_window", int, 4096), every=2),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> ModelSpec:
    every = fields.take("sliding_window_pattern", int, 0)
    every = every or fields.take("_sliding_window_pattern", int, 6)
    fields.seen.add("_sliding_window_pattern")
    windows = _layer_windows(fields, fields.take("sliding_window", int, 4096), every)
    context = fields.take("max_position_embeddings", int)
    both = fields.take("rope_parameters", dict, {})
    local_theta = fields.take("rope_local_base_freq", float, 10_000.0)
    if "full_attention" in both:
        rope = _rope_from(Fields(both["full_attention"], "rope_parameters"), context, 1e6)
        local = _rope_from(
            Fields(both.get("sliding_attention") or {}, "rope_parameters"), context, local_theta
        )
    else:
        rope = _rope(fields, context, 1e6)["rope"]
        local = Rope(theta=local_theta)
    return _gemma(
        fields,
        "gemma3",
        windows,
        qk_norm=True,
        rope=rope,
        rope_local=local,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 0.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 0.0),
    )


FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


# -- pieces that several families share ---------------------------------------------------------


def _divide(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise UnsupportedModel(
            f"config.json: {heads} attention heads do not divide hidden size {hidden}",
            hint="such a model has to give head_dim",
        )
    return hidden // heads


def _activation(fields: Fields, name: str, default: str) -> Activation:
    value = fields.take(name, str, default)
    if value not in ACTIVATION_NAMES:
        raise UnsupportedModel(
            f"config.json: {name} is {value!r}",
            hint=f"supported activations: {', '.join(ACTIVATION_NAMES)}",
        )
    return ACTIVATION_NAMES[value]


def _eos_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.take("eos_token_id", (int, list), [])
    return (value,) if isinstance(value, int) else tuple(value)


def _softcap(fields: Fields, name: str, default: float) -> float:
    absent = name not in fields.config  # a null switches it off
    return fields.take(name, float, default if absent else 0.0)


def _everywhere(fields: Fields, window: int) -> tuple[int, ...]:
    return (window,) * fields.take("num_hidden_layers", int) if window else ()


def _layer_windows(fields: Fields, window: int, every: int) -> tuple[int, ...]:
    """By `layer_types` where it is given; else every n-th layer sees everything."""
    layers = fields.take("num_hidden_layers", int)
    pattern = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds = fields.take("layer_types", list, pattern)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != layers:
        raise UnsupportedModel(
            f"config.json: layer_types {sorted(map(str, unknown))} in {len(kinds)} entries for "
            f"{layers} layers",
            hint="one of sliding_attention and full_attention per layer is supported",
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _qwen_windows(fields: Fields) -> tuple[int, ...]:
    window = fields.take("sliding_window", int, 0)
    layers = fields.take("num_hidden_layers", int)
    first = fields.take("max_window_layers", int, 28)
    if not fields.take("use_sliding_window", bool, False):
        window, first = 0, layers
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = fields.take("layer_types", list, kinds)
    if not window or "sliding_attention" not in kinds:
        return ()
    return _layer_windows(fields, window, every=1) if "layer_types" in fields.config else tuple(
        window if kind == "sliding_attention" else 0 for kind in kinds
    )  # fmt: skip


def _rope(fields: Fields, context: int, theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary positions in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    theta = fields.take("rope_theta", float, theta)
    scaling = fields.take("rope_scaling", dict, {})
    parameters = fields.take("rope_parameters", dict, {}) or scaling
    rope = _rope_from(Fields(parameters, "rope_parameters"), context, theta)
    if rope.kind in ("dynamic", "yarn"):  # these two stretch further than the config says
        context = max(context, int(rope.original_context * rope.factor))
    return {"rope": rope, "context": context}


def _rope_from(fields: Fields, context: int, theta: float) -> Rope:
    kind = fields.take("type", str, "default")
    kind = fields.take("rope_type", str, kind)
    theta = fields.take("rope_theta", float, theta)
    if kind not in ROPE_READERS:
        raise UnsupportedModel(
            f"config.json: rotary positions of type {kind!r}",
            hint=f"supported types: {', '.join(ROPE_READERS)}",
        )
    rope = Rope(theta=theta, **ROPE_READERS[kind](fields, context))
    fields.finish()
    return rope


def _dynamic_rope(fields: Fields, context: int) -> dict[str, Any]:
    fields.take("original_max_position_embeddings", int, 0)  # the reference goes by the context
    factor = fields.take("factor", float)
    return {"kind": "dynamic", "factor": factor, "original_context": context}


def _llama3_rope(fields: Fields, context: int) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": fields.take("factor", float),
        "low_freq_factor": fields.take("low_freq_factor", float),
        "high_freq_factor": fields.take("high_freq_factor", float),
        "original_context": fields.take("original_max_position_embeddings", int, context),
    }


def _yarn_rope(fields: Fields, context: int) -> dict[str, Any]:
    original = fields.take("original_max_position_embeddings", int, context)
    return {
        "kind": "yarn",
        "factor": fields.take("factor", float, context / original),
        "original_context": original,
        "beta_fast": fields.take("beta_fast", float, 32.0),
        "beta_slow": fields.take("beta_slow", float, 1.0),
        "attention_factor": fields.take("attention_factor", float, None),
        "mscale": fields.take("mscale", float, 0.0),
        "mscale_all_dim": fields.take("mscale_all_dim", float, 0.0),
        "truncate": fields.take("truncate", bool, True),
    }


ROPE_READERS: dict[str, Callable[[Fields, int], dict[str, Any]]] = {
    "default": lambda fields, context: {},
    "linear": lambda fields, context: {"kind": "linear", "factor": fields.take("factor", float)},
    "dynamic": _dynamic_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}
