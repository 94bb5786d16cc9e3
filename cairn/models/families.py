"""Readers of config.json by model family.

    from_hf(config) -> ModelSpec

A family is a function that reads the fields it understands; `config_fields` refuses what was not read, because a
model that is computed almost right is worse than none. Defaults are those of `transformers`, which in old checkpoints
writes only what differs from them. No torch, and no tensor names: those are in `checkpoint_names`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.expert_families import EXPERT_FAMILIES
from cairn.models.family_fields import (
    activation_of,
    divide,
    eos_ids_of,
    everywhere,
    layer_windows,
    llama_like,
    qwen_windows,
    rope_from,
    rope_of,
    softcap,
    window_if_used,
    window_of,
)
from cairn.models.llama_like_families import DESCRIBED
from cairn.models.recurrent_families import RECURRENT
from cairn.models.sparse_families import SPARSE
from cairn.models.spec import Experts, ModelSpec, Rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    kind = config.get("model_type")
    reader = FAMILIES.get(str(kind))
    if reader is None:
        named = config.get("architectures") or []
        hint = f"supported model types: {', '.join(sorted(FAMILIES))}"
        if kind in ("gemma3", "gemma3n") and "text_config" in config:
            hint = "of Gemma 3, the text-only checkpoints (gemma3_text) are supported"
        if kind in ("qwen3_5", "qwen3_5_moe") and "text_config" in config:
            hint = f"of Qwen3.5, checkpoints of the text model alone ({kind}_text) are supported"
        if "Eagle3" in " ".join(map(str, named)):
            hint = "this is a head that guesses a model's next tokens: cairn serve MODEL --speculate HEAD"
        raise UnsupportedModel(
            f"unknown architecture: model_type {kind!r}, architectures {named!r}", hint=hint
        )
    fields = Fields(config)
    spec = reader(fields)
    fields.finish()
    return spec


# -- readers -----------------------------------------------------------------------------------


def _llama(fields: Fields) -> ModelSpec:
    return llama_like(fields, "llama", mlp_bias=fields.take("mlp_bias", bool, False))


def _mistral(fields: Fields) -> ModelSpec:
    return llama_like(fields, "mistral", windows=everywhere(fields, window_of(fields)))


def _mixtral(fields: Fields) -> ModelSpec:
    experts = Experts(
        count=fields.take("num_local_experts", int, 8),
        per_token=fields.take("num_experts_per_tok", int, 2),
        intermediate=fields.take("intermediate_size", int),
        choice_bias=_choice_bias(fields),
    )
    context = fields.take("max_position_embeddings", int)
    return llama_like(
        fields,
        "mixtral",
        experts=experts,
        windows=everywhere(fields, fields.take("sliding_window", int, 0)),
        norm_eps=fields.take("rms_norm_eps", float, 1e-5),
        **rope_of(fields, context, 1e6),
    )


def _choice_bias(fields: Fields) -> bool:
    """Return whether a bias corrects the routing scores (DeepSeek's balancing without an auxiliary loss)."""
    return fields.take("topk_method", str, "greedy") == "noaux_tc"


def _qwen2(fields: Fields) -> ModelSpec:
    return llama_like(fields, "qwen2", qkv_bias=True, windows=qwen_windows(fields))


def _mimo(fields: Fields) -> ModelSpec:
    """Qwen2 with a layer behind the last that predicts further tokens (`models.mtp`)."""
    fields.seen |= {"num_nextn_predict_layers", "use_mrope"}
    return _qwen2(fields)


def _qwen3(fields: Fields) -> ModelSpec:
    head_dim = fields.take("head_dim", int, 128)
    windows = qwen_windows(fields)
    return llama_like(fields, "qwen3", head_dim=head_dim, qk_norm=True, windows=windows)


def _qwen3_moe(fields: Fields) -> ModelSpec:
    layers = range(fields.take("num_hidden_layers", int))
    dense = set(fields.take_list("mlp_only_layers", int, []))
    step = fields.take_positive("decoder_sparse_step", int, 1)
    others = fields.take("num_local_experts", int, 128)  # another name of the same count
    experts = Experts(
        count=fields.take_positive("num_experts", int, others),
        per_token=fields.take("num_experts_per_tok", int, 8),
        intermediate=fields.take("moe_intermediate_size", int),
        renormalize=fields.take("norm_topk_prob", bool, False),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
        choice_bias=_choice_bias(fields),
    )
    fields.take("max_window_layers", int, 0)  # the reference reads it nowhere in this family
    windows = everywhere(fields, window_if_used(fields))
    return llama_like(fields, "qwen3_moe", qk_norm=True, experts=experts, windows=windows)


def _gpt2(fields: Fields) -> ModelSpec:
    hidden, heads = fields.take("n_embd", int), fields.take("n_head", int)
    return ModelSpec(
        family="gpt2",
        vocab=fields.take("vocab_size", int),
        hidden=hidden,
        layers=fields.take("n_layer", int),
        heads=heads,
        kv_heads=heads,
        head_dim=divide(hidden, heads),
        intermediate=fields.take("n_inner", int, 4 * hidden),
        context=fields.take("n_positions", int, 1024),
        tied=fields.take("tie_word_embeddings", bool, True),
        norm="layer",
        norm_eps=fields.take("layer_norm_epsilon", float, 1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=activation_of(fields, "activation_function", "gelu_new"),
        gated=False,
        positions="learned",
        bos_id=fields.take("bos_token_id", int, None),
        eos_ids=eos_ids_of(fields),
    )


def _gemma(fields: Fields, family: str, windows: tuple[int, ...], **rest: Any) -> ModelSpec:
    fields.take("hidden_act", str, "")  # superseded by hidden_activation in the reference
    if "query_scale" not in rest:
        rest["query_scale"] = fields.take_positive("query_pre_attn_scalar", float, 256.0) ** -0.5
    if "activation" not in rest:
        rest["activation"] = activation_of(fields, "hidden_activation", "gelu_pytorch_tanh")
    return llama_like(
        fields,
        family,
        tied=fields.take("tie_word_embeddings", bool, True),
        head_dim=fields.take("head_dim", int, 256),
        norm_plus_one=True,
        windows=windows,
        embedding_scale=fields.take_positive("hidden_size", int, 0) ** 0.5,
        **{"post_norms": True, **rest},
    )


def _gemma1(fields: Fields) -> ModelSpec:
    """Norms of inputs alone, and queries scaled by the head size; its activation has the older name."""
    fields.take("hidden_activation", str, "")
    activation = activation_of(fields, "hidden_act", "gelu_pytorch_tanh")
    activation = "gelu_tanh" if activation == "gelu" else activation  # what its checkpoints mean
    return _gemma(fields, "gemma", (), post_norms=False, query_scale=0.0, activation=activation)


def _gemma2(fields: Fields) -> ModelSpec:
    return _gemma(
        fields,
        "gemma2",
        layer_windows(fields, fields.take("sliding_window", int, 4096), every=2),
        attention_softcap=softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> ModelSpec:
    every = fields.take_positive("_sliding_window_pattern", int, 6)
    every = fields.take_positive("sliding_window_pattern", int, every)
    windows = layer_windows(fields, fields.take("sliding_window", int, 4096), every)
    context = fields.take("max_position_embeddings", int)
    both = fields.take("rope_parameters", dict, {})
    local_theta = fields.take("rope_local_base_freq", float, 10_000.0)
    if "full_attention" in both:
        kinds = Fields(both, "rope_parameters")
        rope, local = (
            rope_from(Fields(kinds.take(kind, dict, {}), "rope_parameters"), context, theta)
            for kind, theta in (("full_attention", 1e6), ("sliding_attention", local_theta))
        )
        kinds.finish()
    else:
        rope = rope_of(fields, context, 1e6)["rope"]
        local = Rope(theta=local_theta)
    return _gemma(
        fields,
        "gemma3",
        windows,
        qk_norm=True,
        rope=rope,
        rope_local=local,
        attention_softcap=softcap(fields, "attn_logit_softcapping", 0.0),
        logit_softcap=softcap(fields, "final_logit_softcapping", 0.0),
    )


FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    **DESCRIBED,
    **EXPERT_FAMILIES,
    **SPARSE,
    **RECURRENT,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "mimo": _mimo,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
