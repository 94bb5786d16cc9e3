"""The kernel of `accept_tokens`: a program for each sequence, a lane for each draft."""

import triton
import triton.language as tl

from cairn.kernels.dependent import begin


@triton.jit
def _accept_kernel(
    rows, bounds, draw_bounds, tokens, positions, drawn, last_tokens, lengths,
    LANES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each sequence."""
    begin(OVERLAP)
    b = tl.program_id(0)
    row = tl.load(rows + b).to(tl.int64)
    draws = tl.load(draw_bounds + b)
    count = tl.load(draw_bounds + b + 1) - draws
    if (row >= 0) & (count > 0):
        first = tl.load(bounds + b + 1) - count
        lane = tl.arange(0, LANES)
        is_draft = lane < count - 1
        draft = tl.load(tokens + first + 1 + lane, mask=is_draft, other=0)
        draw = tl.load(drawn + draws + lane, mask=is_draft, other=0)
        accepted = tl.min(
            tl.where(is_draft & (draft == draw), count - 1, tl.minimum(lane, count - 1)), 0
        )
        tl.store(last_tokens + row, tl.load(drawn + draws + accepted))
        tl.store(lengths + row, tl.load(positions + first) + 1 + accepted)
