"""Has every field of a config been accounted for?

A config that remembers which of its fields were read. Each has to be: read, or listed here as one that does not
change the forward pass. What is left over is an error that names it. Knows no model family.
"""

import math
from collections.abc import Mapping
from typing import Any

from cairn.core.errors import UnsupportedModel

# Fields that say something about training, storage or generation, but not about the forward pass. How matrices are
# stored is read by `quantized.scheme`.
HARMLESS = {
    "auto_map", "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "attention_dropout", "attn_pdrop", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "compression_config", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
    "gradient_checkpointing", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "model_type", "n_ctx", "num_labels", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "prefix", "problem_type", "quantization_config", "resid_pdrop",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
    "vocab_pad",
}  # fmt: skip
# Fields that may be there as long as they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_decoder": (False, True),
    "is_llama_config": (True,),
    "lm_head_bias": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "pretraining_tp": (1,),
    "reorder_and_upcast_attn": (False,),
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "tie_encoder_decoder": (False,),
    "torchscript": (False,),
    "use_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
# Counts of layers: readers make lists with an entry for each, so a file must not choose their length.
LAYER_COUNTS = {
    "depth",
    "first_k_dense_replace",
    "n_layer",
    "num_decoder_layers",
    "num_dense_layers",
    "num_hidden_layers",
    "num_layers",
}
MOST_LAYERS = 10_000


class Fields:
    """A config that remembers which of its fields were read."""

    def __init__(self, config: Mapping[str, Any], what: str = "config.json") -> None:
        self.config, self.what, self.seen = config, what, set[str]()

    def take(self, name: str, kind: type | tuple[type, ...], *default: Any) -> Any:
        """The field's value; `default`, if given, where it is absent or null."""
        self.seen.add(name)
        value = self.config.get(name)
        if value is None and default:
            return default[0]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not _is(value, kind):
            raise self._unexpected(name, _name_of(kind))
        if name in LAYER_COUNTS and isinstance(value, int) and value > MOST_LAYERS:
            raise self._unexpected(name, f"at most {MOST_LAYERS:,}")
        return value

    def take_list(self, name: str, kind: type, default: list[Any]) -> list[Any]:
        """A field that is a list of one type."""
        value = self.take(name, list, default)
        if not all(_is(item, kind) for item in value):
            raise self._unexpected(name, f"a list of {_name_of(kind)}")
        return value

    def take_positive(self, name: str, kind: type, default: float) -> Any:
        value = self.take(name, kind, default)
        if value <= 0:
            raise self._unexpected(name, f"{_name_of(kind)} above 0")
        return value

    def neutral(self, **values: Any) -> None:
        """Fields that may be there as long as each says this; `finish` refuses them otherwise."""
        for name, value in values.items():
            if self.config.get(name, value) == value:
                self.seen.add(name)

    def _unexpected(self, name: str, expected: str) -> UnsupportedModel:
        state = f"is {self.config[name]!r}" if name in self.config else "is missing"
        return UnsupportedModel(
            f"{self.what}: field {name!r} {state}, expected {expected}",
            hint="compare it with the config of the original checkpoint",
        )

    def finish(self) -> None:
        """Refuse what was not read."""
        for name, value in self.config.items():
            if name in self.seen or name in HARMLESS or value in NEUTRAL.get(name, ()):
                continue
            raise UnsupportedModel(
                f"{self.what}: field {name!r} (value {value!r}) is not supported",
                hint="if it does not change the forward pass, remove it from the file",
            )


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Neither JSON's true, which Python counts as an int, nor NaN is a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))


def _name_of(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
