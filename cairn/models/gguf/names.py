"""Which tensor of a GGUF file is which of the Hugging Face checkpoint, and what was done to it?

llama.cpp renames tensors, stacks experts and changes some values on the way in. Here is the way
back: tables of names, and for each name a `Source`, one stored tensor or a slice of it and the
change to undo. A tensor that no table knows is an error, because a model without it would compute
something else. This module reads no values.
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.gguf.header import Header, StoredTensor

Change = Literal["none", "rotary_rows", "plus_one", "transposed", "one_channel"]
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: the config says it as rope_scaling


class Source(msgspec.Struct, frozen=True):
    """Where a tensor of the Hugging Face checkpoint comes from."""

    stored: StoredTensor
    start: int  # byte in the file
    size_bytes: int
    stored_shape: tuple[int, ...]  # of the slice, before the change is undone
    change: Change = "none"
    heads: int = 0  # whose rows were interleaved

    @property
    def shape(self) -> tuple[int, ...]:
        if self.change == "one_channel":
            return (self.stored_shape[0], 1, *self.stored_shape[1:])
        return self.stored_shape[::-1] if self.change == "transposed" else self.stored_shape


class Naming(msgspec.Struct, frozen=True):
    """One family's names: of the model, of a layer (behind `layer`), and of an expert."""

    model: dict[str, str]
    layer: str
    block: dict[str, str]
    biased: tuple[str, ...] = ()  # may have a bias as well as a weight
    bare: dict[str, str] = {}  # by stem and kind: tensors whose names on the Hub have no suffix
    experts: dict[str, str] = {}  # by the stem without _exps; {} is the expert's number
    expert_biases: bool = False
    changes: dict[str, Change] = {}


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
_GEMMA_CHANGES: dict[str, Change] = dict.fromkeys(
    ("output_norm", *_GEMMA_NORMS, *_QK_NORM), "plus_one"
)  # Gemma multiplies by 1 + w; llama.cpp stores that sum
_LLAMA_CHANGES: dict[str, Change] = {"attn_q": "rotary_rows", "attn_k": "rotary_rows"}
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
_NAMINGS = {  # by the model_type of config.json
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
}

_NUMBER = r"(0|[1-9][0-9]{0,4})"
_STORED_NAME = re.compile(
    rf"(?:blk\.{_NUMBER}\.)?([a-z_]+(?:\.[a-z_]+)?)(?:\.{_NUMBER})?\.(weight|bias)"
)


def hf_sources(header: Header, config: dict[str, object]) -> dict[str, Source]:
    """By the names that the checkpoint of `config` has on the Hub, in the order of the file."""
    naming = _NAMINGS[str(config["model_type"])]
    sources: dict[str, Source] = {}
    for stored in header.tensors.values():
        if stored.name == ROPE_FACTORS:
            continue
        for name, source in _translate(header, config, naming, stored):
            if name in sources:
                raise WeightsError(f"{header.path} has {name} twice, once as {stored.name!r}",
                                   hint="the file is damaged or was converted wrongly")  # fmt: skip
            sources[name] = source
    return sources


def _translate(
    header: Header, config: dict[str, object], naming: Naming, stored: StoredTensor
) -> Iterator[tuple[str, Source]]:
    match = _STORED_NAME.fullmatch(stored.name)
    layer, stem, expert, kind = match.groups() if match else (None, "", None, "")
    place = "" if layer is None else naming.layer.format(layer)
    names = naming.model if layer is None else naming.block
    alone = layer is None or (kind == "bias" and not naming.expert_biases)
    experts = {} if alone else naming.experts
    if layer is not None and int(layer) >= _count(config, "num_hidden_layers", "n_layer"):
        raise _unknown(header, stored)
    if expert is None and stem in names and (kind == "weight" or stem in naming.biased):
        yield f"{place}{names[stem]}.{kind}", _whole(header, config, naming, stored, stem)
    elif layer is not None and expert is None and f"{stem}.{kind}" in naming.bare:
        yield place + naming.bare[f"{stem}.{kind}"], _slice(stored, stored.shape, 0, 1)
    elif expert is not None and stem in experts:  # as written until early 2024
        _check_expert(header, config, stored, int(expert) + 1)
        yield f"{place}{experts[stem].format(expert)}.weight", _slice(stored, stored.shape, 0, 1)
    elif expert is None and stem.endswith("_exps") and stem.removesuffix("_exps") in experts:
        count = stored.shape[0] if len(stored.shape) == (3 if kind == "weight" else 2) else 0
        _check_expert(header, config, stored, count, exactly=True)
        name = f"{place}{experts[stem.removesuffix('_exps')]}.{kind}"
        for number in range(count):
            yield name.format(number), _slice(stored, stored.shape[1:], number, count)
    else:
        raise _unknown(header, stored)


def _whole(
    header: Header, config: dict[str, object], naming: Naming, stored: StoredTensor, stem: str
) -> Source:
    change = naming.changes.get(stem, "none")
    source = _slice(stored, stored.shape, 0, 1)
    if change != "rotary_rows":
        return msgspec.structs.replace(source, change=change)
    heads = _count(config, "num_attention_heads" if stem == "attn_q" else "num_key_value_heads")
    if stored.shape[0] % (2 * heads):
        raise WeightsError(
            f"{header.path} has {stored.name!r} of shape {stored.shape} for {heads} heads",
            hint="its rows are two halves of each head: the file is damaged, fetch it again",
        )
    return msgspec.structs.replace(source, change=change, heads=heads)


def _slice(stored: StoredTensor, shape: tuple[int, ...], number: int, count: int) -> Source:
    size_bytes = stored.size_bytes // count
    return Source(stored, stored.start + number * size_bytes, size_bytes, shape)


def _check_expert(
    header: Header,
    config: dict[str, object],
    stored: StoredTensor,
    count: int,
    exactly: bool = False,
) -> None:
    experts = _count(config, "num_local_experts", "num_experts", "n_routed_experts")
    if count > experts or (exactly and count != experts):
        raise WeightsError(
            f"{header.path} has {stored.name!r} of shape {stored.shape} for {experts} experts",
            hint="the file is damaged or was converted wrongly: fetch it again",
        )


def _unknown(header: Header, stored: StoredTensor) -> UnsupportedModel:
    architecture = header.metadata["general.architecture"]
    return UnsupportedModel(
        f"{header.path} has a tensor {stored.name!r} that no {architecture} model has here",
        hint="without it the model would compute something else",
    )


def _count(config: dict[str, object], *keys: str) -> int:
    return next(value for key in keys if isinstance(value := config.get(key), int))
