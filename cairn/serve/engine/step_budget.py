"""Token budget of mixed steps for a target step time.

    tokens = milliseconds * rate of products / FLOPs of a token, in whole tiles

A decoding request gets a token for each step, so a step that also computes long prompts is a pause in every answer. The
rate is the measured one of this machine, or a usual share of the vendor's; where neither is known there is no limit.
What attention adds is left out: the step may take a little longer than asked. Imported without torch, by who plans.

How fast a CPU is depends on the form of the weights and on who else computes there, so it is measured (`Pace`) by the
steps so far, and any step is limited: a prompt of thousands of tokens in one piece would keep all others waiting.
"""

from typing import TYPE_CHECKING

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import load
from cairn.hw.datasheet import find_chip
from cairn.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

TILE = 128  # rows that a tile of a product has
LEAST = 256
OF_VENDOR = 0.7  # what large products reach of the vendor's rate
OF_LARGE = 0.88  # what products of a thousand rows reach of large ones
CPU_STEP_S = 0.25  # no step of a CPU is asked to take less
FIRST_TOKENS = 256  # of a CPU's steps until one was timed
CPU_LEAST = 64  # tokens of prompts in a step: fewer are no faster
SMOOTHING = 0.3  # weight of the newest step
NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


class Pace:
    """Adaptive token budget for a target step time, learned from previous steps."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._token_s = 0.0  # of a step with prompts; 0: not known yet

    def tokens(self) -> int:
        """Besides one for each that decodes."""
        if not self._token_s:
            return FIRST_TOKENS
        return max(CPU_LEAST, int(self.seconds / self._token_s))

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. Small ones tell nothing about a prompt's tokens."""
        if tokens >= CPU_LEAST and seconds > 0:
            each = seconds / tokens
            before = self._token_s or each
            self._token_s = (1 - SMOOTHING) * before + SMOOTHING * each


def mixed_step_tokens(
    spec: ModelSpec, weight: "torch.Tensor", ranks: int, step_ms: float, rows: int, step_tokens: int
) -> int:
    """Value of `Limits.mixed_step_tokens`; 0 for no limit."""
    if not step_ms or not weight.is_cuda:
        return 0
    import torch

    name = torch.cuda.get_device_name(weight.device)
    rate = matmul_rate(name, NAMES.get(str(weight.dtype), ""))
    if rate is None:
        return 0
    return tokens_within(step_ms / 1e3, rate * ranks, spec, rows, step_tokens)


def tokens_within(seconds: float, rate: float, spec: ModelSpec, rows: int, step_tokens: int) -> int:
    """Tokens in whole tiles, at least all rows plus one tile of a prompt, so that prompts make progress."""
    of_token = 2 * (spec.matmul_parameters() - spec.vocab * spec.hidden)
    fitting = int(seconds * rate * OF_LARGE / of_token) // TILE * TILE
    least = max(LEAST, -(-rows // TILE) * TILE + TILE)
    tokens = max(fitting, least)
    return tokens if tokens < step_tokens else 0


def matmul_rate(device_name: str, dtype: str) -> float | None:
    try:
        ceilings = load()
    except HardwareError:
        ceilings = None
    if ceilings and ceilings.device_name == device_name and dtype in ceilings.matmul:
        return ceilings.matmul[dtype].value
    chip, _ = find_chip(device_name)
    if chip is None or dtype not in chip.flops_per_s:
        return None
    return OF_VENDOR * chip.flops_per_s[dtype]
