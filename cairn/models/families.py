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
    from cairn.models.described_families import DESCRIBED  # it reads with the functions below

    kind = config.get("model_type")
    reader = FAMILIES.get(str(kind)) or DESCRIBED.get(str(kind))
    if reader is None:
        named = config.get("architectures") or []
        hint = f"supported model types: {', '.join(sorted(FAMILIES | DESCRIBED))}"
        if kind in ("gemma3", "gemma3n") and "text_config" in config:
            hint = "of Gemma 3, the text-only checkpoints (gemma3_text) are supported"
        raise UnsupportedModel(
            f"unknown architecture: model_type {kind!r}, architectures {named!r}", hint=hint
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
        kv_heads=fields.take("num_key_value_heads", int, *_every_head(fields, family, heads)),
        head_dim=fields.take("head_dim", int, 0) or _divide(hidden, heads),
        intermediate=fields.take("intermediate_size", int),
        context=context,
        tied=fields.take("tie_word_embeddings", bool, False),
        norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        bos_id=fields.take("bos_token_id", int, None),
        eos_ids=eos_ids_of(fields),
    )
    if "activation" not in rest:
        rest["activation"] = _activation(fields, "hidden_act", "silu")
    if "rope" not in rest:
        rest |= _rope(fields, context)
    return ModelSpec(**(common | rest))


def _llama(fields: Fields) -> ModelSpec:
    return _llama_like(fields, "llama", mlp_bias=fields.take("mlp_bias", bool, False))


def _mistral(fields: Fields) -> ModelSpec:
    return _llama_like(fields, "mistral", windows=_everywhere(fields, _window(fields)))


def _mixtral(fields: Fields) -> ModelSpec:
    experts = Experts(
        count=fields.take("num_local_experts", int, 8),
        per_token=fields.take("num_experts_per_tok", int, 2),
        intermediate=fields.take("intermediate_size", int),
        choice_bias=_choice_bias(fields),
    )
    context = fields.take("max_position_embeddings", int)
    return _llama_like(
        fields,
        "mixtral",
        experts=experts,
        windows=_everywhere(fields, fields.take("sliding_window", int, 0)),
        norm_eps=fields.take("rms_norm_eps", float, 1e-5),
        **_rope(fields, context, 1e6),
    )


def _choice_bias(fields: Fields) -> bool:
    """Whether a bias steers the choice of experts; DeepSeek's name for balance without an auxiliary loss."""
    return fields.take("topk_method", str, "greedy") == "noaux_tc"


def _qwen2(fields: Fields) -> ModelSpec:
    return _llama_like(fields, "qwen2", qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelSpec:
    head_dim = fields.take("head_dim", int, 128)
    windows = _qwen_windows(fields)
    return _llama_like(fields, "qwen3", head_dim=head_dim, qk_norm=True, windows=windows)


def _qwen3_moe(fields: Fields) -> ModelSpec:
    layers = range(fields.take("num_hidden_layers", int))
    dense = set(fields.take_list("mlp_only_layers", int, []))
    step = fields.take_positive("decoder_sparse_step", int, 1)
    count = fields.take("num_experts", int, 0) or fields.take("num_local_experts", int, 128)
    fields.seen.add("num_local_experts")
    experts = Experts(
        count=count,
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=fields.take("moe_intermediate_size", int),
        renormalize=fields.take("norm_topk_prob", bool, False),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
        choice_bias=_choice_bias(fields),
    )
    fields.take("max_window_layers", int, 0)  # the reference reads it nowhere in this family
    windows = _everywhere(fields, _window_if_used(fields))
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
        eos_ids=eos_ids_of(fields),
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
        query_scale=fields.take_positive("query_pre_attn_scalar", float, 256.0) ** -0.5,
        embedding_scale=fields.take_positive("hidden_size", int, 0) ** 0.5,
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
    every = fields.take_positive("_sliding_window_pattern", int, 6)
    every = fields.take_positive("sliding_window_pattern", int, every)
    windows = _layer_windows(fields, fields.take("sliding_window", int, 4096), every)
    context = fields.take("max_position_embeddings", int)
    both = fields.take("rope_parameters", dict, {})
    local_theta = fields.take("rope_local_base_freq", float, 10_000.0)
    if "full_attention" in both:
        kinds = Fields(both, "rope_parameters")
        rope, local = (
            _rope_from(Fields(kinds.take(kind, dict, {}), "rope_parameters"), context, theta)
            for kind, theta in (("full_attention", 1e6), ("sliding_attention", local_theta))
        )
        kinds.finish()
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


def eos_ids_of(fields: Fields) -> tuple[int, ...]:
    if isinstance(fields.config.get("eos_token_id"), list):
        return tuple(fields.take_list("eos_token_id", int, []))
    value = fields.take("eos_token_id", int, None)
    return () if value is None else (value,)


def _softcap(fields: Fields, name: str, default: float) -> float:
    absent = name not in fields.config  # a null switches it off
    return fields.take(name, float, default if absent else 0.0)


def _every_head(fields: Fields, family: str, heads: int) -> tuple[int, ...]:
    """Keys and values for every head where a config gives null, and in Llama's before there was the field."""
    return (heads,) if family == "llama" or "num_key_value_heads" in fields.config else ()


def _window(fields: Fields) -> int:
    """An absent window is 4096 to the reference, a null one is none."""
    return fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)


def _window_if_used(fields: Fields) -> int:
    window = _window(fields)
    return window if fields.take("use_sliding_window", bool, False) else 0


def _everywhere(fields: Fields, window: int) -> tuple[int, ...]:
    return (window,) * fields.take("num_hidden_layers", int) if window else ()


def _layer_windows(fields: Fields, window: int, every: int) -> tuple[int, ...]:
    """By `layer_types` where it is given; else every n-th layer sees everything."""
    layers = fields.take("num_hidden_layers", int)
    return _by_type(fields, window, [bool((i + 1) % every) for i in range(layers)])


def _qwen_windows(fields: Fields) -> tuple[int, ...]:
    """By `layer_types` where it is given; else from a certain layer on."""
    layers = fields.take("num_hidden_layers", int)
    first = fields.take("max_window_layers", int, 28)
    window = _window_if_used(fields)
    windows = _by_type(fields, window, [i >= first for i in range(layers)])
    return windows if any(windows) else ()


def _by_type(fields: Fields, window: int, default: list[bool]) -> tuple[int, ...]:
    names = ["sliding_attention" if windowed else "full_attention" for windowed in default]
    kinds = fields.take_list("layer_types", str, names)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != len(names):
        raise UnsupportedModel(
            f"config.json: layer_types {sorted(unknown)} in {len(kinds)} entries for "
            f"{len(names)} layers",
            hint="one of sliding_attention and full_attention per layer is supported",
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(fields: Fields, context: int, theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary positions in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    theta = fields.take("rope_theta", float, theta)
    parameters = fields.take("rope_parameters", dict, {})
    parameters = fields.take("rope_scaling", dict, {}) or parameters  # the reference's order
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
    original = fields.take_positive("original_max_position_embeddings", int, context)
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
