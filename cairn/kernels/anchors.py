"""Baselines compiled by torch.compile, for comparison with the kernels.

The function takes everything it works on as arguments, so that it is compiled once for each shape and not once for
each set of inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

SHAPES = 64  # compiled versions of one function; torch would fall back to eager mode, silently, after eight


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = SHAPES  # pyrefly: ignore
    return torch.compile(function, dynamic=False)
