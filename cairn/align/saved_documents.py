"""Documents of a round as text, for checkpoints that are saved between two of its steps.

A round is sampled by the weights that it began with, which a run that goes on no longer has: what is left of it is kept
with the checkpoint. Tensors are compressed bytes in base85: JSON has no NaN, and most numbers are zeros of prompts.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.train.data.batch import Document


def as_text(documents: Sequence[Document]) -> list[dict[str, Any]]:
    return [
        {
            "tokens": _packed(one.tokens_T),
            "targets": _packed(one.targets_T),
            "extra": {name: _packed(stream_T) for name, stream_T in one.extra.items()},
        }
        for one in documents
    ]


def from_text(saved: Sequence[dict[str, Any]]) -> list[Document]:
    return [
        Document(
            _unpacked(one["tokens"]),
            _unpacked(one["targets"]),
            {name: _unpacked(packed) for name, packed in one["extra"].items()},
        )
        for one in saved
    ]


def _packed(tensor_T: Tensor) -> list[str]:
    array = tensor_T.cpu().contiguous().numpy()
    return [array.dtype.str, base64.b85encode(zlib.compress(array.tobytes(), 1)).decode()]


def _unpacked(packed: Sequence[str]) -> Tensor:
    kind, text = packed
    array = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.dtype(kind))
    return torch.from_numpy(array.copy())
