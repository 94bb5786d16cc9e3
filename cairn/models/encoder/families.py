"""The encoders of Hugging Face's format: from config.json to an `EncoderSpec`.

A field that is not read is an error, as for decoders: a config that is half understood gives wrong vectors silently.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cairn.core.errors import UnsupportedModel
from cairn.models.config_fields import Fields
from cairn.models.encoder.spec import Classifier, EncoderSpec
from cairn.models.spec import ModelSpec, Rope

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
# Of training, of heads that are not loaded, or of tokenizers.
UNREAD = (
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "cls_token_id",
    "decoder_bias",
    "deterministic_flash_attn",
    "directionality",
    "embedding_dropout",
    "hidden_dropout_prob",
    "initializer_cutoff_factor",
    "mlp_dropout",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sep_token_id",
    "sentence_transformers",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",
)
CLASSIFIES = "ForSequenceClassification"


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether this config describes a text encoder, which embeds and scores but does not generate."""
    if config.get("model_type") in FAMILIES:
        return not config.get("is_decoder")
    return is_bidirectional_decoder(config)


def is_bidirectional_decoder(config: Mapping[str, Any]) -> bool:
    """A decoder's layers under attention to both sides, as EmbeddingGemma is made."""
    return config.get("model_type") == "gemma3_text" and bool(
        config.get("use_bidirectional_attention")
    )


def encoder_spec(config: Mapping[str, Any]) -> EncoderSpec:
    reader = FAMILIES[str(config.get("model_type"))]
    fields = Fields(config)
    spec = reader(fields)
    for name in UNREAD:
        fields.seen.add(name)
    fields.finish()
    return spec


def _bert(fields: Fields) -> EncoderSpec:
    shape = _bert_shape(fields, "bert", 0)
    types = fields.take("type_vocab_size", int, 2)
    return EncoderSpec(shape, token_types=types, classifier=classifier_of(fields.config))


def _roberta(fields: Fields) -> EncoderSpec:
    """Positions begin behind the padding id, so the table has rows that no token uses."""
    offset = fields.take("pad_token_id", int, 1) + 1
    shape = _bert_shape(fields, "roberta", offset)
    types = fields.take("type_vocab_size", int, 1)
    return EncoderSpec(
        shape,
        position_offset=offset,
        token_types=types,
        classifier=classifier_of(fields.config),
    )


def _bert_shape(fields: Fields, family: str, offset: int) -> ModelSpec:
    kind = fields.take("position_embedding_type", str, "absolute")
    if kind != "absolute":
        raise UnsupportedModel(
            f"config.json: position_embedding_type is {kind!r}",
            hint="encoders with absolute positions are supported",
        )
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    return ModelSpec(
        family=family,
        vocab=fields.take("vocab_size", int),
        hidden=hidden,
        layers=fields.take("num_hidden_layers", int),
        heads=heads,
        kv_heads=heads,
        head_dim=_divide(hidden, heads),
        intermediate=fields.take("intermediate_size", int),
        context=fields.take("max_position_embeddings", int) - offset,
        tied=True,
        norm="layer",
        norm_eps=fields.take("layer_norm_eps", float, 1e-12),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        activation=_activation(fields, "hidden_act"),
        positions="learned",
    )


def _modernbert(fields: Fields) -> EncoderSpec:
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    layers = fields.take("num_hidden_layers", int)
    bias = fields.take("attention_bias", bool, False)
    ropes = _ropes(fields)
    shape = ModelSpec(
        family="modernbert",
        vocab=fields.take("vocab_size", int),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=_divide(hidden, heads),
        intermediate=fields.take("intermediate_size", int),
        context=fields.take("max_position_embeddings", int, 8192),
        tied=True,
        norm="layer",
        norm_eps=fields.take("norm_eps", float, 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.take("mlp_bias", bool, False),
        activation=_activation(fields, "hidden_activation"),
        rope=ropes["full_attention"],
        rope_local=ropes["sliding_attention"],
        windows=_windows(fields, layers),
    )
    fields.take("layer_norm_eps", float, None)  # configs repeat norm_eps under this name
    fields.take("position_embedding_type", str, None)
    activation = fields.take("classifier_activation", str, "gelu")
    fields.take("classifier_bias", bool, False)
    pooling = fields.take("classifier_pooling", str, "cls")
    classifier = classifier_of(fields.config, pooling)
    if classifier is not None and activation != "gelu":
        raise UnsupportedModel(
            f"config.json: classifier_activation is {activation!r}", hint="gelu is supported"
        )
    return EncoderSpec(
        shape,
        norms="pre",
        norm_bias=fields.take("norm_bias", bool, False),
        first_norm=False,
        classifier=classifier,
    )


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """`local_attention` spans both sides; a window counts one side and the token itself."""
    every = fields.take("global_attn_every_n_layers", int, 3)
    default = ["sliding_attention" if at % every else "full_attention" for at in range(layers)]
    kinds = fields.take_list("layer_types", str, default)
    window = fields.take("local_attention", int, 128) // 2 + 1
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _ropes(fields: Fields) -> dict[str, Rope]:
    """RoPE of full and sliding attention, from the old or the new field names."""
    old = {
        "full_attention": fields.take("global_rope_theta", float, 160_000.0),
        "sliding_attention": fields.take("local_rope_theta", float, 10_000.0),
    }
    settings = fields.take("rope_parameters", dict, {})
    by_kind = {}
    for kind, theta in old.items():
        own = Fields(settings.get(kind) or {}, f"rope_parameters.{kind}")
        if (scaling := own.take("rope_type", str, "default")) != "default":
            raise UnsupportedModel(
                f"config.json: rotary positions of type {scaling!r} in an encoder",
                hint="the default type is supported",
            )
        by_kind[kind] = Rope(theta=own.take("rope_theta", float, theta))
        own.finish()
    return by_kind


def classifier_of(config: Mapping[str, Any], pooling: str = "cls") -> Classifier | None:
    """The head for whole texts, where the architecture names one."""
    named = config.get("architectures") or [""]
    if not str(named[0]).endswith(CLASSIFIES):
        return None
    labels = config.get("id2label") or {}
    count = len(labels) or int(config.get("num_labels") or 2)
    names = tuple(str(labels.get(str(at), f"LABEL_{at}")) for at in range(count))
    default = "regression" if count == 1 else "single_label_classification"
    return Classifier(names, pooling, config.get("problem_type") or default)  # type: ignore[arg-type]


def _activation(fields: Fields, name: str) -> Any:
    activation = fields.take(name, str, "gelu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: {name} is {activation!r}", hint=f"supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]


def _divide(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise UnsupportedModel(f"config.json: {heads} heads do not divide hidden_size {hidden}")
    return hidden // heads


FAMILIES: dict[str, Callable[[Fields], EncoderSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "modernbert": _modernbert,
}
