"""Rows that a tensor map may claim, and plans for 65 to 256 rows of float8: against what there is room for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.few_rows import padded_rows, readable_rows
from cairn.kernels.matmul.skinny_plans import (
    HALF_RING,
    LARGE_RING,
    MULTIPROCESSORS,
    PIECE,
    row_block,
    wave_plan,
)


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 8),
    before=st.integers(0, 20),
    behind=st.integers(0, 300),
    gap=st.integers(0, 3),
    tile=st.sampled_from([8, 64, 128]),
)
def test_a_tensor_map_claims_no_row_outside_the_storage(rows, columns, before, behind, gap, tile):
    stride = columns + gap
    memory = torch.zeros(before + (rows - 1) * stride + columns + behind, dtype=torch.int16)
    view = memory.as_strided((rows, columns), (stride, 1), before)
    claimed = readable_rows(view, tile)
    whole = -(-rows // tile) * tile
    fits = before + (whole - 1) * stride + columns <= len(memory)
    assert claimed == (whole if fits else rows)


@given(m=st.integers(65, 256), n=st.integers(1, 1 << 17), k=st.integers(64, 1 << 15))
def test_programs_of_a_plan_run_at_once_and_fit_their_ring(m, n, k):
    plan = wave_plan(m, n, k)
    blocks = -(-m // 128)
    if plan is None:
        return
    shared = plan.stages * plan.block_k * (plan.block_n + row_block(m))
    programs = -(-n // plan.block_n) * plan.split * blocks
    assert shared <= (LARGE_RING if programs <= MULTIPROCESSORS else HALF_RING)
    assert programs <= 2 * MULTIPROCESSORS
    assert plan.block_n % PIECE == 0
    assert padded_rows(m) == blocks * row_block(m)
