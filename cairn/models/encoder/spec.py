"""Specification of a text encoder.

An encoder reads a whole text at once: every token sees the tokens on both sides, and nothing is generated. Its sizes,
counts and rotary positions are those of a `ModelSpec`; here stands what a decoder does not have. No torch, no files.

    post   x = norm(x + attention(x));  x = norm(x + feed_forward(x))                      BERT, RoBERTa
    pre    x = x + attention(norm(x));  x = x + feed_forward(norm(x));  a norm at the end  ModernBERT
"""

from typing import Literal

import msgspec

from cairn.models.spec import ModelSpec

Problem = Literal["regression", "single_label_classification", "multi_label_classification"]


class Classifier(msgspec.Struct, frozen=True):
    """Scores of a whole text: a pooled state through a dense layer or two."""

    labels: tuple[str, ...]
    pooling: Literal["cls", "mean", "last"] = "cls"
    problem: Problem = "single_label_classification"


class EncoderSpec(msgspec.Struct, frozen=True):
    shape: ModelSpec
    norms: Literal["post", "pre"] = "post"
    norm_bias: bool = True
    first_norm: bool = True  # whether layer 0 norms what enters its attention
    position_offset: int = 0  # RoBERTa counts from the padding id + 1
    token_types: int = 0  # rows of the table that tells the second text of a pair from the first
    classifier: Classifier | None = None

    @property
    def position_rows(self) -> int:
        return self.shape.context + self.position_offset
