"""The interpreter itself: what stock Triton 3.6 gets wrong comes out as it does on a GPU."""

import cairn.kernels.interpret as interpret  # isort: skip  before anything that imports triton

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.core.errors import ConfigError
from cairn.kernels.interpreter.narrow_floats import narrow, widen


@triton.jit
def _matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=3, warp_specialize=False):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    c.store([row, column], total.to(c.dtype))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
)
def test_matmul_with_host_descriptors(dtype):
    a, b = torch.randn(70, 48).to(dtype), torch.randn(48, 40).to(dtype)
    a, b = torch.nn.functional.pad(a.float(), (0, 16)).to(dtype), b.contiguous()
    b = torch.cat([b.float(), torch.zeros(16, 40)]).to(dtype)
    if dtype == torch.float8_e4m3fn:
        b = torch.nn.functional.pad(b.float(), (0, 8)).to(dtype)  # rows of 16 bytes
    columns = b.shape[1]
    c = torch.full((70, columns), float("nan"), dtype=torch.bfloat16)
    tiles = [
        TensorDescriptor.from_tensor(t, s) for t, s in ((a, [32, 32]), (b, [32, 32]), (c, [32, 32]))
    ]
    _matmul[3, 2](*tiles, 70, columns, 64, 32, 32, 32)
    exact = a.double() @ b.double()
    assert (c.double() - exact).norm() / exact.norm() < 4e-3


@triton.jit
def _round_trip(x, bf16, e4m3, e5m2, back, N: tl.constexpr):
    place = tl.arange(0, N)
    value = tl.load(x + place)
    eight = value.to(tl.float8e4nv)
    tl.store(bf16 + place, value.to(tl.bfloat16))
    tl.store(e4m3 + place, eight)
    tl.store(e5m2 + place, value.to(tl.float8e5))
    tl.store(back + place, eight.to(tl.bfloat16) * tl.full([N], 2.0, tl.bfloat16))


def test_conversions_round_to_nearest_and_saturate():
    x = torch.cat(
        [torch.randn(500) * 300, torch.tensor([1e9, -1e9, 0.0, -0.0, 448.0, 1e-4]), torch.randn(6)]
    )
    outputs = [
        torch.empty(512, dtype=d) for d in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    ]
    back = torch.empty(512, dtype=torch.bfloat16)
    _round_trip[(1,)](x, *outputs, back, 512)
    for output in outputs:
        largest = torch.finfo(output.dtype).max
        assert torch.equal(output.float(), x.clamp(-largest, largest).to(output.dtype).float())
    assert torch.equal(back.float(), outputs[1].float() * 2)


@given(st.floats(width=32, allow_infinity=False))
def test_bfloat16_is_torchs(value):
    mine = widen(narrow(np.array([value], dtype=np.float32), tl.bfloat16), tl.bfloat16)
    theirs = torch.tensor([value]).bfloat16().float().numpy()
    np.testing.assert_array_equal(mine, theirs)


def test_bfloat16_can_truncate():
    bits = narrow(np.array([1.0 + 2**-8 + 2**-9], dtype=np.float32), tl.bfloat16, truncate=True)
    assert widen(bits, tl.bfloat16)[0] == 1.0


@triton.jit
def _better(value_a, place_a, value_b, place_b):
    first = value_a >= value_b
    return tl.where(first, value_a, value_b), tl.where(first, place_a, place_b)


