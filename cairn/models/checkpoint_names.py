"""Under which names do checkpoints in Hugging Face's format store our tensors?

    source("qwen3", "layers.3.attention.qkv.q.weight") -> Source("model.layers.3.self_attn.q_proj.weight")

One table per naming style. GPT-2 stores its matrices transposed and q, k and v in one: a `Source` can be a part of
a tensor. Only names; no files and no torch.
"""

import re
from typing import NamedTuple

from cairn.core.errors import UnsupportedModel


class Source(NamedTuple):
    """A tensor in a checkpoint, or one of `parts` equal pieces along its output dimension."""

    tensor: str
    transposed: bool = False  # stored as [in, out]
    part: int = 0
    parts: int = 1


class Style(NamedTuple):
    outside: dict[str, str]
    layer: str  # prefix of layer N
    inside: dict[str, str]  # "*" stands for the number of an expert
    transposed: frozenset[str] = frozenset()
    thirds: tuple[str, ...] = ()  # stored together, in this order


LLAMA = Style(
    outside={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    layer="model.layers.",
    inside={
        "attention_norm": "input_layernorm",
        "attention.qkv.q": "self_attn.q_proj",
        "attention.qkv.k": "self_attn.k_proj",
        "attention.qkv.v": "self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.inner.gate": "mlp.gate_proj",
        "feed_forward.inner.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
        "feed_forward.router": "mlp.gate",
        "feed_forward.*.gate": "mlp.experts.*.gate_proj",
        "feed_forward.*.up": "mlp.experts.*.up_proj",
        "feed_forward.*.down": "mlp.experts.*.down_proj",
    },
)
MIXTRAL = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.*.gate": "block_sparse_moe.experts.*.w1",
        "feed_forward.*.up": "block_sparse_moe.experts.*.w3",
        "feed_forward.*.down": "block_sparse_moe.experts.*.w2",
    }
)
GEMMA = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    }
)
GPT2 = Style(
    outside={
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer="transformer.h.",
    inside={
        "attention_norm": "ln_1",
        "attention.qkv.q": "attn.c_attn",
        "attention.qkv.k": "attn.c_attn",
        "attention.qkv.v": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.inner.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    },
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    thirds=("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"),
)
CHOICE_BIAS = "e_score_correction_bias"  # of a router: DeepSeek's name
STYLES = {"mixtral": MIXTRAL, "gemma2": GEMMA, "gemma3": GEMMA, "gpt2": GPT2}

# What checkpoints carry beside the weights: tables and masks that the model computes for itself.
# Masks and tables of old checkpoints, and the head of a classifier, which scores pooled states on the host.
LEFTOVERS = re.compile(r"(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|^score\.weight)$")


def source(family: str, slot: str) -> Source:
    style = STYLES.get(family, LLAMA)
    path, _, kind = slot.rpartition(".")  # kind: weight or bias
    if path in style.outside:
        return Source(f"{style.outside[path]}.{kind}")
    number, inner = re.fullmatch(r"layers\.(\d+)\.(.+)", path).groups()  # type: ignore[union-attr]
    expert = re.search(r"\.(\d+)\.", inner)
    pattern = inner.replace(expert.group(), ".*.") if expert else inner
    if pattern not in style.inside:
        raise UnsupportedModel(
            f"the format of {family} checkpoints has no place for {slot}",
            hint="choose a family whose layers have this part",
        )
    theirs = style.inside[pattern]
    if inner == "feed_forward.router" and kind == "bias":
        return Source(f"{style.layer}{number}.{theirs}.{CHOICE_BIAS}")
    name = theirs.replace("*", expert.group(1)) if expert else theirs
    full = f"{style.layer}{number}.{name}.{kind}"
    transposed = kind == "weight" and theirs in style.transposed
    if inner in style.thirds:
        return Source(full, transposed, style.thirds.index(inner), len(style.thirds))
    return Source(full, transposed)
