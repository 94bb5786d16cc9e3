"""Under which names does llama.cpp store the tensors of each family, and what does it change about their values?

Tables only: `tensor_names` reads them backwards, from a file to the names of the Hugging Face checkpoint.
"""

from typing import Literal

import msgspec

from cairn.models.gguf.keys import LONG_FACTORS, ROPE_FREQUENCIES, SHORT_FACTORS
from cairn.models.gguf.value_transforms import Kind

Tiled = Literal["rows", "behind_keys", "columns"]


class Naming(msgspec.Struct, frozen=True):
    """Tensor names of a family: of the model, of a layer (after `layer`), and of an expert."""

    model: dict[str, str]
    layer: str
    block: dict[str, str]
    biased: tuple[str, ...] = ()  # may have a bias as well as a weight
    bare: dict[str, str] = {}  # by stem and kind: tensors whose names on the Hub have no suffix
    experts: dict[str, str] = {}  # by the stem without _exps; {} is the expert's number
    expert_biases: bool = False
    changes: dict[str, Kind] = {}
    joined: tuple[tuple[str, str], str] = (("", ""), "")  # two stored tensors, and their one name
    rope_tensors: tuple[str, ...] = (ROPE_FREQUENCIES,)  # that the config says as rope_scaling
    tiled: dict[str, Tiled] = {}  # where value heads lie in another order

    @property
    def biased_names(self) -> tuple[str, ...]:
        return tuple(f"{stem}.bias" for stem in self.biased)

    @property
    def parts(self) -> tuple[str, str]:
        return self.joined[0]


_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_CHANGES: dict[str, Kind] = dict.fromkeys(
    ("output_norm", *_GEMMA_NORMS, *_QK_NORM), "plus_one"
)  # Gemma multiplies by 1 + w; llama.cpp stores that sum
_LLAMA_CHANGES: dict[str, Kind] = {"attn_q": "rotary_rows", "attn_k": "rotary_rows"}
_LAYER = "model.layers.{}."

