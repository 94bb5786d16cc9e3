"""The floor is the largest of three terms, whatever the numbers."""

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis.strategies import floats, integers, sampled_from
from synthetic_hosts import measured, some_ceilings

from cairn.core.errors import HardwareError
from cairn.hw.datasheet import find_chip
from cairn.hw.roofline import Floor, dtype_name, floor

CEILINGS = some_ceilings()  # 4 TB/s, 800 TFLOP/s in bf16, 1 us per launch in a graph
H200, _ = find_chip("NVIDIA H200")
amounts = floats(min_value=0, max_value=1e18)
positive = floats(min_value=1, max_value=1e18)


def test_by_hand():
    found = floor(flops=8e14, bytes_moved=4e12, dtype="bf16", ceilings=CEILINGS)
    assert (found.compute_s, found.memory_s, found.launch_s) == (1.0, 1.0, 1e-6)
    assert (found.intensity, found.ridge) == (200.0, 200.0)
    assert found.from_datasheet == ()


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "bound"),
    [(8e14, 1e6, "compute"), (1e6, 4e12, "memory"), (10, 10, "launch"), (0, 0, "launch")],
)
def test_what_binds(flops, bytes_moved, bound):
    found = floor(flops, bytes_moved, "bf16", CEILINGS)
    assert found.bound == bound
    assert found.seconds == getattr(found, f"{bound}_s")


@given(amounts, amounts, integers(0, 10_000))
def test_the_floor_is_the_largest_term(flops, bytes_moved, launches):
    found = floor(flops, bytes_moved, "bf16", CEILINGS, launches=launches)
    terms = (found.memory_s, found.compute_s, found.launch_s)
    assert found.seconds == max(terms)
    assert found.seconds == getattr(found, f"{found.bound}_s")


@given(amounts, amounts, floats(min_value=1, max_value=1e6))
def test_more_work_never_lowers_the_floor(flops, bytes_moved, factor):
    base = floor(flops, bytes_moved, "bf16", CEILINGS).seconds
    assert floor(flops * factor, bytes_moved, "bf16", CEILINGS).seconds >= base
    assert floor(flops, bytes_moved * factor, "bf16", CEILINGS).seconds >= base
    assert floor(flops, bytes_moved, "bf16", CEILINGS, launches=3).seconds >= base


@given(positive, positive)
def test_the_side_of_the_ridge_decides(flops, bytes_moved):
    found = floor(flops, bytes_moved, "bf16", CEILINGS, launches=0)
    assume(not math.isclose(found.intensity, found.ridge, rel_tol=1e-9))
    assert found.bound == ("compute" if found.intensity > found.ridge else "memory")


@given(positive, floats(min_value=1.5, max_value=100))
def test_a_faster_machine_has_a_lower_floor(amount, factor):
    faster = some_ceilings(
        copy=measured(4e12 * factor),
        matmul={"bf16": measured(8e14 * factor, "FLOP/s")},
        launch_in_graph=measured(1e-6 / factor, "s"),
    )
    slow, fast = floor(amount, amount, "bf16", CEILINGS), floor(amount, amount, "bf16", faster)
    assert fast.seconds == pytest.approx(slow.seconds / factor)
    assert fast.bound == slow.bound


@given(positive, positive, floats(min_value=1e-3, max_value=1e3))
def test_share(flops, bytes_moved, slowdown):
    found = floor(flops, bytes_moved, "bf16", CEILINGS)
    assert found.share(found.seconds) == pytest.approx(1.0)
    assert found.share(found.seconds * slowdown) == pytest.approx(1 / slowdown)


@pytest.mark.parametrize("time", [0, -1])
def test_a_time_is_positive(time):
    with pytest.raises(ValueError, match="positive"):
        floor(1, 1, "bf16", CEILINGS).share(time)


@pytest.mark.parametrize("amount", [-1, math.nan, math.inf])
def test_work_is_a_finite_count(amount):
    with pytest.raises(ValueError, match="flops"):
        floor(amount, 1, "bf16", CEILINGS)
    with pytest.raises(ValueError, match="bytes_moved"):
        floor(1, amount, "bf16", CEILINGS)


def test_no_bytes_have_no_intensity():
    assert floor(1, 0, "bf16", CEILINGS).intensity is None


def test_launches_outside_a_graph_cost_more():
    assert floor(0, 0, "bf16", CEILINGS, launches=10).seconds == pytest.approx(1e-5)
    assert floor(0, 0, "bf16", CEILINGS, launches=10, in_graph=False).seconds == pytest.approx(1e-4)


def test_a_cpu_has_no_graph_and_pays_its_dispatch():
    cpu = some_ceilings(launch_in_graph=None)
    assert floor(0, 0, "bf16", cpu).launch_s == pytest.approx(1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16"])
def test_spellings(dtype):
    assert dtype_name(dtype) == "bf16"
    assert floor(1, 1, dtype, CEILINGS) == floor(1, 1, "bf16", CEILINGS)


def test_an_unmeasured_dtype_is_an_error_with_a_way_out():
    with pytest.raises(HardwareError, match="no matmul rate for int8") as caught:
        floor(1, 1, "int8", CEILINGS)
    assert "cairn calibrate" in caught.value.hint
    assert "bf16, fp32" in caught.value.hint


def test_a_dtype_that_the_device_lacks_gives_the_reason():
    with pytest.raises(HardwareError, match="this chip has no fp8"):
        floor(1, 1, "fp8", CEILINGS)


def test_nothing_measured_at_all():
    with pytest.raises(HardwareError, match="no measured matmul rate") as caught:
        floor(1, 1, "bf16", None)
    assert caught.value.hint == "run `cairn calibrate`"
    with pytest.raises(HardwareError, match="memory bandwidth"):
        floor(1, 1, "bf16", some_ceilings(copy=None))


def test_the_datasheet_only_when_told_and_it_says_so():
    found = floor(1e15, 1, "int8", CEILINGS, datasheet=H200)
    assert found.from_datasheet == ("compute",)
    assert found.seconds == 1e15 / H200.flops_per_s["int8"]
    alone = floor(1, 4.8e12, "bf16", None, datasheet=H200)
    assert alone.from_datasheet == ("memory", "compute")
    assert alone.seconds == 1.0
    assert alone.launch_s == 0


@given(sampled_from(["bf16", "fp32"]), amounts, amounts)
def test_a_measured_ceiling_wins_over_the_datasheet(dtype, flops, bytes_moved):
    with_sheet = floor(flops, bytes_moved, dtype, CEILINGS, datasheet=H200)
    assert with_sheet == floor(flops, bytes_moved, dtype, CEILINGS)


@given(integers(0, 10**18), integers(0, 10**18))
def test_a_floor_survives_json(flops, bytes_moved):
    found = floor(flops, bytes_moved, "bf16", CEILINGS)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Floor) == found
