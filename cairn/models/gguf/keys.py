"""Typed access to GGUF metadata that tracks unread keys.

Reading a key is understanding it: a key of the architecture that was not read is an error, because
it could change the computation. Keys of other namespaces (general, tokenizer, quantize, a
publisher's own) describe the file, not the model. This module does not know what a key is good for.
"""

import numpy as np

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.gguf.header import GGUFHeader

ROPE_FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)  # tensors that are no weights

_NEUTRAL: dict[str, tuple[object, ...]] = {  # keys that change nothing while they have these values
    "attention.causal": (True,),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),  # all experts are one group, of which all may be chosen
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "leading_dense_block_count": (0,),
    "pooling_type": (0, -1),  # none, unspecified
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),  # the rotary order that `tensor_names` undoes
    "use_parallel_residual": (False,),
}


class GGUFKeys:
    """The metadata of one architecture, and which of it has been understood."""

    def __init__(
        self, header: GGUFHeader, architecture: str, rope_factors: dict[str, list[float]]
    ) -> None:
        self.path = header.path
        self.tensors = header.tensors
        self.rope_factors = rope_factors
        self.prefix = architecture + "."
        self._values = {
            key.removeprefix(self.prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self.prefix)
        }
        self._unread = dict(self._values)

    def raw(self, key: str) -> object:
        """The value of a key, or None if it is absent."""
        self._unread.pop(key, None)
        return self._values.get(key)

    def value(self, key: str) -> object:
        """The value of a key; a list with equal values for all layers becomes that value."""
        value = self.raw(key)
        if not isinstance(value, list):
            return value
        if not value or any(item != value[0] for item in value):
            raise UnsupportedModel(
                f"{self.path} has {self.prefix}{key} = {shortened(value)}, a value per layer",
                hint="only models whose layers are alike can be read",
            )
        return value[0]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 1e-38 < value < 1e38
        ):
            raise self.bad(key, value, "a finite number above 0")
        return shortest(value)

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.value(key) else None  # 0 is a converter's "none"

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.value(key) else None

    def bad(self, key: str, value: object, wanted: str) -> WeightsError:
        return WeightsError(
            f"{self.path} has {self.prefix}{key} = {shortened(value)} in place of {wanted}",
            hint="the file is damaged or was converted wrongly: fetch it again",
        )

    def refuse_unread(self) -> None:
        for key, value in self._unread.items():
            if value not in _NEUTRAL.get(key, ()):
                raise UnsupportedModel(
                    f"{self.path} has {self.prefix}{key} = {shortened(value)}, an unknown key",
                    hint="without it the model could compute something else",
                )

    # -- sizes that metadata and tensors both state ------------------------------------------

    def hidden(self) -> int:
        width, hidden = self._embedding_shape()[1], self.integer("embedding_length")
        if hidden != width:
            raise self.bad("embedding_length", hidden, f"{width}, the width of token_embd.weight")
        return hidden

    def vocabulary(self) -> int:
        """Rows of the embedding; metadata may leave out those that only pad it."""
        self.value("vocab_size")
        return self._embedding_shape()[0]

    def layers(self) -> int:
        """Number of decoder layers without MTP layers, which follow them and may be missing from the file."""
        layers = self.integer("block_count")
        further = self.optional_integer("nextn_predict_layers") or 0
        if further >= layers:
            raise self.bad("nextn_predict_layers", further, f"fewer than {layers} layers")
        seen = len({name.split(".")[1] for name in self.tensors if name.startswith("blk.")})
        if seen not in (layers, layers - further):
            raise self.bad("block_count", layers, f"{seen}, the number of layers with tensors")
        return layers - further

    def dense_layers(self) -> int:
        """Number of leading layers without experts."""
        first, layers = self.optional_integer("leading_dense_block_count") or 0, self.layers()
        if first > layers:
            raise self.bad(
                "leading_dense_block_count", first, f"at most {layers}, as many as layers"
            )
        return first

    def biased(self, *stems: str) -> bool:
        return any(name.endswith(tuple(f".{stem}.bias" for stem in stems)) for name in self.tensors)

    def _embedding_shape(self) -> tuple[int, int]:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise WeightsError(
                f"{self.path} has no matrix token_embd.weight among {len(self.tensors)} tensors",
                hint="a file of the vocabulary alone cannot run: give that of the model",
            )
        return embedding.shape[0], embedding.shape[1]


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def shortest(value: float) -> float:
    """1e-05, not the 9.999999747378752e-06 of float32."""
    return float(str(np.float32(value)))
