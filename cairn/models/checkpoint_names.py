"""Under which names do checkpoints in Hugging Face's format store our tensors?

    source("qwen3", "layers.3.attention.qkv.q.weight") -> Source("model.layers.3.self_attn.q_proj.weight")

One table per naming style. GPT-2 stores its matrices transposed and q, k and v in one, Phi and GLM join theirs as well:
a `TensorLocation` can be a part of a tensor. The rotation pairs column i of a head with i + C/2; for checkpoints that
pair neighbours, or rotate only some columns, the rows of q and k are permuted at load, which changes no score between
them. Only names and orders; no files and no torch.
"""

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from cairn.core.errors import UnsupportedModel
from cairn.models.spec import ModelSpec


class TensorLocation(NamedTuple):
    """A tensor in a checkpoint, or rows of it; `sources` fills in what depends on the model's sizes."""

    tensor: str
    transposed: bool = False  # stored as [in, out]
    part: int = 0
    parts: int = 1  # that are stored in this tensor
    start: int = 0  # the first row of this part
    rows: int = 0  # of the whole tensor
    groups: int = 1  # of equally many rows, each of which has its piece of every part; `start` counts within one
    leading: bool = False  # stored with a dimension of 1 in front
    order: tuple[int, ...] = ()  # which stored row of a head is our row i; (): the same
    more_rows: bool = False  # a table of positions may be longer than the context that is asked for

    @property
    def is_whole(self) -> bool:
        """Return whether the stored tensor is used without any change."""
        plain = not self.transposed and not self.leading
        return plain and self.parts == 1 and not self.order


