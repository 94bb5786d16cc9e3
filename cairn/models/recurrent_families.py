"""Readers of config.json for Qwen3-Next, Qwen3.5 and LFM2.

Most of their layers keep a state instead of keys and values: a gated delta net, or a short convolution.
"""

from collections.abc import Callable
from typing import Any

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import (
    check_count_of_types,
    llama_like,
    partial_rope,
    rope_of,
)
from cairn.models.spec import DeltaSizes, Experts, ModelSpec, ShortConvSizes

SIZES_35 = (256, 8)  # experts of Qwen3.5, and those of a token, where its config says nothing
MIXER_NAMES = {"full_attention": "attention", "linear_attention": "delta", "conv": "short_conv"}


def _mixers(fields: Fields, default: list[str]) -> tuple[str, ...]:
    kinds = fields.take_list("layer_types", str, default)
    unknown = set(kinds) - set(MIXER_NAMES)
    check_count_of_types(kinds, len(default))
    if unknown:
        raise UnsupportedModel(
            f"config.json: layer_types has {sorted(unknown)}",
            hint=f"supported, one per layer: {', '.join(MIXER_NAMES)}",
        )
    return tuple(MIXER_NAMES[kind] for kind in kinds)


def _qwen3_next(fields: Fields, family: str) -> ModelSpec:
    layers = fields.take("num_hidden_layers", int)
    every = fields.take_positive("full_attention_interval", int, 4)
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    head_dim = fields.take("head_dim", int, 256)
    if not fields.take("attn_output_gate", bool, True):
        raise UnsupportedModel(
            f"{fields.what}: attn_output_gate is false", hint="this family has gates of outputs"
        )
    fields.neutral(use_sliding_window=False)
    fields.take("mamba_ssm_dtype", str, "float32")  # states are float32 here always
    for name in (
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "num_nextn_predict_layers",
    ):
        fields.seen.add(name)  # layers that predict further tokens are left out
    experts = None
    if family != "qwen3_5":
        experts = _experts(fields, range(layers), *(SIZES_35 if family == "qwen3_5_moe" else ()))
    intermediate = fields.take("intermediate_size", int, 0 if experts is None else 5632)
    return llama_like(
        fields,
        family,
        head_dim=head_dim,
        intermediate=intermediate,
        qk_norm=True,
        norm_plus_one=True,
        output_gate=True,
        mixers=_mixers(fields, kinds),
        delta=_delta(fields),
        experts=experts,
        **_rope(fields, head_dim),
    )


def _rope(fields: Fields, head_dim: int) -> dict[str, Any]:
    """A quarter of the columns. Positions of three axes are the same in a text, so their sections change nothing."""
    parameters = dict(fields.take("rope_parameters", dict, {}))
    for name in ("mrope_section", "mrope_interleaved"):
        parameters.pop(name, None)
    inner = Fields(dict(fields.config) | {"rope_parameters": parameters})
    rope = partial_rope(inner, 0.25, 1e4, head_dim)
    fields.seen |= inner.seen
    return rope


def _delta(fields: Fields) -> DeltaSizes:
    activation = fields.config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # behind the convolution, too
        raise UnsupportedModel(
            f"{fields.what}: hidden_act is {activation!r} in a model with delta nets",
            hint="supported there: silu",
        )
    return DeltaSizes(
        key_heads=fields.take_positive("linear_num_key_heads", int, 16),
        value_heads=fields.take_positive("linear_num_value_heads", int, 32),
        key_width=fields.take_positive("linear_key_head_dim", int, 128),
        value_width=fields.take_positive("linear_value_head_dim", int, 128),
        kernel=fields.take_positive("linear_conv_kernel_dim", int, 4),
    )


def _experts(fields: Fields, layers: range, count: int = 512, per_token: int = 10) -> Experts:
    dense = set(fields.take_list("mlp_only_layers", int, []))
    step = fields.take_positive("decoder_sparse_step", int, 1)
    return Experts(
        count=fields.take("num_experts", int, count),
        per_token=fields.take("num_experts_per_tok", int, per_token),
        intermediate=fields.take("moe_intermediate_size", int, 512),
        renormalize=fields.take("norm_topk_prob", bool, True),
        shared_intermediate=fields.take("shared_expert_intermediate_size", int, 512),
        shared_gate=True,
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
    )


def _lfm2(fields: Fields, family: str) -> ModelSpec:
    layers = fields.take("num_hidden_layers", int)
    attends = fields.take_list("full_attn_idxs", int, list(range(layers)))
    kinds = ["full_attention" if i in attends else "conv" for i in range(layers)]
    context = fields.take("max_position_embeddings", int, 128_000)
    tied = fields.take("tie_word_embeddings", bool, True)
    for name in ("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
                 "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
                 "conv_use_xavier_init", "num_heads", "theta"):  # fmt: skip
        fields.seen.add(name)  # of the code that trained it; the reference reads none of them
    return llama_like(
        fields,
        family,
        experts=None if family == "lfm2" else _lfm2_experts(fields),
        intermediate=_width(fields) if family == "lfm2" else fields.take("intermediate_size", int),
        qk_norm=True,
        tied=fields.take("tie_embedding", bool, tied),
        norm_eps=fields.take("norm_eps", float, 1e-5),
        mixers=_mixers(fields, kinds),
        short_conv=ShortConvSizes(
            kernel=fields.take_positive("conv_L_cache", int, 3),
            bias=fields.take("conv_bias", bool, False),
        ),
        **rope_of(fields, context, 1e6),
    )


def _lfm2_experts(fields: Fields) -> Experts:
    return Experts(
        count=fields.take("num_experts", int, 32),
        per_token=fields.take("num_experts_per_tok", int, 4),
        intermediate=fields.take("moe_intermediate_size", int, 1792),
        gate="sigmoid",
        renormalize=fields.take("norm_topk_prob", bool, True),
        scale=fields.take("routed_scaling_factor", float, 1.0),
        choice_bias=fields.take("use_expert_bias", bool, True),
        dense_layers=tuple(range(fields.take("num_dense_layers", int, 2))),
    )


def _width(fields: Fields) -> int:
    """Two thirds of what the config says, times a factor, up to a multiple; or just what it says."""
    width = fields.take("intermediate_size", int, 12288)
    width = fields.take("block_ff_dim", int, width)
    multiple = fields.take_positive("block_multiple_of", int, 256)
    factor = fields.take("block_ffn_dim_multiplier", float, 1.0)
    if not fields.take("block_auto_adjust_ff_dim", bool, True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


RECURRENT: dict[str, Callable[[Fields], ModelSpec]] = {
    "qwen3_next": lambda fields: _qwen3_next(fields, "qwen3_next"),
    "qwen3_5_text": lambda fields: _qwen3_next(fields, "qwen3_5"),
    "qwen3_5_moe_text": lambda fields: _qwen3_next(fields, "qwen3_5_moe"),
    "lfm2": lambda fields: _lfm2(fields, "lfm2"),
    "lfm2_moe": lambda fields: _lfm2(fields, "lfm2_moe"),
}
