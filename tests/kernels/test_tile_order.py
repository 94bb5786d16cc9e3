"""Packed weights in tiles: a round trip, the place of each level, and the product by reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.kernels.cases.packed_matmul import (
    BYTES,
    MORE_BYTES,
    SMALL,
    random_packed,
    random_weights,
)
from cairn.kernels.matmul.packed_matmul import (
    _numbers_descriptor,
    packed_matmul,
    packed_plan,
    stage_bytes,
    unit_of,
)
from cairn.kernels.matmul.packed_weights import dequantize_packed, in_order, packed_reference
from cairn.kernels.matmul.tile_order import (
    packed_tiles,
    paired_rows,
    small_group_tiles,
    small_groups,
    unpacked_tiles,
)
from cairn.models.activation import Gate
from cairn.models.linear.form import PLAIN, Epilogue
from cairn.models.linear.packed_tiles import W4A16, PackedTiles, nearest_levels
from cairn.models.quantized.planes import Planes, dequantized


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 3), columns=st.integers(1, 3), data=st.data())
def test_a_round_trip_and_where_a_thread_finds_its_levels(rows, columns, data):
    bits = data.draw(st.sampled_from([4, 8]))
    levels = torch.randint(0, 2**bits, (64 * rows, 64 * columns), dtype=torch.uint8)
    packed = packed_tiles(levels, bits)
    assert torch.equal(unpacked_tiles(packed), levels)
    n = data.draw(st.integers(0, 64 * rows - 1))
    k = data.draw(st.integers(0, 64 * columns - 1))
    # Left operand of wgmma: a thread has rows r, r + 8 and columns c, c + 1, c + 8, c + 9 of each 16.
    thread = n % 64 // 16 * 32 + n % 8 * 4 + k % 8 // 2
    if bits == 4:
        byte = thread * 16 + k % 64 // 16 * 4 + k % 2 * 2 + k % 16 // 8
        assert packed[n // 64, k // 64, byte] >> (n % 16 // 8 * 4) & 15 == levels[n, k]
    else:
        byte = k % 64 // 32 * 2048 + thread * 16 + k % 32 // 8 * 4 + k % 2 * 2 + n % 16 // 8
        assert packed[n // 64, k // 64, byte] == levels[n, k]


@pytest.mark.parametrize("group", [16, 32])
def test_scales_of_small_groups_come_back_and_lie_beside_those_of_the_row_8_on(group):
    plane = torch.randn(128, 192 // group).bfloat16()
    tiles = small_group_tiles(plane, 192)
    assert torch.equal(small_groups(tiles), plane)
    n, k = 64 + 16 + 3, 64 + 40
    word = (16 // 16 * 8 + 3) * (64 // group) + 40 // group
    assert tiles[1, 1, 2 * word] == plane[n, k // group]
    assert tiles[1, 1, 2 * word + 1] == plane[n + 8, k // group]


@pytest.mark.parametrize("form", [*SMALL, *BYTES, *MORE_BYTES], ids=lambda form: form.name)
def test_rows_in_another_order(form):
    w, order = random_weights(form, 128, 128, "cpu"), torch.randperm(128)
    assert torch.equal(packed_reference(in_order(w, order)), packed_reference(w)[order])


def test_pairs_of_gate_and_up():
    order = paired_rows(32).tolist()
    assert order == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


@pytest.mark.parametrize("shifts", [False, True])
def test_the_reference_and_the_order_of_pairs(shifts):
    w, x = random_packed(128, 256, 64, shifts, "cpu"), torch.randn(5, 256).bfloat16()
    exact = x.float() @ packed_reference(w).T
    torch.testing.assert_close(packed_matmul(x, w).float(), exact, rtol=1e-2, atol=1e-2)
    paired = dequantize_packed(w, paired=True)
    assert torch.equal(paired[paired_rows(128)], packed_reference(w, torch.bfloat16))


@pytest.mark.parametrize("gate", [None, Gate("silu", True)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_form_is_the_product_of_what_its_planes_stand_for(symmetric, gate):
    planes = nearest_levels(torch.randn(128, 256), 64)
    if not symmetric:
        order = torch.randperm(256)
        shifts = torch.randn_like(planes.scales)
        planes = Planes("int4", planes.levels_NK, planes.scales, shifts, 64, order_K=order)
    form, x = PackedTiles(planes), torch.randn(3, 256)
    assert PackedTiles.obstacle(planes) is None
    assert (form.weight.shifts is None) == symmetric
    expected = x @ dequantized(planes).T
    found = form.product(x, None, PLAIN if gate is None else Epilogue(gate))
    expected = expected if gate is None else gate.plain(expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_rounding_to_the_nearest_level():
    weight = torch.randn(64, 256)
    form = W4A16(weight)
    error = (packed_reference(form.weight) - weight).norm() / weight.norm()
    assert error < 0.13
    assert form.nbytes == 64 * 128 + 4 * 64 * 2
    assert W4A16(weight.bfloat16()).nbytes == 64 * 128 + 2 * 64 * 2  # scales in 16 bits
    assert "multiples" in (W4A16.obstacle(torch.zeros(60, 256)) or "")
    group = Planes("int4", torch.zeros(64, 192, dtype=torch.uint8), torch.ones(64, 4), None, 48)
    assert "groups of 48" in (PackedTiles.obstacle(group) or "")
    levels = torch.full((64, 128), float("nan")).to(torch.float8_e4m3fn)
    broken = Planes("fp8", levels, torch.ones(64, 1), None, 128)
    assert "not a number" in (PackedTiles.obstacle(broken) or "")
    large = Planes("mxfp4", group.levels_NK, torch.full((64, 6), 2048.0), None, 32)
    assert "a scale of 2048" in (PackedTiles.obstacle(large) or "")


def test_a_plane_of_one_group_has_the_stride_of_its_rows():
    """What is contiguous with one row may have any stride, and a TMA descriptor is made of it."""
    scales = torch.ones(128, 1).T.contiguous()
    assert _numbers_descriptor(scales, 128).strides == [128, 1]


def test_plans_fit():
    for m in (1, 16, 64):
        for n, k, group in (
            (4096, 4096, 128),
            (24576, 4096, 128),
            (4096, 12288, 64),
            (64, 192, 64),
            (4096, 4096, 16),
        ):
            plan = packed_plan(m, n, k, group)
            assert k % plan.block_k == 0
            assert group < 64 or group % unit_of(plan.block_k, group) == 0
            assert plan.stages * stage_bytes(m, plan.block_k, group) <= 108 << 10
            assert plan.stages >= 2
