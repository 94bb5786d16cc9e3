"""Families with experts whose attention is like Llama's: GLM-4.5, dots1, MiniMax-M2, ERNIE 4.5. No torch.

Those with an attention of their own, DeepSeek and gpt-oss, are in `sparse_families`.
"""

from collections.abc import Callable
from typing import Any

from cairn.models.config_fields import Fields
from cairn.models.family_fields import head_dim_of, partial_rope, read_like_llama, windows_by_type
from cairn.models.spec import Experts, ModelSpec

MINIMAX_BETAS = tuple(
    f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")
)


def _sigmoid_experts(fields: Fields, **rest: Any) -> Experts:
    """DeepSeek's words: sigmoid scores, a bias for the choice, groups, shared experts, dense layers first."""
    width = fields.take("moe_intermediate_size", int, 1408)
    settings: dict[str, Any] = dict(
        count=fields.take("n_routed_experts", int, 128),
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=width,
        gate="sigmoid",
        choice_bias=True,
        scale=fields.take("routed_scaling_factor", float, 1.0),
        groups=fields.take_positive("n_group", int, 1),
        top_groups=fields.take_positive("topk_group", int, 1),
        shared_intermediate=width * fields.take("n_shared_experts", int, 1),
    )
    return Experts(**settings | rest)


def _first_dense(fields: Fields, default: int) -> tuple[int, ...]:
    return tuple(range(fields.take("first_k_dense_replace", int, default)))


def _glm4_moe(fields: Fields) -> ModelSpec:
    fields.seen |= {"num_nextn_predict_layers", "num_mtp_layers"}  # layers that are left out
    experts = _sigmoid_experts(
        fields,
        renormalize=fields.take("norm_topk_prob", bool, True),
        dense_layers=_first_dense(fields, 1),
    )
    return read_like_llama(
        fields,
        "glm4_moe",
        experts=experts,
        qk_norm=fields.take("use_qk_norm", bool, False),
        qkv_bias=fields.take("attention_bias", bool, False),
        out_bias=False,
        **partial_rope(fields, 0.5),
    )


def _dots1(fields: Fields) -> ModelSpec:
    layers = range(fields.take("num_hidden_layers", int))
    window = fields.take("sliding_window", int, 0 if "sliding_window" in fields.config else 4096)
    first = fields.take("max_window_layers", int, 62)
    windows = windows_by_type(fields, window, [bool(window) and i >= first for i in layers])
    fields.neutral(scoring_func="noaux_tc", topk_method="noaux_tc", moe_layer_freq=1)
    if not window:
        fields.neutral(use_sliding_window=False)
    experts = _sigmoid_experts(
        fields,
        renormalize=fields.take("norm_topk_prob", bool, False),
        dense_layers=_first_dense(fields, 0),
    )
    return read_like_llama(
        fields,
        "dots1",
        eps=1e-6,
        experts=experts,
        qk_norm=True,
        windows=windows if any(windows) else (),
    )


def _minimax_m2(fields: Fields) -> ModelSpec:
    """Published configs also have what the code of its authors can do besides, and layers that are left out."""
    fields.neutral(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        attn_type_list=[1] * fields.take("num_hidden_layers", int),  # 1: attention
        shared_intermediate_size=0,
        sliding_window=None,
        **dict.fromkeys(MINIMAX_BETAS, 1.0),
    )
    fields.seen |= {"mlp_intermediate_size", "shared_moe_mode"}  # of layers that it has none of
    fields.seen |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
    size = head_dim_of(fields, 128)
    rotated = fields.take("rotary_dim", int, size)
    experts = Experts(
        count=fields.take("num_local_experts", int, 256),
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=fields.take("intermediate_size", int),
        gate="sigmoid",
        choice_bias=True,
    )
    return read_like_llama(
        fields,
        "minimax_m2",
        eps=1e-6,
        experts=experts,
        head_dim=size,
        qk_norm=True,
        qk_norm_over="width",
        **partial_rope(fields, rotated / size, 5e6, head_dim=128),
    )


def _ernie4_5_moe(fields: Fields) -> ModelSpec:
    layers = fields.take("num_hidden_layers", int)
    width = fields.take("moe_intermediate_size", int, 1536)
    every = fields.take_positive("moe_layer_interval", int, 1)
    first = fields.take("moe_layer_start_index", int, 1)
    last = fields.take("moe_layer_end_index", int, -1)
    last = layers - 1 if last == -1 else last
    fields.neutral(moe_gate="topk", moe_use_aux_free=True)
    # One keeps a sum of zero from dividing, one drops tokens in training, one counts layers that are left out.
    fields.seen |= {"moe_norm_min", "moe_capacity", "num_nextn_predict_layers"}
    dense = tuple(i for i in range(layers) if (i + 1) % every or not first <= i <= last)
    experts = Experts(
        count=fields.take("moe_num_experts", int, 64),
        per_token=fields.take("moe_k", int, 6),
        intermediate=width,
        choice_bias=True,
        shared_intermediate=width * fields.take("moe_num_shared_experts", int, 2),
        dense_layers=dense,
    )
    tied = fields.take("tie_word_embeddings", bool, True)
    return read_like_llama(fields, "ernie4_5_moe", 5e5, tied=tied, experts=experts)


EXPERT_FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
}