_LLAMA = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _NORMS | _MLP,
    biased=(*_ATTENTION, *_MLP),
    changes=_LLAMA_CHANGES,
)
_MISTRAL = msgspec.structs.replace(_LLAMA, biased=())
_MIXTRAL = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _NORMS | {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
    },
    changes=_LLAMA_CHANGES,
)
_QWEN2 = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _NORMS | _MLP,
    biased=("attn_q", "attn_k", "attn_v"),
)
_QWEN3 = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _QK_NORM | _NORMS | _MLP,
    biased=tuple(_ATTENTION),
)
_QWEN3_MOE = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _QK_NORM | _NORMS | {"ffn_gate_inp": "mlp.gate"},
    biased=tuple(_ATTENTION),
    experts={
        "ffn_gate": "mlp.experts.{}.gate_proj",
        "ffn_down": "mlp.experts.{}.down_proj",
        "ffn_up": "mlp.experts.{}.up_proj",
    },
)
_DOTS1 = msgspec.structs.replace(
    _QWEN3_MOE,
    block=_QWEN3_MOE.block
    | _MLP
    | {stem + "_shexp": name.replace("mlp", "mlp.shared_experts") for stem, name in _MLP.items()},
    bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
)
_GLM4_MOE = msgspec.structs.replace(
    _DOTS1,
    block=_DOTS1.block | {"post_attention_norm": "post_attention_layernorm"},
    biased=("attn_q", "attn_k", "attn_v"),
)
_ERNIE4_5_MOE = msgspec.structs.replace(
    _DOTS1,
    bare={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    changes={"exp_probs_b": "one_row"},
)
_MINIMAX_M2 = msgspec.structs.replace(
    _MIXTRAL,
    block=_MIXTRAL.block | _QK_NORM,
    bare={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    changes={},
)
_DEEPSEEK = msgspec.structs.replace(
    _DOTS1,
    block={stem: name for stem, name in _DOTS1.block.items() if stem not in _QK_NORM}
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",  # whole, as written until April 2025
    },
    joined=(("attn_k_b.weight", "attn_v_b.weight"), "self_attn.kv_b_proj"),
)
_GPT_OSS = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    biased=(*_ATTENTION, "ffn_gate_inp"),
    bare={"attn_sinks.weight": "self_attn.sinks"},
    experts=_QWEN3_MOE.experts,  # as `stacked_experts` names them, one by one
    expert_biases=True,
)
_HUNYUAN = msgspec.structs.replace(
    _QWEN3,
    block=_QWEN3.block
    | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
)
_PHI3 = Naming(
    rope_tensors=(LONG_FACTORS, SHORT_FACTORS),
    model=_MODEL,
    layer=_LAYER,
    block=_NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
_GLM4 = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION
    | _NORMS
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    biased=("attn_q", "attn_k", "attn_v"),
)
_GEMMA = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _NORMS | _MLP,
    changes=dict.fromkeys(("output_norm", *_NORMS), "plus_one"),
)
_GEMMA2 = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _GEMMA_NORMS | _MLP,
    changes=_GEMMA_CHANGES,
)
_GEMMA3 = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION | _QK_NORM | _GEMMA_NORMS | _MLP,
    changes=_GEMMA_CHANGES,
)
_GPT2_MATRICES = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2 = Naming(
    model={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer="transformer.h.{}.",
    block=_GPT2_MATRICES | {"attn_norm": "ln_1", "ffn_norm": "ln_2"},
    biased=(*_GPT2_MATRICES, "attn_norm", "ffn_norm", "output_norm"),
    changes=dict.fromkeys(_GPT2_MATRICES, "transposed"),  # Conv1D is [in, out]
)
_OLMO2 = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION
    | _QK_NORM
    | _MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
_SEED_OSS = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION
    | _MLP
    | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    biased=(*_ATTENTION, *_MLP),
)
_LFM2 = Naming(
    model={
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",  # behind the last layer, whatever its name says
        "output_norm": "model.embedding_norm",
        "output": "lm_head",
    },
    layer=_LAYER,
    block=_ATTENTION
    | {
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_down": "feed_forward.w2",
        "ffn_up": "feed_forward.w3",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    changes={"shortconv.conv": "one_channel"},
)
_LFM2_MOE = msgspec.structs.replace(
    _LFM2,
    block=_LFM2.block | {"ffn_gate_inp": "feed_forward.gate"},
    bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
    experts={
        "ffn_gate": "feed_forward.experts.{}.w1",
        "ffn_down": "feed_forward.experts.{}.w2",
        "ffn_up": "feed_forward.experts.{}.w3",
    },
)
_DELTA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **_QK_NORM,
}
_DELTA_PLUS_ONE: dict[str, Kind] = dict.fromkeys(("output_norm", *_DELTA_NORMS), "plus_one")
_DELTA_CHANGES: dict[str, Kind] = {
    **_DELTA_PLUS_ONE,
    "ffn_gate_inp_shexp": "one_row",
    "ssm_conv1d": "one_channel",
    "ssm_a": "negative_exp",
}
_QWEN3_NEXT = Naming(
    model=_MODEL,
    layer=_LAYER,
    block=_ATTENTION
    | _DELTA_NORMS
    | {stem + "_shexp": name.replace("mlp", "mlp.shared_expert") for stem, name in _MLP.items()}
    | {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_in": "linear_attn.in_proj_qkvz",  # whole, as written in the first weeks
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    bare={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    experts=_QWEN3_MOE.experts,
    changes=_DELTA_CHANGES,
    joined=(("attn_qkv.weight", "attn_gate.weight"), "linear_attn.in_proj_qkvz"),
)
_QWEN3_5 = msgspec.structs.replace(
    _QWEN3_NEXT,
    block={
        stem: name for stem, name in _QWEN3_NEXT.block.items() if stem not in ("ssm_ba", "ssm_in")
    }
    | _MLP
    | {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
    },
    joined=(("", ""), ""),
    tiled={
        **dict.fromkeys(("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), "rows"),
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), "behind_keys"),
        "ssm_out": "columns",
    },
)
NAMINGS = {  # by the model_type of config.json
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gpt2": _GPT2,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi3": _PHI3,
    "hunyuan_v1_dense": _HUNYUAN,
    "dots1": _DOTS1,
    "gpt_oss": _GPT_OSS,
    "lfm2": _LFM2,
    "glm4": _GLM4,
    "exaone4": _OLMO2,
    "seed_oss": _SEED_OSS,
    "ministral3": _MISTRAL,
    "glm4_moe": _GLM4_MOE,
    "ernie4_5_moe": _ERNIE4_5_MOE,
    "minimax_m2": _MINIMAX_M2,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "lfm2_moe": _LFM2_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
