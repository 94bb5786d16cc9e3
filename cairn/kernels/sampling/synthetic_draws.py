"""Draws that agree with drafts as often as asked for: to measure an engine with random weights.

    rates    unconditional, by position: 0.8 0.6 0.3 says how often the first, two and three drafts are drawn
    chance   of a row's n-th step with drafts: multiples of the golden ratio, so that few steps have the asked mean

Draws before the first draft that does not "hold" become the drafts, and the draw at its place becomes another token.
What comes behind this kernel is as it is served. Bytes moved: two words for each draft.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import apart, check
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.sampling.accept_tokens import LANES, Drawn, random_draws

GOLDEN = 0x9E3779B1  # of 2^32


def synthetic_draws_reference(drawn: Drawn, rates_K: Tensor, steps_N: Tensor) -> None:
    rows, bounds, draws = (part.tolist() for part in drawn[:3])
    for b, row in enumerate(rows):
        count = draws[b + 1] - draws[b]
        if row < 0 or count < 2:
            continue
        chance = ((int(steps_N[row]) + row) * GOLDEN % 2**32 >> 8) / 2**24
        steps_N[row] += 1
        first = bounds[b + 1] - count
        held = int((rates_K[: count - 1] > chance).sum())
        for at in range(held):
            drawn.drawn_S[draws[b] + at] = drawn.tokens_T[first + 1 + at]
        if held < count - 1:
            draft = int(drawn.tokens_T[first + 1 + held])
            if drawn.drawn_S[draws[b] + held] == draft:
                drawn.drawn_S[draws[b] + held] = draft - 1 if draft > 0 else 1


@triton.jit
def _synthetic_kernel(
    rows, bounds, draw_bounds, tokens, drawn, rates, steps, places,
    GOLDEN: tl.constexpr, LANES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each sequence."""
    begin(OVERLAP)
    b = tl.program_id(0)
    row = tl.load(rows + b)
    draws = tl.load(draw_bounds + b)
    count = tl.load(draw_bounds + b + 1) - draws
    if (row >= 0) & (count > 1):
        step = tl.load(steps + row)
        tl.store(steps + row, step + 1)
        mixed = (step + row).to(tl.uint32) * GOLDEN
        chance = (mixed >> 8).to(tl.float32) / 16777216.0
        lane = tl.arange(0, LANES)
        rate = tl.load(rates + lane, mask=(lane < count - 1) & (lane < places), other=0.0)
        held = tl.sum(tl.where(rate > chance, 1, 0), 0)
        is_draft = lane < count - 1
        first = tl.load(bounds + b + 1) - count
        draft = tl.load(tokens + first + 1 + lane, mask=is_draft, other=0)
        draw = tl.load(drawn + draws + lane, mask=is_draft, other=0)
        other = tl.where(draft > 0, draft - 1, 1)
        ending = tl.where(draw == draft, other, draw)
        found = tl.where(lane < held, draft, tl.where(lane == held, ending, draw))
        tl.store(drawn + draws + lane, found, mask=is_draft)


def synthetic_draws(drawn: Drawn, rates_K: Tensor, steps_N: Tensor, impl: Impl = "auto") -> None:
    """Change `drawn.drawn_S`. `rates_K`: float32, falling. `steps_N`: of each row, counts its steps with drafts."""
    first = check("rows_B", drawn.rows_B, shape=(None,))
    sequences = len(first)
    exact = {"rows_B": sequences, "bounds_B1": sequences + 1, "draw_bounds_B1": sequences + 1}
    for name, tensor in drawn._asdict().items():
        shape = (exact.get(name),)
        check(name, tensor, dtypes=(torch.int32,), shape=shape, beside=first, packed=True)
    check("rates_K", rates_K, dtypes=(torch.float32,), shape=(None,), beside=first, packed=True)
    check("steps_N", steps_N, dtypes=(torch.int32,), shape=(None,), beside=first, packed=True)
    for name, tensor in (("drawn_S", drawn.drawn_S), ("steps_N", steps_N)):
        apart(name, tensor)
    offers = {"triton": needs_cuda(drawn.rows_B), "reference": None}
    if choose("synthetic_draws", impl, offers).impl == "reference":
        synthetic_draws_reference(drawn, rates_K, steps_N)
    elif sequences:
        kernel: Any = _synthetic_kernel
        kernel[(sequences,)](
            drawn.rows_B,
            drawn.bounds_B1,
            drawn.draw_bounds_B1,
            drawn.tokens_T,
            drawn.drawn_S,
            rates_K,
            steps_N,
            len(rates_K),
            GOLDEN=GOLDEN,
            LANES=LANES,
            num_warps=1,
            **pdl(first.device),
        )


def cost(sequences: int, drafts: int) -> Cost:
    return Cost(flops=0.0, bytes=4.0 * sequences * (7 + 3 * drafts))


def random_rates(sequences: int, drafts: int, device: str) -> tuple[Drawn, Tensor, Tensor]:
    drawn, _ = random_draws(sequences, drafts, device)
    rates_K = torch.linspace(0.9, 0.2, drafts, device=device)
    return drawn, rates_K, torch.zeros(sequences, dtype=torch.int32, device=device)
