"""Rotary positions with norms and cache writes, forward and backward, in the interpreter."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.layer.rope import Heads, Pages, key, rope, rope_reference, rope_table
from cairn.kernels.layer.rope_backward import rope_backward
from cairn.kernels.paged.kv_write import rope_write, write_reference
from cairn.kernels.tuned import trying

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 1e-2, F32: 1e-5}


def problem(tokens=5, q=3, kv=2, size=16, dtype=F32, normed=True, plus_one=False):
    qkv = torch.randn(tokens, (q + 2 * kv) * size).to(dtype)
    weights = torch.randn(2, size).to(dtype) if normed else (None, None)
    table = rope_table(100.0 ** -(torch.arange(size // 2) / (size // 2)), 50, amplitude=1.1)
    positions = torch.randint(0, 50, (tokens,))
    return qkv, Heads(q, kv, weights[0], weights[1], 1e-6, plus_one), table, positions


def exact(qkv, heads, table, positions):
    """In float64."""
    wide = heads
    if heads.q_weight is not None:
        wide = heads._replace(q_weight=heads.q_weight.double(), k_weight=heads.k_weight.double())
    return rope_reference(qkv.double(), wide, table, positions)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("config", [
    dict(), dict(normed=False), dict(plus_one=True), dict(tokens=1, q=1, kv=1, size=6), dict(tokens=0),
    dict(tokens=9, q=4, kv=4, size=24),
])  # fmt: skip
def test_forward(config, dtype):
    qkv, heads, table, positions = problem(dtype=dtype, **config)
    found = rope(qkv, heads, table, positions, impl="triton")
    assert relative_error(found, exact(qkv, heads, table, positions)) < TOLERANCE[dtype]


def test_without_positions_and_without_a_table():
    qkv, heads, table, _ = problem(tokens=7)
    found = rope(qkv, heads, table, impl="triton")
    assert relative_error(found, exact(qkv, heads, table, torch.arange(7))) < 1e-5
    found = rope(qkv, heads, None, impl="triton")
    assert relative_error(found, exact(qkv, heads, None, None)) < 1e-5


def test_projection_inside_a_wider_tensor():
    qkv, heads, table, positions = problem(tokens=4)
    wide = torch.cat((qkv, torch.randn(4, 32)), dim=1)
    found = rope(wide[:, : qkv.shape[1]], heads, table, positions, impl="triton")
    assert all(
        torch.equal(a, b)
        for a, b in zip(found, rope(qkv, heads, table, positions, impl="triton"), strict=True)
    )


def caches(dtype, pages=6, size=4, kv=2, head=16):
    both = torch.zeros(pages, 2, size, kv, head).to(dtype)  # k and v of a page side by side
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("scales", [None, 1, 2])
@pytest.mark.parametrize("kind", [BF16, FP8])
@pytest.mark.parametrize("normed", [True, False])
def test_write(normed, kind, scales):
    if scales is not None and kind != FP8:
        pytest.skip("only fp8 has scales")
    qkv, heads, table, positions = problem(tokens=6, dtype=BF16, normed=normed)
    slots = torch.tensor([3, -1, 20, 4, -1, 0])
    factors = [None, None] if scales is None else [torch.rand(scales) + 0.05 for _ in range(2)]
    found, wanted = Pages(slots, *caches(kind), *factors), Pages(slots, *caches(kind), *factors)
    q = rope_write(qkv, heads, table, positions, found, impl="triton")
    new_q, k, v = rope(qkv, heads, table, positions, impl="triton")
    write_reference(k, v, wanted)
    assert torch.equal(q, new_q)
    assert torch.equal(found.cache_k.float(), wanted.cache_k.float())
    assert torch.equal(found.cache_v.float(), wanted.cache_v.float())
    assert found.cache_k.float().abs().sum(dim=(-1, -2)).nonzero().tolist() == [
        [0, 0],
        [0, 3],
        [1, 0],
        [5, 0],
    ]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_write_in_place_and_beside(rows):
    qkv, heads, table, positions = problem(tokens=6, dtype=BF16)
    slots = torch.arange(6, dtype=torch.int32)
    out, keys = torch.empty(6, 3, 16, dtype=BF16), torch.empty(6, 2, 16, dtype=BF16)
    poison(out, keys)
    pages = Pages(slots, *caches(BF16))
    with trying("kv_write", key(16, BF16), {"rows": rows, "warps": 1}):
        rope_write(qkv, heads, table, positions, pages, out=out, k_out=keys, impl="triton")
        before = qkv.clone()
        q = rope_write(
            qkv, heads, table, positions, pages, in_place=True, prefetch=True, impl="triton"
        )
    assert torch.equal(q, out)
    assert q.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, 48:], before[:, 48:])  # k and v of the projection stay
    assert torch.equal(pages.cache_k.reshape(-1, 2, 16)[:4], keys[:4])


def test_all_padding_writes_nothing():
    qkv, heads, table, positions = problem(tokens=3)
    pages = Pages(torch.full((3,), -1), *caches(F32))
    rope_write(qkv, heads, table, positions, pages, impl="triton")
    assert not pages.cache_k.any()
    assert not pages.cache_v.any()


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("config", [
    dict(), dict(normed=False), dict(plus_one=True), dict(tokens=1, q=1, kv=1, size=6), dict(tokens=30, q=4, kv=1),
])  # fmt: skip
def test_gradients(config, dtype):
    qkv, heads, table, positions = problem(dtype=dtype, **config)
    leaves = [qkv] if heads.q_weight is None else [qkv, heads.q_weight, heads.k_weight]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    tracked = [heads, heads]
    if len(leaves) == 3:
        tracked = [heads._replace(q_weight=some[1], k_weight=some[2]) for some in (leaves, wide)]
    outputs = rope(leaves[0], tracked[0], table, positions, impl="triton")
    grads = [torch.randn(one.shape).to(dtype) for one in outputs]
    torch.autograd.backward(outputs, grads)
    truth = rope_reference(wide[0], tracked[1], table, positions)
    torch.autograd.backward(truth, [grad.double() for grad in grads])
    for found, wanted in zip(leaves, wide, strict=True):
        assert relative_error(found.grad, wanted.grad) < TOLERANCE[dtype]
    plain = rope_backward(*grads, qkv, heads, table, positions, impl="reference")
    for found, wanted in zip(plain, wide, strict=False):
        assert relative_error(found, wanted.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("normed", [True, False])
def test_gradients_in_place(normed):
    """Where attention left them side by side, the same numbers come out, in the same memory."""
    qkv, heads, table, positions = problem(normed=normed)
    size = qkv.shape[1] // (heads.q + 2 * heads.kv)
    joined = torch.randn(len(qkv), heads.q + 2 * heads.kv, size)
    apart = joined.clone().split([heads.q, heads.kv, heads.kv], dim=1)
    wanted = rope_backward(*apart, qkv, heads, table, positions, impl="triton")
    parts = joined.split([heads.q, heads.kv, heads.kv], dim=1)
    found = rope_backward(*parts, qkv, heads, table, positions, impl="triton", in_place=True)
    assert found[0].data_ptr() == joined.data_ptr()
    for one, other in zip(found, wanted, strict=True):
        assert one is other is None or relative_error(one, other.double()) < 1e-6
    lonely = [part.clone() for part in apart]
    elsewhere = rope_backward(*lonely, qkv, heads, table, positions, impl="triton", in_place=True)
    assert torch.equal(elsewhere[0], wanted[0])
    assert all(torch.equal(*pair) for pair in zip(lonely, apart, strict=True))


def test_gradient_through_v_alone():
    qkv, heads, table, positions = problem(normed=False)
    qkv.requires_grad_()
    rope(qkv, heads, table, positions, impl="triton")[2].sum().backward()
    assert torch.equal(qkv.grad, torch.cat((torch.zeros(5, 80), torch.ones(5, 32)), dim=1))
