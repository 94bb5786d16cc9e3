"""Sizes of a T5: an encoder of one text and a decoder of another that looks at it. No torch."""

from collections.abc import Mapping
from typing import Any

import msgspec

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.family_fields import ACTIVATION_NAMES
from cairn.models.spec import Activation

UNUSED = {"dropout_rate", "initializer_factor", "classifier_dropout", "n_positions", "output_past"}
UNUSED |= {"decoder_start_token_id", "feed_forward_proj", "is_gated_act", "dense_act_fn"}


class T5Spec(msgspec.Struct, frozen=True):
    vocab: int
    hidden: int
    heads: int
    head_dim: int
    intermediate: int
    encoder_layers: int
    decoder_layers: int
    buckets: int  # of distances, each with a bias for every head
    farthest: int  # distance; what lies beyond shares a bucket
    activation: Activation
    gated: bool
    norm_eps: float
    scaled: bool  # hidden states are divided by the root of the width in front of the head
    start_id: int  # what an answer begins with
    eos_ids: tuple[int, ...]


def is_text_to_text(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "t5"


def t5_spec(config: Mapping[str, Any]) -> T5Spec:
    """Read a config.json; unknown fields raise."""
    fields = Fields(config)
    layers = fields.take("num_layers", int, 6)
    named = fields.take("feed_forward_proj", str, "relu")
    name = named.removeprefix("gated-")
    name = "gelu_new" if named == "gated-gelu" else name  # what the first gated checkpoints mean
    if name not in ACTIVATION_NAMES:
        raise UnsupportedModel(
            f"config.json: feed_forward_proj is {named!r}",
            hint=f"supported activations: {', '.join(ACTIVATION_NAMES)}, and gated- in front",
        )
    scaled = fields.take("tie_word_embeddings", bool, True)
    eos = config.get("eos_token_id", 1)
    fields.seen |= UNUSED | {"eos_token_id", "pad_token_id"}
    spec = T5Spec(
        vocab=fields.take("vocab_size", int, 32128),
        hidden=fields.take("d_model", int, 512),
        heads=fields.take("num_heads", int, 8),
        head_dim=fields.take("d_kv", int, 64),
        intermediate=fields.take("d_ff", int, 2048),
        encoder_layers=layers,
        decoder_layers=fields.take("num_decoder_layers", int, layers),
        buckets=fields.take_positive("relative_attention_num_buckets", int, 32),
        farthest=fields.take_positive("relative_attention_max_distance", int, 128),
        activation=ACTIVATION_NAMES[name],
        gated=named.startswith("gated-"),
        norm_eps=fields.take("layer_norm_epsilon", float, 1e-6),
        scaled=fields.take("scale_decoder_outputs", bool, scaled),
        start_id=_start_id(config),
        eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
    )
    fields.finish()
    return spec


def _start_id(config: Mapping[str, Any]) -> int:
    """0 is a token, too, and the usual one."""
    named = (config.get("decoder_start_token_id"), config.get("pad_token_id"))
    return next((id for id in named if id is not None), 0)
