"""Pooling of a prompt's hidden states over its prefill chunks.

    mean   the sum over all tokens of the prompt, divided by how many they are
    last   the state of the last token, which has seen all the others

The states are those behind the model's last norm, before its head. A request that is pooled runs like any other and
samples one token that is thrown away: so it is batched, chunked, preempted and aborted as generation is, on one device
or on many. A chunk adds one vector of float32, however long it is. Vectors are not normalised here.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.serve.engine.request import Request
from cairn.serve.engine.step import Chunk

Vector = np.ndarray[Any, np.dtype[np.float32]]


class Part(NamedTuple):
    """Contribution of a chunk."""

    start: int  # of the chunk; 0 begins again: the request was preempted
    last: bool  # the prompt ends with this chunk
    vector_D: Vector


def part_of(chunk: Chunk, hidden_TD: Tensor) -> Tensor:
    """Contribution [D] of a chunk, on the device."""
    if chunk.request.params.pooling == "last":
        return hidden_TD[-1].to(torch.float32, copy=True)  # the step may use its memory again
    return hidden_TD.sum(0, dtype=torch.float32)


class Pools:
    """The vectors of requests that are under way. They are whole when their prompt has been computed."""

    def __init__(self) -> None:
        self._sums: dict[Request, Vector] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, request: Request, part: Part) -> None:
        total_D = self._sums.get(request)
        if total_D is None or part.start == 0 or request.params.pooling == "last":
            self._sums[request] = part.vector_D
        else:
            self._sums[request] = total_D + part.vector_D
        if part.last and request.params.pooling == "mean":
            self._sums[request] = self._sums[request] / np.float32(len(request.prompt))

    def pop(self, request: Request) -> Vector | None:
        return self._sums.pop(request, None)
