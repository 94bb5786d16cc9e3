"""A second copy of the weights, laid out by columns, where this CPU's library multiplies with it faster.

Checkpoints store a matrix row by row. With one token that is the right order: each row is read once, from front to
back. With several tokens some libraries (OpenBLAS on ARM: 1.3 to 6 times) are faster when the columns lie together;
others do not care. So it is measured, on one matrix of the model, before the copy is made; and it is made only if it
takes a small part of the memory. The numbers are the same up to rounding.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.core.units import format_bytes
from cairn.hw.host import read_memory
from cairn.models.layers import Columns, Rows, Vocabulary, Weights
from cairn.models.transformer import Transformer

MOST_MEMORY = 0.2  # of the machine's, for the copy
LEAST_GAIN = 1.1  # times as fast, or it is not worth its memory
ROWS = 16  # tokens of the trial
TRIALS = 5


@torch.inference_mode()
def turn_weights(model: Transformer) -> str:
    """Make the copy if it pays; says what was done, and why."""
    every = list(places(model))
    if all(place.turned is not None for place in every):
        return "weights are laid out by columns as well, as before"
    needed = sum(weight.nbytes for place in every for weight in matrices(place))
    allowed = int((read_memory(Path("/"))[0].usable_bytes or 0) * MOST_MEMORY)
    if needed > allowed:
        return f"weights stay as stored: a copy by columns needs {format_bytes(needed, 'binary')}"
    gain = _gain(matrices(every[len(every) // 2])[0])
    if gain < LEAST_GAIN:
        return f"weights stay as stored: by columns they are {gain:.2f} times as fast"
    for place in every:
        place.turned = _turned(torch.cat(matrices(place)))
        _join_bias(place)
    size = format_bytes(needed, "binary")
    return f"weights are laid out by columns as well ({size}): {gain:.2f} times as fast for {ROWS} tokens"


def refresh_columns(model: Transformer) -> None:
    """Make the copies by columns again, where there are some: the weights have changed."""
    for place in places(model):
        if place.turned is not None:
            place.turned = _turned(torch.cat(matrices(place)))
            _join_bias(place)


def places(model: Transformer) -> Iterator[Columns | Rows | Vocabulary]:
    """Everything that multiplies but experts; an embedding only if it is the head, too."""
    for module in model.modules():
        if isinstance(module, Columns | Rows):
            yield module
    yield model.head or model.embedding


def _parts(place: Columns) -> list[Weights]:
    return [place.fused] if place.fused is not None else place.separate()


def matrices(place: Columns | Rows | Vocabulary) -> list[Tensor]:
    return [part.weight for part in _parts(place)] if isinstance(place, Columns) else [place.weight]


def _join_bias(place: Columns | Rows | Vocabulary) -> None:
    if isinstance(place, Columns) and place.with_bias:
        place.joined_bias = torch.cat(
            [part.bias for part in _parts(place) if part.bias is not None]
        )


def _turned(weight: Tensor) -> Tensor:
    return weight.detach().t().contiguous().t()


def _gain(weight: Tensor) -> float:
    x = torch.ones(ROWS, weight.shape[1], dtype=weight.dtype)
    return _seconds(x, weight) / _seconds(x, _turned(weight))


def _seconds(x: Tensor, weight: Tensor) -> float:
    """The best of a few; the first pays for what is set up once."""
    best = float("inf")
    for _ in range(TRIALS):
        began = time.perf_counter()
        F.linear(x, weight)
        best = min(best, time.perf_counter() - began)
    return best
