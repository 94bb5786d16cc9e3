"""Decision whether weights get a transposed copy because this CPU's library multiplies faster with it.

Checkpoints store a matrix row by row. With several tokens some libraries (OpenBLAS on ARM: 1.3 to 6 times) are faster
when the columns lie together; others do not care. So it is measured, on one matrix of the model, before the copy
(`models.linear.transposed`) is made; and it is made only if it takes a small part of the memory.
"""

import time
from pathlib import Path

import torch
from torch import Tensor

from cairn.core.units import format_bytes
from cairn.hw.host import read_memory
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.maps import linears
from cairn.models.linear.transposed import TransposedForm
from cairn.models.transformer import Transformer

MOST_MEMORY = 0.2  # of the machine's, for the copy
LEAST_GAIN = 1.1  # times as fast, or it is not worth its memory
ROWS = 16  # tokens of the trial
TRIALS = 5


@torch.inference_mode()
def transpose_weights(model: Transformer) -> str:
    """Make the copy if it pays; says what was done, and why."""
    every = list(linears(model))
    if all(isinstance(part.form, TransposedForm) for part in every):
        return "weights are laid out by columns as well, as before"
    needed = sum(weight.nbytes for part in every for weight in part.matrices())
    allowed = int((read_memory(Path("/"))[0].usable_bytes or 0) * MOST_MEMORY)
    if needed > allowed:
        return f"weights stay as stored: a copy by columns needs {format_bytes(needed, 'binary')}"
    gain = _gain(every[len(every) // 2].matrices()[0])
    if gain < LEAST_GAIN:
        return f"weights stay as stored: by columns they are {gain:.2f} times as fast"
    for part in every:
        part.take(TransposedForm(part.joined()))
    size = format_bytes(needed, "binary")
    return f"weights are laid out by columns as well ({size}): {gain:.2f} times as fast for {ROWS} tokens"


def _gain(weight: Tensor) -> float:
    x = torch.ones(ROWS, weight.shape[1], dtype=weight.dtype)
    return _seconds(x, weight) / _seconds(x, TransposedForm(weight).weight_NK)


def _seconds(x: Tensor, weight: Tensor) -> float:
    """The best of a few; the first pays for what is set up once."""
    best = float("inf")
    for _ in range(TRIALS):
        began = time.perf_counter()
        linear(x, weight)
        best = min(best, time.perf_counter() - began)
    return best