class Style(NamedTuple):
    outside: dict[str, str]
    layer: str  # prefix of layer N
    inside: dict[str, str]  # "*" stands for the number of an expert; a name with its kind wins
    transposed: frozenset[str] = frozenset()
    joined: tuple[tuple[str, ...], ...] = ()  # stored in one tensor, in this order
    by_head: frozenset[str] = (
        frozenset()
    )  # of those tensors, which alternate between their parts head by head
    pairs: bool = False  # rotary positions pair neighbouring columns rather than halves
    leading: frozenset[str] = frozenset()  # stored with a dimension of 1 in front
    more_layers: bool = False  # layers behind the last predict further tokens, and are left out


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
        "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
        "feed_forward.*.gate": "mlp.experts.*.gate_proj",
        "feed_forward.*.up": "mlp.experts.*.up_proj",
        "feed_forward.*.down": "mlp.experts.*.down_proj",
        "feed_forward.shared.inner.gate": "mlp.shared_experts.gate_proj",
        "feed_forward.shared.inner.up": "mlp.shared_experts.up_proj",
        "feed_forward.shared.down": "mlp.shared_experts.down_proj",
    },
)
MIXTRAL = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.router.bias": "block_sparse_moe.gate.e_score_correction_bias",
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
DEEPSEEK = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "attention.query_down.q": "self_attn.q_a_proj",
        "attention.query_norm": "self_attn.q_a_layernorm",
        "attention.query.up": "self_attn.q_b_proj",
        "attention.query.q": "self_attn.q_proj",  # queries in one product, as in the Lite models
        "attention.down.kv": "self_attn.kv_a_proj_with_mqa",
        "attention.norm": "self_attn.kv_a_layernorm",
        "attention.expansion": "self_attn.kv_b_proj",
    },
    more_layers=True,
)
GPT_OSS = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "attention.sinks": "self_attn.sinks",
        "feed_forward.router": "mlp.router",
        "feed_forward.router.logit_bias": "mlp.router.bias",
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
    joined=(("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"),),
)
QKV = {f"attention.qkv.{part}": "self_attn.qkv_proj" for part in "qkv"}
GATE_UP = {f"feed_forward.inner.{part}": "mlp.gate_up_proj" for part in ("gate", "up")}
PHI3 = LLAMA._replace(inside=LLAMA.inside | QKV | GATE_UP, joined=(tuple(QKV), tuple(GATE_UP)))
GLM = LLAMA._replace(inside=LLAMA.inside | GATE_UP, joined=(tuple(GATE_UP),), pairs=True)
GLM4 = GLM._replace(
    inside=GLM.inside
    | {
        "attention_post_norm": "post_self_attn_layernorm",
        "feed_forward_post_norm": "post_mlp_layernorm",
    }
)
OLMO2 = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    }
)
HUNYUAN = LLAMA._replace(
    inside=LLAMA.inside
    | {
        "attention.q_norm": "self_attn.query_layernorm",
        "attention.k_norm": "self_attn.key_layernorm",
    }
)
GRANITE4 = LLAMA._replace(
    inside=LLAMA.inside
    | dict.fromkeys(GATE_UP, "shared_mlp.input_linear")
    | {"feed_forward.down": "shared_mlp.output_linear"},
    joined=(tuple(GATE_UP),),
)
MORE_LAYERS = LLAMA._replace(more_layers=True)
DELTA = {
    "attention.decay": "linear_attn.A_log",
    "attention.dt": "linear_attn.dt_bias",
    **{f"attention.conv.{part}": "linear_attn.conv1d" for part in "qkv"},
    "attention.norm": "linear_attn.norm",
    "attention.gate.gate": "self_attn.q_proj",
    "feed_forward.shared.inner.gate": "mlp.shared_expert.gate_proj",
    "feed_forward.shared.inner.up": "mlp.shared_expert.up_proj",
    "feed_forward.shared.down": "mlp.shared_expert.down_proj",
    "feed_forward.shared.output_gate.gate": "mlp.shared_expert_gate",
}
CONV = tuple(f"attention.conv.{part}" for part in "qkv")
WITH_GATE = ("attention.qkv.q", "attention.gate.gate")
QKVZ = {f"attention.inner.{part}": "linear_attn.in_proj_qkvz" for part in "qkvz"}
BA = {f"attention.rates.{part}": "linear_attn.in_proj_ba" for part in "ba"}
MIXED = {f"attention.inner.{part}": "linear_attn.in_proj_qkv" for part in "qkv"}
APART = {f"attention.rates.{part}": f"linear_attn.in_proj_{part}" for part in "ba"}
DELTA_STYLE = LLAMA._replace(
    inside=LLAMA.inside | DELTA | {"attention.projection": "linear_attn.out_proj"},
    by_head=frozenset({"self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"}),
)
QWEN3_NEXT = DELTA_STYLE._replace(
    inside=DELTA_STYLE.inside | QKVZ | BA, joined=(WITH_GATE, CONV, tuple(QKVZ), tuple(BA))
)
QWEN3_5 = DELTA_STYLE._replace(
    inside=DELTA_STYLE.inside | MIXED | APART | {"attention.inner.z": "linear_attn.in_proj_z"},
    joined=(WITH_GATE, CONV, tuple(MIXED)),
)
LFM2 = LLAMA._replace(
    outside=LLAMA.outside | {"norm": "model.embedding_norm"},
    inside=LLAMA.inside
    | {f"attention.inner.{part}": "conv.in_proj" for part in "bcx"}
    | {
        "attention_norm": "operator_norm",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.out": "self_attn.out_proj",
        "attention.conv": "conv.conv",
        "attention.projection": "conv.out_proj",
        "feed_forward_norm": "ffn_norm",
        "feed_forward.inner.gate": "feed_forward.w1",
        "feed_forward.inner.up": "feed_forward.w3",
        "feed_forward.down": "feed_forward.w2",
    },
    joined=(tuple(f"attention.inner.{part}" for part in "bcx"),),
)
LFM2_MOE = LFM2._replace(
    inside=LFM2.inside
    | {
        "feed_forward.router": "feed_forward.gate",
        "feed_forward.router.bias": "feed_forward.expert_bias",
        "feed_forward.*.gate": "feed_forward.experts.*.w1",
        "feed_forward.*.up": "feed_forward.experts.*.w3",
        "feed_forward.*.down": "feed_forward.experts.*.w2",
    }
)
MINIMAX = MIXTRAL._replace(
    inside=MIXTRAL.inside | {"feed_forward.router.bias": "block_sparse_moe.e_score_correction_bias"}
)
ERNIE = LLAMA._replace(pairs=True)
ERNIE_BIAS = "mlp.moe_statics.e_score_correction_bias"
ERNIE_MOE = ERNIE._replace(
    inside=ERNIE.inside | {"feed_forward.router.bias": ERNIE_BIAS}, leading=frozenset({ERNIE_BIAS})
)
STYLES = {
    "mixtral": MIXTRAL,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gpt2": GPT2,
    "phi3": PHI3,
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": MORE_LAYERS,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "exaone4": OLMO2,
    "hunyuan_v1_dense": HUNYUAN,
    "granitemoehybrid": GRANITE4,
    "minimax_m2": MINIMAX,
    "ernie4_5": ERNIE,
    "ernie4_5_moe": ERNIE_MOE,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
}