@triton.jit
def _last(a, b):
    return b  # associative, not commutative


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _collect(x, values, places, N: tl.constexpr):
    place = tl.arange(0, N)
    x_N = tl.load(x + place)
    tl.store(values + place, tl.sort(x_N))
    tl.store(values + N + place, tl.cumsum(x_N, 0))
    tl.store(values + 2 * N + place, tl.associative_scan(x_N, 0, _plus, reverse=True))
    tl.store(values + 3 * N + place, tl.softmax(x_N.to(tl.float32)))
    _, best = tl.max(x_N, 0, return_indices=True)
    _, same = tl.reduce((x_N, place), 0, _better)
    tl.store(places, best)
    tl.store(places + 1, same)
    tl.store(places + 2, tl.argmin(x_N, 0))
    tl.store(places + 3, tl.reduce(place, 0, _last))
    tl.store(places + 4 + tl.arange(0, 4), tl.histogram(place % 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sort_scan_reduce_histogram(dtype):
    x = (torch.randperm(64) - 32).to(dtype)  # sums of integers are exact in both
    values, places = torch.empty(4, 64), torch.empty(8, dtype=torch.int32)
    _collect[(1,)](x, values, places, 64)
    exact = x.float()
    assert torch.equal(values[0], exact.sort().values)
    assert torch.allclose(values[1], exact.cumsum(0), rtol=1e-2, atol=2)
    assert torch.allclose(values[2], exact.flip(0).cumsum(0).flip(0), rtol=1e-2, atol=2)
    assert torch.allclose(values[3], exact.softmax(0), atol=1e-6)
    assert places.tolist() == [exact.argmax(), exact.argmax(), exact.argmin(), 63, 16, 16, 16, 16]


@triton.jit
def _reduce_rows(x, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tile = tl.load(x + place[:, None] * N + place[None, :])
    tl.store(out + place, tl.max(tile, 1))
    tl.store(out + N + place, tl.sum(tile, axis=0))
    tl.store(out + 2 * N + place, tl.reduce(tile, 1, _plus, keep_dims=True).reshape(N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_along_either_axis(dtype):
    x = torch.randint(-8, 8, (16, 16)).to(dtype)
    out = torch.empty(3, 16)
    _reduce_rows[(1,)](x, out, 16)
    exact = x.float()
    assert torch.equal(out, torch.stack([exact.amax(1), exact.sum(0), exact.sum(1)]))


@triton.jit
def _functions(x, out, device_sum, N: tl.constexpr):
    place = tl.arange(0, N)
    value = tl.load(x + place)
    tl.store(out + place, libdevice.tanh(value))
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1
    )
    tl.store(out + N + place, power)
    tl.store(out + 2 * N + place, tl.maximum(value, float("nan")))
    nothing = tl.full([N], float("nan"), tl.float32)
    tl.store(out + 3 * N + place, tl.clamp(nothing, -1.0, 1.0))
    passed = tl.clamp(nothing, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + 4 * N + place, passed)
    tile = tl.make_tensor_descriptor(device_sum, shape=[8, 8], strides=[8, 1], block_shape=[4, 8])
    tile.atomic_add([4, 0], tl.full([4, 8], 1.5, device_sum.dtype.element_ty))
    tl.atomic_add(device_sum + tl.arange(0, 4) * 0, tl.full([4], 0.5, device_sum.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_libdevice_assembly_and_atomics(dtype):
    x, out, total = torch.randn(16), torch.empty(5, 16), torch.zeros(8, 8, dtype=dtype)
    _functions[(2,)](x, out, total, 16)
    assert torch.allclose(out[:2], torch.stack([x.tanh(), x.exp2()]))
    assert torch.equal(out[2], x), "the maximum with NaN is the number"
    assert torch.equal(out[3], torch.full((16,), -1.0))
    assert out[4].isnan().all()
    assert (total[0, 0], total[5, 3], total[3, 0]) == (4.0, 3.0, 0.0)


@triton.jit
def _loop(out, steps, scale, flag):
    total = 0.0
    for step in range(steps):
        far = step.to(tl.int64) * 2  # a loop variable is a tensor
        total += far.to(tl.float32) * scale.to(tl.float32)
    if flag:
        total = -total
    tl.device_assert(steps < 10, "too many steps")
    tl.store(out, total)


def test_loop_variables_and_arguments_are_tensors():
    out = torch.empty(1)
    _loop[(1,)](out, 4, 0.5, True)
    assert out.item() == -6.0


def test_a_device_assertion_raises():
    with pytest.raises(AssertionError, match="too many steps"):
        _loop[(1,)](torch.empty(1), 11, 0.5, False)


@triton.jit
def _copy(source, target, start, N: tl.constexpr):
    place = start + tl.arange(0, N)
    tl.store(target + place, tl.load(source + place), mask=place < 12)


def test_a_stray_pointer_is_an_error_that_names_the_tensor():
    source, target = torch.arange(16.0), torch.zeros(12)
    _copy[(1,)](source, target, 0, 16)
    assert torch.equal(target, source[:12])
    with pytest.raises(interpret.OutOfBounds, match="element 16 of source, which has 16"):
        _copy[(1,)](source, target, 8, 16)


@triton.jit
def _follow(addresses, out):
    pointer = tl.load(addresses).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(pointer))


def test_tensors_behind_addresses_can_be_named():
    hidden, out = torch.tensor([7.0]), torch.empty(1)
    addresses = torch.tensor([hidden.data_ptr()])
    with pytest.raises(interpret.OutOfBounds):
        _follow[(1,)](addresses, out)
    with interpret.reachable(hidden=hidden):
        _follow[(1,)](addresses, out)
    assert out.item() == 7.0


@triton.autotune([triton.Config({"N": 16}), triton.Config({"N": 32})], key=[])
@triton.jit
def _tuned_copy(source, target, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(target + place, tl.load(source + place))


def test_an_autotuner_takes_its_first_configuration():
    source, target = torch.randn(32), torch.zeros(32)
    _tuned_copy[(1,)](source, target)
    assert torch.equal(target, torch.cat([source[:16], torch.zeros(16)]))


def test_infinities_and_divisions_are_quiet():
    @triton.jit
    def odd(x, out, N: tl.constexpr):
        place = tl.arange(0, N)
        value = tl.load(x + place)
        tl.store(out + place, tl.exp(value - tl.max(value, 0)) / tl.sum(value * 0, 0))

    out = torch.empty(4)
    odd[(1,)](torch.full((4,), -float("inf")), out, 4)
    assert out.isnan().all()


def test_it_refuses_to_come_late():
    import subprocess
    import sys

    code = (
        "import os; os.environ.pop('TRITON_INTERPRET', 0); import triton, cairn.kernels.interpret"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ConfigError.__name__ in done.stderr
    assert "triton was imported before" in done.stderr
