"""Acceptance of draft tokens on the GPU: the length and last token of each row after a verification step.

    tokens of the row    t  d1 d2 d3        t: its last token; d1..d3: drafts of what follows
    drawn behind each    s0 s1 s2 s3        s0 is drawn behind t, s1 behind d1, ...
    accepted             while d(j+1) == s(j); with a accepted drafts the row goes on with s0 .. s(a)

A draw is a function of the row's seed, its position and the logits alone, so what is accepted is what would have been
drawn without drafts. The next step reads length and last token where they lie; the host need not know them by then. A
row without drafts has one draw, which is accepted. Bytes moved: two words for each draft.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.arguments import check
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.paged.step_inputs import State

MOST_DRAFTS = 31  # of a row in one step
LANES = MOST_DRAFTS + 1


class Drawn(NamedTuple):
    """Sampled tokens of a step for its B sequences; all int32."""

    rows_B: Tensor  # row of state, -1: padding
    bounds_B1: Tensor  # which tokens of the step belong to which sequence
    draw_bounds_B1: Tensor  # which draws; a sequence's last tokens are followed by one each
    tokens_T: Tensor  # as they were computed, drafts included
    positions_T: Tensor
    drawn_S: Tensor


def accept_tokens_reference(drawn: Drawn, state: State) -> None:
    rows, bounds, draws = (part.tolist() for part in drawn[:3])
    for b, row in enumerate(rows):
        count = draws[b + 1] - draws[b]
        if row < 0 or count == 0:
            continue
        first = bounds[b + 1] - count
        tokens = drawn.tokens_T[first : first + count].tolist()
        found = drawn.drawn_S[draws[b] : draws[b] + count].tolist()
        accepted = 0
        while accepted < count - 1 and tokens[accepted + 1] == found[accepted]:
            accepted += 1
        state.last_token_N[row] = found[accepted]
        state.length_N[row] = drawn.positions_T[first] + 1 + accepted


def accept_tokens(drawn: Drawn, state: State, impl: Impl = "auto") -> None:
    """Set length and last token of every row that drew; the others stay as they are."""
    first = check("rows_B", drawn.rows_B, shape=(None,))
    sequences = len(first)
    exact = {"rows_B": sequences, "bounds_B1": sequences + 1, "draw_bounds_B1": sequences + 1}
    for name, tensor in drawn._asdict().items():
        shape = (exact.get(name),)
        check(name, tensor, dtypes=(torch.int32,), shape=shape, beside=first, packed=True)
    for name in ("last_token_N", "length_N"):
        tensor = getattr(state, name)
        check(name, tensor, dtypes=(torch.int32,), shape=(None,), beside=first, packed=True)
    offers = {"triton": needs_cuda(drawn.rows_B), "reference": None}
    if choose("accept_tokens", impl, offers).impl == "reference":
        accept_tokens_reference(drawn, state)
    elif sequences:
        from cairn.kernels.dependent import pdl
        from cairn.kernels.sampling.accept_tokens_kernel import _accept_kernel

        kernel: Any = _accept_kernel
        kernel[(sequences,)](
            *drawn,
            state.last_token_N,
            state.length_N,
            LANES=LANES,
            num_warps=1,
            **pdl(first.device),
        )


def cost(sequences: int, drafts: int) -> Cost:
    return Cost(flops=0.0, bytes=4.0 * sequences * (7 + 2 * drafts))


def random_draws(sequences: int, drafts: int, device: str) -> tuple[Drawn, State]:
    """Every row verifies so many drafts, of which each holds in three of four cases."""
    width = drafts + 1

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), dtype=torch.int32, device=device)

    rows_B = torch.randperm(sequences, device=device).int()
    bounds_B1 = width * torch.arange(sequences + 1, dtype=torch.int32, device=device)
    tokens_T = integers(0, 99, sequences * width)
    wrong_T = integers(0, 4, sequences * width) == 0
    drawn_S = torch.where(wrong_T, tokens_T + 1, tokens_T).roll(-1)
    positions_T = integers(0, 4096, sequences * width)
    state = State(torch.zeros(sequences, 1, dtype=torch.int32, device=device), rows_B.clone(),
                  rows_B.clone())  # fmt: skip
    return Drawn(rows_B, bounds_B1, bounds_B1.clone(), tokens_T, positions_T, drawn_S), state
