"""The data of a pass as microbatches of whole sequences. What is wrong with a datum is refused before anything runs.

data -> documents -> microbatches          the stream AT: which token of the pass each one is, -1 for padding
"""

from collections.abc import Sequence

import numpy as np
import torch

from cairn.align.rollout import PADDED
from cairn.align.tinker.losses import AT, LossKind, TinkerRule
from cairn.align.tinker.wire import Datum, Pass
from cairn.core.errors import RequestError
from cairn.train.data.batch import Batch, Document, pack

PASS_TOKENS = 4096  # of a microbatch, unless one sequence is longer


def documents_of(request: Pass, longest: int, vocab: int) -> list[Document]:
    """`longest`: tokens that a sequence may have."""
    kind = TinkerRule(request.loss, request.settings, 0).kind
    documents = []
    for at, datum in enumerate(request.data):
        _check(datum, at, request.loss, kind, longest, vocab)
        documents.append(_document(datum, kind))
    return documents


def _check(datum: Datum, at: int, loss: str, kind: LossKind, longest: int, vocab: int) -> None:
    missing = [name for name in kind.inputs if name not in datum.inputs]
    if missing:
        raise RequestError(
            f"datum {at} has no {missing[0]!r}, which the loss {loss} needs",
            hint=f"it needs {', '.join(kind.inputs)}",
        )
    if not 0 < len(datum.tokens) <= longest:
        raise RequestError(
            f"datum {at} has {len(datum.tokens)} tokens; 1 to {longest} are possible",
            hint="--max-model-len sets the limit",
        )
    for what, ids in (("token", datum.tokens), ("target", datum.inputs["target_tokens"])):
        if ids.min() < 0 or ids.max() >= vocab:
            raise RequestError(
                f"datum {at}: {what} ids from {ids.min()} to {ids.max()}, and the model has {vocab}"
            )


def _document(datum: Datum, kind: LossKind) -> Document:
    streams = {
        name: torch.from_numpy(datum.inputs[name].astype(np.float32))
        for name in kind.inputs
        if name != "target_tokens"
    }
    tokens_T, targets_T = (
        torch.from_numpy(ids.astype(np.int64))
        for ids in (datum.tokens, datum.inputs["target_tokens"])
    )
    return Document(tokens_T, targets_T, streams)


def microbatches(documents: Sequence[Document], starts: np.ndarray, pad_id: int) -> list[Batch]:
    """`starts`: the number of each document's first token in the pass."""
    batches = []
    for group in _groups([len(document.tokens_T) for document in documents]):
        chosen = []
        for at in group:
            place_T = (
                torch.arange(int(starts[at]), int(starts[at + 1])) + 1
            )  # `pack` fills up with 0
            extra = {**documents[at].extra, AT: place_T}
            chosen.append(documents[at]._replace(extra=extra))
        tokens = sum(len(document.tokens_T) for document in chosen)
        batch = pack(chosen, -(-tokens // PADDED) * PADDED, pad_id, group)
        batches.append(batch._replace(extra={**batch.extra, AT: batch.extra[AT] - 1}))
    return batches


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of the documents that share a microbatch."""
    groups: list[list[int]] = [[]]
    tokens = 0
    for at, length in enumerate(lengths):
        if groups[-1] and tokens + length > PASS_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(at)
        tokens += length
    return groups
