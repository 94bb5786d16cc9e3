"""Interpretation of pooled states: embeddings, label scores or relevance scores.

    pooled [B, D] --projection, first dimensions, length one--> embeddings
    pooled [B, D] --head--> logits --> probabilities of labels, relevance of a pair

Whatever model is served has embeddings. One with a head for whole texts classifies; a cross-encoder or a reranker that
answers yes or no scores pairs; for all others the score of a pair is the cosine of its two embeddings.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from cairn.core.errors import RequestError, TokenizerError
from cairn.models.encoder.families import classifier_of
from cairn.models.encoder.head import (
    Head,
    classifier_head,
    decoder_head,
    dense_module,
    probabilities,
    yes_no_head,
)
from cairn.models.encoder.open import OpenEncoder
from cairn.models.encoder.pooling_rules import Pooling, PoolingRules, read_pooling_rules
from cairn.models.encoder.spec import Classifier
from cairn.models.encoder.texts import TextIds, encode_pairs, encode_texts
from cairn.models.runnable import OpenModel
from cairn.models.safetensors_file import TensorSource
from cairn.models.tokenizer import Tokenizer

Vector = np.ndarray
# Qwen3-Reranker was trained on exactly these bytes.
RERANK_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANK_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_TASK = "Given a web search query, retrieve relevant passages that answer the query"


class Pair(NamedTuple):
    query: str
    document: str


class Inputs(NamedTuple):
    """Texts to pool, and the function that computes a score for each pair from the vectors."""

    texts: list[TextIds]
    pooling: Pooling
    scores: Callable[[Vector], list[float]]  # [texts, D] -> one for each pair


class TextVectors:
    """The rules of one model. Cheap to make; heads are read when they are first needed."""

    def __init__(self, opened: OpenModel) -> None:
        self.opened = opened
        self.folder = _folder_of(opened)
        self.rules = PoolingRules() if self.folder is None else read_pooling_rules(self.folder)
        self.classifier = self._classifier()

    @property
    def generates(self) -> bool:
        return not isinstance(self.opened, OpenEncoder)

    @property
    def width(self) -> int:
        """Width of an embedding."""
        return self.projection.width or self.opened.spec.hidden

    @property
    def tokenizer(self) -> Tokenizer:
        if self.opened.tokenizer is None:
            raise TokenizerError(f"{self.opened.name} has no tokenizer, so it reads no text")
        return self.opened.tokenizer

    # -- embeddings ------------------------------------------------------------------------------

    @cached_property
    def projection(self) -> Head:
        folder = self.folder
        if folder is None:
            return Head([])
        return Head([dense_module(folder / path) for path in self.rules.dense])

    def embeddings(
        self, pooled_BD: Vector, dimensions: int | None = None, normalize: bool | None = None
    ) -> Vector:
        """Projected, cut to the first `dimensions`, and at length one unless the model's files say otherwise."""
        if self.projection.layers:
            pooled_BD = self.projection(torch.from_numpy(np.array(pooled_BD))).numpy()
        cut_BD = pooled_BD[:, :dimensions]
        if not (self.rules.normalize if normalize is None else normalize):
            return cut_BD.astype("<f4")
        wide_BD = cut_BD.astype(np.float64)  # squares of float32 may leave its range
        lengths_B1 = np.sqrt((wide_BD * wide_BD).sum(-1, keepdims=True))
        return (wide_BD / np.where(lengths_B1 > 0, lengths_B1, 1.0)).astype("<f4")

    # -- labels ----------------------------------------------------------------------------------

    @cached_property
    def head(self) -> Head:
        """Head of a classifier or reranker."""
        opened = self.opened
        if isinstance(opened, OpenEncoder) and opened.encoder is not None and self.classifier:
            return classifier_head(opened.encoder, opened.tensors)
        tensors = self._tensors()
        if self.classifier is not None:
            return decoder_head(tensors)
        yes, no = self.yes_no or (0, 0)
        return yes_no_head(tensors, yes, no)

    def probabilities(self, pooled_BD: Vector) -> Vector:
        if self.classifier is None:
            raise RequestError(
                f"{self.opened.name} has no head that classifies texts",
                hint="serve a model whose architecture ends with ForSequenceClassification",
            )
        return probabilities(self.classifier, self._logits(pooled_BD)).numpy()

    def _logits(self, pooled_BD: Vector) -> torch.Tensor:
        return self.head(torch.from_numpy(np.array(pooled_BD)))

    # -- pairs -----------------------------------------------------------------------------------

    @cached_property
    def yes_no(self) -> tuple[int, int | None] | None:
        """The two tokens that a reranker answers with; None: it is none of that kind."""
        if self.rules.yes_no is not None:
            return self.rules.yes_no
        if not self.generates or self.classifier is not None or not self._is_called_reranker():
            return None
        backend = self.tokenizer.backend
        yes, no = backend.token_to_id("yes"), backend.token_to_id("no")
        return None if yes is None or no is None else (yes, no)

    def score_inputs(
        self, pairs: Sequence[Pair], most: int | None = None, task: str | None = None
    ) -> Inputs:
        """Texts to pool so that each pair gets a score. `task`: of rerankers that take an instruction."""
        if self.generates and (self.yes_no is not None or self._scores_prompts()):
            pooling: Pooling = "last"
            texts = [self._prompted(pair, task or RERANK_TASK, most) for pair in pairs]
            return Inputs(texts, pooling, self._relevance)
        if self.classifier is not None and not self.generates:
            if len(self.classifier.labels) != 1:
                raise RequestError(
                    f"{self.opened.name} gives {len(self.classifier.labels)} scores to a text, "
                    "and a pair needs one",
                    hint="POST /classify has them all",
                )
            texts = encode_pairs(self.tokenizer, [tuple(pair) for pair in pairs], most)
            return Inputs(texts, self.classifier.pooling, self._relevance)
        return self._cosine_inputs(pairs, most)

    def _relevance(self, pooled_BD: Vector) -> list[float]:
        return torch.sigmoid(self._logits(pooled_BD)[:, -1]).tolist()

    def _cosine_inputs(self, pairs: Sequence[Pair], most: int | None) -> Inputs:
        """Each different text once."""
        query, document = (self._side(name) for name in ("query", "document"))
        written = [(query + one.query, document + one.document) for one in pairs]
        rows = {
            text: at for at, text in enumerate(dict.fromkeys(t for two in written for t in two))
        }
        texts = encode_texts(self.tokenizer, list(rows), most)

        def scores(pooled_BD: Vector) -> list[float]:
            unit_BD = self.embeddings(pooled_BD, normalize=True)
            return [float(unit_BD[rows[one]] @ unit_BD[rows[two]]) for one, two in written]

        return Inputs(texts, self.rules.pooling, scores)

    def _side(self, name: str) -> str:
        """Prefix of one side of a pair."""
        return self.rules.prompts.get(name, "")

    def _prompted(self, pair: Pair, task: str, most: int | None) -> TextIds:
        encode = self.tokenizer.encode
        before, after = encode(RERANK_BEFORE, False), encode(RERANK_AFTER, False)
        text = f"<Instruct>: {task}\n<Query>: {pair.query}\n<Document>: {pair.document}"
        body = encode(text, False)
        if most is not None:
            body = body[: max(most - len(before) - len(after), 0)]
        return TextIds(before + body + after)

    def _scores_prompts(self) -> bool:
        """A reranker whose two rows of the head were saved as a classifier with one label."""
        one = self.classifier is not None and len(self.classifier.labels) == 1
        return one and self._is_called_reranker()

    def _is_called_reranker(self) -> bool:
        names = [self.opened.name, "" if self.folder is None else str(self.folder)]
        return any("reranker" in name.lower() for name in names)

    # -- files -----------------------------------------------------------------------------------

    def _tensors(self) -> TensorSource:
        checkpoint = self.opened.checkpoint
        if checkpoint is None:
            raise RequestError(f"{self.opened.name} has random weights and no head")
        return checkpoint.tensors

    def _classifier(self) -> Classifier | None:
        opened = self.opened
        if isinstance(opened, OpenEncoder):
            return None if opened.encoder is None else opened.encoder.classifier
        if opened.checkpoint is None:
            return None
        head = classifier_of(opened.checkpoint.config)
        return None if head is None else msgspec.structs.replace(head, pooling="last")


def _folder_of(opened: OpenModel) -> Path | None:
    if isinstance(opened, OpenEncoder):
        return opened.folder
    checkpoint = opened.checkpoint
    if checkpoint is None or not checkpoint.path.is_dir():
        return None
    return checkpoint.path


def matrix_of(pooled: Sequence[bytes]) -> Vector:
    """Vectors of float32, as the engine hands them over, in one matrix."""
    return np.stack([np.frombuffer(one, dtype=np.float32) for one in pooled])
