"""Weight shapes of models (rows x columns as in nn.Linear), for benchmarks and tuning.

A token costs 2 * N * K operations and, where few tokens share a step, all N * K weights have to be read for them.
"""

from typing import NamedTuple


class Projection(NamedTuple):
    model: str
    name: str
    n: int  # outputs
    k: int  # inputs


QWEN3_8B = (
    Projection("8B", "qkv", 6144, 4096),
    Projection("8B", "o", 4096, 4096),
    Projection("8B", "gate_up", 24576, 4096),
    Projection("8B", "down", 4096, 12288),
    Projection("8B", "lm_head", 151936, 4096),
)
QWEN3_06B = (
    Projection("0.6B", "qkv", 4096, 1024),
    Projection("0.6B", "o", 1024, 2048),
    Projection("0.6B", "gate_up", 6144, 1024),
    Projection("0.6B", "down", 1024, 3072),
    Projection("0.6B", "lm_head", 151936, 1024),
)