# What checkpoints carry beside the weights: tables and masks that the model computes for itself.
# Masks and tables of old checkpoints, the head of a classifier, which scores pooled states on the host, and layers
# that predict further tokens.
LEFTOVERS = re.compile(
    r"^(mtp|model\.mtp_layers)\.|(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|^score\.weight)$"
)


@functools.lru_cache(maxsize=1 << 14)
def source(family: str, slot: str) -> TensorLocation:
    style = STYLES.get(family, LLAMA)
    path, _, kind = slot.rpartition(".")  # kind: weight or bias
    if path in style.outside:
        more = path == "position_embedding"
        return TensorLocation(f"{style.outside[path]}.{kind}", more_rows=more)
    number, inner = re.fullmatch(r"layers\.(\d+)\.(.+)", path).groups()  # type: ignore[union-attr]
    expert = re.search(r"\.(\d+)\.", inner)
    pattern = inner.replace(expert.group(), ".*.") if expert else inner
    whole = style.inside.get(f"{pattern}.{kind}")
    if whole is not None:
        return TensorLocation(f"{style.layer}{number}.{whole}", leading=whole in style.leading)
    if pattern not in style.inside:
        raise UnsupportedModel(
            f"the format of {family} checkpoints has no place for {slot}",
            hint="choose a family whose layers have this part",
        )
    theirs = style.inside[pattern]
    name = theirs.replace("*", expert.group(1)) if expert else theirs
    full = f"{style.layer}{number}.{name}.{kind}"
    transposed = kind == "weight" and theirs in style.transposed
    for joined in style.joined:
        if inner in joined:
            return TensorLocation(full, transposed, joined.index(inner), len(joined))
    return TensorLocation(full, transposed)


def sources(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorLocation]:
    """Source tensor of each slot. `shapes` contains all slots; slots of one tensor are in storage order."""
    places = {slot: source(spec.family, slot) for slot in shapes}
    filled: dict[str, int] = {}
    order = rotary_order(spec)
    for slot, place in places.items():
        if place.parts > 1:
            groups = _groups(spec, place.tensor)
            start = filled.get(place.tensor, 0)
            filled[place.tensor] = start + shapes[slot][0]
            places[slot] = place = place._replace(start=start // groups, groups=groups)
        if order and ROTATED.search(slot):
            places[slot] = place._replace(order=order)
    return {
        slot: place._replace(rows=filled.get(place.tensor, 0)) for slot, place in places.items()
    }


def _groups(spec: ModelSpec, tensor: str) -> int:
    """Heads by which a tensor alternates between its parts; 1: one part lies behind the other."""
    style = STYLES.get(spec.family, LLAMA)
    if not any(f".{name}." in tensor for name in style.by_head):
        return 1
    return spec.heads if "self_attn" in tensor or spec.delta is None else spec.delta.key_heads


ROTATED = re.compile(r"attention\.(qkv\.[qk]|[qk]_norm)\.(weight|bias)$")


def rotary_order(spec: ModelSpec) -> tuple[int, ...]:
    """Permutation of the columns of a head between checkpoint and model; () is the identity.

    Ours are the first of every rotated pair, half of those that are not rotated, the second of every pair, the rest.
    """
    style, size = STYLES.get(spec.family, LLAMA), spec.head_dim
    rotated = spec.rope.rotated or size
    if spec.positions != "rope" or (rotated == size and not style.pairs):
        return ()
    if style.pairs:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    middle = rotated + (size - rotated) // 2
    return (*first, *range(rotated, middle), *second, *range(middle, size))


def is_left_out(spec: ModelSpec, tensor: str) -> bool:
    """Return whether a checkpoint tensor may be ignored: tables, masks, further layers."""
    style = STYLES.get(spec.family, LLAMA)
    layer = re.match(re.escape(style.layer) + r"(\d+)\.", tensor) if style.more_layers else None
    return bool(LEFTOVERS.search(tensor)) or (layer is not None and int(layer[1]) >= spec.layers)
