"""The arithmetic behind the labs of two areas: each against an independent count."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import Ceilings, Identity
from cairn.labs.gpu._ceiling import ceiling
from cairn.labs.gpu.coalescing import moved_per_useful
from cairn.labs.gpu.number_formats import FLOATS, _error_curve
from cairn.labs.gpu.shape_cliff import Cache, lines_kept, read_cache
from cairn.labs.gpu.systolic_array import cycles_of, over_tiles, simulate
from cairn.labs.gpu.tiling import fetched, predicted_fetches
from cairn.labs.gpu.wave_quantisation import efficiency, waves
from cairn.labs.pytorch._caching import CachingAllocator, segment_size
from cairn.labs.pytorch.loss_scale import lost_share
from cairn.labs.pytorch.views import place

few = st.integers(1, 7)


@settings(max_examples=25, deadline=None)
@given(rows=few, height=few, width=few, seed=st.integers(0, 99))
def test_the_array_multiplies_in_as_many_cycles_as_the_formula_says(rows, height, width, seed):
    generator = np.random.default_rng(seed)
    a, w = generator.integers(-9, 9, (rows, height)), generator.integers(-9, 9, (height, width))
    trace = simulate(a, w)
    assert (trace.product == a @ w).all()
    assert trace.cycles == rows + height + width - 2


@settings(max_examples=15, deadline=None)
@given(rows=few, tall=st.integers(1, 3), wide=st.integers(1, 3), side=st.integers(1, 4))
def test_tiles_follow_one_another_as_fast_as_rows_or_weights_come(rows, tall, wide, side):
    generator = np.random.default_rng(rows)
    a = generator.integers(-9, 9, (rows, tall * side))
    w = generator.integers(-9, 9, (tall * side, wide * side))
    found = over_tiles(a, w, side)
    assert (found.product == a @ w).all()
    assert found.cycles == cycles_of(rows, tall * wide, side)
    assert found.largest >= abs(found.product).max()


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
def test_a_cache_of_two_tiles_fetches_what_the_formula_says(tile):
    assert fetched(16, tile) == predicted_fetches(16, tile)


def test_one_number_of_each_piece_costs_the_piece():
    assert [moved_per_useful(stride, 64) for stride in (1, 4, 16, 64)] == [1, 4, 16, 16]
    assert moved_per_useful(8, 32) == 8


@given(tasks=st.integers(1, 500), workers=st.integers(1, 200))
def test_waves_are_the_least_rounds_that_hold_all_tasks(tasks, workers):
    rounds = waves(tasks, workers)
    assert (rounds - 1) * workers < tasks <= rounds * workers
    assert 0 < efficiency(tasks, workers) <= 1


def test_a_pitch_of_all_sets_keeps_only_as_many_lines_as_there_are_ways():
    cache = Cache(sets=64, ways=8, line=64)
    assert lines_kept(cache, 64 * 64, 512) == 8
    assert lines_kept(cache, 64 * 64 + 64, 512) == 512
    assert lines_kept(cache, 64, 1000) == 512  # no more than it holds


def test_the_geometry_of_a_cache_is_read_or_taken_for_usual(tmp_path):
    assert read_cache(tmp_path) == Cache()
    for name, value in (("number_of_sets", 256), ("ways_of_associativity", 4)):
        (tmp_path / name).write_text(f"{value}\n")
    assert read_cache(tmp_path) == Cache(sets=256, ways=4, line=64)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    sizes=st.lists(st.integers(1, 40 << 20), min_size=1, max_size=40),
)
def test_blocks_never_overlap_and_nothing_is_lost(seed, sizes):
    allocator, held, generator = CachingAllocator(), [], random.Random(seed)
    for size in sizes:
        held.append((size, allocator.allocate(size)))
        if held and generator.random() < 0.5:
            allocator.free(held.pop(generator.randrange(len(held)))[1])
        spans = sorted((b.segment, b.start, b.start + b.size) for _, b in held)
        for before, after in itertools.pairwise(spans):
            assert before[0] != after[0] or before[2] <= after[1]
        assert all(block.size >= size for size, block in held)
        assert allocator.allocated == sum(block.size for _, block in held) <= allocator.reserved
    for _, block in held:
        allocator.free(block)
    # All free: each segment is one whole block again, so the same requests need nothing new.
    before = allocator.segments
    assert allocator.allocated == 0
    for size in sizes:
        allocator.free(allocator.allocate(size))
    assert allocator.segments == before


def test_segments_have_the_sizes_that_torch_asks_for():
    mib = 1 << 20
    assert [segment_size(size) for size in (512, mib, mib + 512, 10 * mib, 11 * mib)] == [
        2 * mib,
        2 * mib,
        20 * mib,
        10 * mib,
        12 * mib,
    ]


def test_all_gradients_are_lost_when_they_are_small_and_none_when_enlarged():
    assert lost_share(1e-12, 1.0) == pytest.approx(1.0)
    assert lost_share(1e-3, 2.0**16) < 1e-6
    assert lost_share(2e-8, 1.0) > lost_share(2e-8, 4.0)


def test_strides_say_where_an_element_lies():
    array = np.arange(24).reshape(2, 3, 4)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    assert place(0, strides, (1, 2, 3)) == array[1, 2, 3]
    assert place(5, (0, 1), (7, 2)) == 7


def test_a_ceiling_that_was_not_measured_says_why():
    identity = Identity(cpu="x", threads=1, gpus=[], driver=None, torch=None)
    bare = Ceilings(
        measured_at="now",
        quick=True,
        identity=identity,
        device="cpu",
        device_name="a CPU",
        absent={"launch_in_graph": "CUDA graphs need a GPU"},
    )
    with pytest.raises(HardwareError, match="CUDA graphs need a GPU"):
        ceiling(bare, "launch_in_graph")
    with pytest.raises(HardwareError, match="not measured"):
        ceiling(bare, "matmul.fp32")


@pytest.mark.parametrize("form", FLOATS, ids=lambda form: form.name)
def test_the_plotted_error_is_the_bound_inside_a_format(form):
    bound = 2.0**-form.significand
    inside = [y for x, y in _error_curve(form) if form.smallest <= x and 2 * x <= form.largest]
    assert inside == pytest.approx([bound] * len(inside), rel=0.12)
