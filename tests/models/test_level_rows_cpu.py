"""Rows of levels with scales in float32 keep every number, and products with them are those of whole numbers."""

import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.kernels.cpu import compiled
from cairn.kernels.cpu.level_rows import (
    ROUNDED_GROUP,
    level_rows,
    obstacle,
    rounded_q8_0,
    rounded_rows,
)
from cairn.kernels.cpu.packed_product import Blocks
from cairn.models.linear.blocks import BlocksForm, RoundedRows
from cairn.models.linear.level_blocks import blocks_of
from cairn.models.linear.level_blocks import obstacle as not_kept
from cairn.models.quantized.planes import Planes, dequantized

compiles = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))
ROUNDING = 1e-4  # of a product, by activations of 16 bits
MOST_STEPS = 32512  # of an activation: with this as the largest of 256, whole numbers are kept
GROUPS = (32, 64, 96, 128, 256, 10_000)
CROSS = shutil.which("x86_64-linux-gnu-gcc")


def levels_of(bits: int, rows: int, columns: int, group: int, seed: int = 0) -> Planes:
    chance = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    levels_NK = torch.randint(low, high, (rows, columns), generator=chance)
    group = min(group, columns)
    scales_NG = torch.rand(rows, -(-columns // group), generator=chance) * 0.01 + 0.001
    shifts_NG = scales_NG * (torch.rand(scales_NG.shape, generator=chance) - 8)
    if bits == 4:
        return Planes("int4", levels_NK.to(torch.uint8), scales_NG, shifts_NG, group)
    return Planes("int8", levels_NK.to(torch.int8), scales_NG, None, group)


def whole_numbers(
    bits: int, rows: int, columns: int, group: int, seed: int
) -> tuple[Blocks, Tensor]:
    """Levels that are the weights themselves, 0 in the first of 256 columns; and the matrix."""
    planes = levels_of(bits, rows, columns, group, seed)
    planes.levels_NK[:, ::256] = 0
    none = torch.zeros_like(planes.scales) if bits == 4 else None
    packed = level_rows(planes.levels_NK, torch.ones_like(planes.scales), none, planes.group)
    return packed, planes.levels_NK.long()


@compiles
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("columns", [32, 96, 576])
def test_rows_are_the_numbers_of_the_planes(bits, group, columns):
    planes = levels_of(bits, 9, columns, group)
    form = BlocksForm([blocks_of(planes)])
    torch.testing.assert_close(form[:], dequantized(planes), rtol=1e-6, atol=1e-7)
    assert form.nbytes <= 9 * (columns * bits / 8 + 2 * 4 * (-(-columns // 32) + 3))


@compiles
@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from(GROUPS),
    rows=st.integers(1, 21),
    columns=st.integers(1, 20).map(lambda blocks: 32 * blocks),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 9, 33, 131]),
)
def test_a_product_of_whole_numbers_is_exact(bits, group, rows, columns, tokens):
    packed, weight_NK = whole_numbers(bits, rows, columns, group, seed=rows)
    chance = torch.Generator().manual_seed(tokens)
    x_MK = torch.randint(-120, 121, (tokens, columns), generator=chance)
    x_MK[:, ::256] = MOST_STEPS  # under levels that are 0
    found_MN = BlocksForm([packed]).matrix.product(x_MK.float())
    assert torch.equal(found_MN.long(), x_MK @ weight_NK.T)


@compiles
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", GROUPS)
def test_a_row_is_the_same_whatever_rows_are_beside_it(bits, group):
    form = BlocksForm([blocks_of(levels_of(bits, 30, 352, group))])
    x_MK = torch.randn(135, 352, generator=torch.Generator().manual_seed(group))
    alone = torch.cat([form.matrix.product(row_K[None]) for row_K in x_MK])
    assert torch.equal(form.matrix.product(x_MK), alone)


@compiles
@pytest.mark.parametrize("tokens", [1, 6, 300])
def test_a_product_errs_by_the_rounding_of_its_activations(tokens):
    for bits in (4, 8):
        planes = levels_of(bits, 70, 576, 64)
        x_MK = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(tokens))
        weight_NK = dequantized(planes)
        error = BlocksForm([blocks_of(planes)]).product(x_MK) - x_MK @ weight_NK.T
        assert error.norm() < ROUNDING * x_MK.norm() * weight_NK.norm() / 576**0.5


@compiles
@pytest.mark.parametrize(("rounded", "group"), [(rounded_rows, ROUNDED_GROUP), (rounded_q8_0, 32)])
def test_a_rounded_matrix_errs_by_half_a_level_and_keeps_its_maps_apart(rounded, group):
    weight_NK = torch.randn(40, 160, generator=torch.Generator().manual_seed(0))
    weight_NK[3] = 0
    form = RoundedRows(weight_NK, [24, 16], rounded)
    groups = weight_NK.split(group, dim=1)
    steps = [part.abs().amax(1, keepdim=True) / 127 for part in groups]
    half = torch.cat([(s / 2).expand_as(part) for s, part in zip(steps, groups, strict=True)], 1)
    in_float16 = 127 * half * 2**-11 if rounded is rounded_q8_0 else 0.0  # of the scale, 127 times
    assert ((form[:] - weight_NK).abs() <= half * 1.001 + 2 * in_float16).all()
    assert form.matrix.part_rows == [24, 16]
    torch.testing.assert_close(form[:], BlocksForm([rounded(weight_NK)])[:], rtol=0, atol=0)


@compiles
def test_planes_of_other_kinds_are_kept_or_rounded():
    chance = torch.Generator().manual_seed(0)
    codes_NK = torch.randint(0, 16, (8, 128), generator=chance).to(torch.uint8)
    mxfp4 = Planes("mxfp4", codes_NK, torch.full((8, 4), 0.125), None, 32)
    assert not_kept(mxfp4) is None
    assert torch.equal(BlocksForm([blocks_of(mxfp4)])[:], dequantized(mxfp4))
    blocks = Planes("int8", levels_of(8, 8, 128, 128).levels_NK, torch.rand(2, 2), None, 64, 4)
    torch.testing.assert_close(BlocksForm([blocks_of(blocks)])[:], dequantized(blocks))
    fp8_NK = torch.randn(8, 128, generator=chance).to(torch.float8_e4m3fn)
    ordered = levels_of(4, 8, 128, 64)
    order_K = torch.randperm(128, generator=chance)
    for planes in (
        Planes("fp8", fp8_NK, torch.rand(8, 1), None, 128),
        Planes("int4", ordered.levels_NK, ordered.scales, ordered.shifts, 64, 1, order_K),
    ):
        assert not_kept(planes)
        error = BlocksForm([blocks_of(planes)])[:] - dequantized(planes)
        assert error.abs().max() <= dequantized(planes).abs().max() / 253


def test_rows_that_are_no_whole_blocks_are_refused():
    assert "rows of 40" in (obstacle(40, 40) or "")
    assert "groups of 16" in (obstacle(64, 16) or "")
    assert obstacle(64, 10_000) is None


@pytest.mark.skipif(CROSS is None, reason="there is no compiler for x86 here")
@pytest.mark.parametrize("cpu", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "cascadelake"])
def test_the_sources_compile_for_x86(cpu):
    flags = ["-std=gnu11", "-fopenmp-simd", "-fsyntax-only", "-Werror=implicit", f"-march={cpu}"]
    source = str(compiled.HERE / compiled.SOURCES[0])
    done = subprocess.run([str(CROSS), *flags, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
