"""Fields of a config.json that several families share, and how they are read.

`families` and its neighbours call these; what a function takes here counts as understood. No torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.spec import Activation, ModelSpec, Rope

ACTIVATION_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def llama_like(fields: Fields, family: str, **rest: Any) -> ModelSpec:
    """Spec of a Llama-like family; `rest` overrides the fields read here."""
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
        intermediate=fields.take("intermediate_size", int),
        context=context,
        tied=fields.take("tie_word_embeddings", bool, False),
        norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        bos_id=fields.take("bos_token_id", int, None),
        eos_ids=eos_ids_of(fields),
    )
    if "head_dim" not in rest:
        rest["head_dim"] = fields.take("head_dim", int, 0) or divide(hidden, heads)
    if "activation" not in rest:
        rest["activation"] = activation_of(fields, "hidden_act", "silu")
    if "rope" not in rest:
        rest |= rope_of(fields, context)
    return ModelSpec(**(common | rest))


def read_like_llama(fields: Fields, family: str, theta: float = 1e4, **rest: Any) -> ModelSpec:
    """Like Llama, with the defaults of most later families. `rest`: what differs, and the defaults that do."""
    context = fields.take("max_position_embeddings", int)
    if "rope" not in rest:
        rest |= rope_of(fields, context, theta)
    eps = fields.take("rms_norm_eps", float, rest.pop("eps", 1e-5))
    return llama_like(fields, family, norm_eps=eps, **rest)


def head_dim_of(fields: Fields, default: int = 0) -> int:
    """`default`: where the field is absent; a null one is the width divided by the heads."""
    default = 0 if "head_dim" in fields.config else default
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    return fields.take("head_dim", int, default) or hidden // max(heads, 1)


def divide(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise UnsupportedModel(
            f"config.json: {heads} attention heads do not divide hidden size {hidden}",
            hint="such a model has to give head_dim",
        )
    return hidden // heads


def activation_of(fields: Fields, name: str, default: str) -> Activation:
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


def softcap(fields: Fields, name: str, default: float) -> float:
    absent = name not in fields.config  # a null switches it off
    return fields.take(name, float, default if absent else 0.0)


def _every_head(fields: Fields, family: str, heads: int) -> tuple[int, ...]:
    """Keys and values for every head where a config gives null, and in Llama's before there was the field."""
    return (heads,) if family == "llama" or "num_key_value_heads" in fields.config else ()


def window_of(fields: Fields) -> int:
    """An absent window is 4096 to the reference, a null one is none."""
    return fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)


def window_if_used(fields: Fields) -> int:
    window = window_of(fields)
    return window if fields.take("use_sliding_window", bool, False) else 0


def everywhere(fields: Fields, window: int) -> tuple[int, ...]:
    return (window,) * fields.take("num_hidden_layers", int) if window else ()


def layer_windows(fields: Fields, window: int, every: int) -> tuple[int, ...]:
    """Windows from `layer_types` if given; otherwise every n-th layer has full attention."""
    layers = fields.take("num_hidden_layers", int)
    return windows_by_type(fields, window, [bool((i + 1) % every) for i in range(layers)])


def qwen_windows(fields: Fields) -> tuple[int, ...]:
    """Windows from `layer_types` if given; otherwise from layer `max_window_layers` on."""
    layers = fields.take("num_hidden_layers", int)
    first = fields.take("max_window_layers", int, 28)
    window = window_if_used(fields)
    windows = windows_by_type(fields, window, [i >= first for i in range(layers)])
    return windows if any(windows) else ()


def check_count_of_types(kinds: Sequence[str], layers: int) -> None:
    if len(kinds) != layers:
        raise UnsupportedModel(
            f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}",
            hint="there is one entry for each layer: compare it with the config of the original checkpoint",
        )


def windows_by_type(fields: Fields, window: int, default: list[bool]) -> tuple[int, ...]:
    names = ["sliding_attention" if windowed else "full_attention" for windowed in default]
    kinds = fields.take_list("layer_types", str, names)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    check_count_of_types(kinds, len(names))
    if unknown:
        raise UnsupportedModel(
            f"config.json: layer_types has {sorted(unknown)}",
            hint="one of sliding_attention and full_attention per layer is supported",
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def rope_of(fields: Fields, context: int, theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary positions in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    theta = fields.take("rope_theta", float, theta)
    parameters = fields.take("rope_parameters", dict, {})
    parameters = fields.take("rope_scaling", dict, {}) or parameters  # the reference's order
    rope = rope_from(Fields(parameters, "rope_parameters"), context, theta)
    if rope.kind in ("dynamic", "yarn"):  # these two stretch further than the config says
        context = max(context, int(rope.original_context * rope.factor))
    return {"rope": rope, "context": context}


def partial_rope(
    fields: Fields, share: float, theta: float = 1e4, head_dim: int = 0
) -> dict[str, Any]:
    """Rotary positions of some of a head's columns; the share stands beside the others or among them."""
    context = fields.take("max_position_embeddings", int)
    share = fields.take("partial_rotary_factor", float, share)
    theta = fields.take("rope_theta", float, theta)
    parameters = fields.take("rope_parameters", dict, {})
    settings = dict(fields.take("rope_scaling", dict, {}) or parameters)
    share = Fields(settings, "rope_parameters").take("partial_rotary_factor", float, share)
    settings.pop("partial_rotary_factor", None)
    rope = rope_of(Fields({"rope_parameters": settings}), context, theta)
    size = head_dim_of(fields, head_dim)
    rotated = int(size * share)
    rotated = 0 if rotated == size else rotated
    return rope | {"rope": msgspec.structs.replace(rope["rope"], rotated=rotated)}


def rope_from(fields: Fields, context: int, theta: float) -> Rope:
    kind = fields.take("type", str, "default")
    kind = fields.take("rope_type", str, kind)
    kind = "default" if kind == "mrope" else kind  # of models that see; the sections say the same
    sections = tuple(fields.take_list("mrope_section", int, []))
    interleaved = fields.take("mrope_interleaved", bool, False)
    theta = fields.take("rope_theta", float, theta)
    if kind not in ROPE_READERS:
        raise UnsupportedModel(
            f"config.json: rotary positions of type {kind!r}",
            hint=f"supported types: {', '.join(ROPE_READERS)}",
        )
    stretch = ROPE_READERS[kind](fields, context)
    rope = Rope(theta=theta, sections=sections, interleaved=interleaved, **stretch)
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
