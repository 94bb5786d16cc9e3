"""Rotation, norms of heads and cache writes on a GPU."""

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.layer.rope import CANDIDATES, Heads, Pages, key, rope, rope_reference, rope_table
from cairn.kernels.paged.kv_write import rope_write, write_reference
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 1e-2, F32: 1e-5}


def problem(tokens, q, kv, size, dtype=BF16, normed=True, plus_one=False):
    qkv = torch.randn(tokens, (q + 2 * kv) * size, device="cuda").to(dtype)
    weights = torch.randn(2, size, device="cuda").to(dtype)
    heads = Heads(q, kv, *(weights if normed else (None, None)), plus_one=plus_one)
    frequencies = 1e6 ** -(torch.arange(size // 2, device="cuda") / (size // 2))
    table = rope_table(frequencies, 1000)
    return qkv, heads, table, torch.randint(0, 1000, (tokens,), device="cuda")


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((1003, 32, 8, 128), BF16, {}),
        ((64, 9, 3, 64), BF16, dict(normed=False)),
        ((33, 8, 4, 256), BF16, dict(plus_one=True)),
        ((17, 4, 4, 96), F32, {}),
        ((1, 14, 2, 64), F32, dict(normed=False)),
    ],
)
def test_forward_and_gradients(shape, dtype, options):
    qkv, heads, table, positions = problem(*shape, dtype=dtype, **options)
    normed = heads.q_weight is not None
    leaves = [qkv, heads.q_weight, heads.k_weight] if normed else [qkv]
    found = []
    for _ in range(2):
        tracked = [leaf.clone().requires_grad_() for leaf in leaves]
        mine = heads._replace(q_weight=tracked[1], k_weight=tracked[2]) if normed else heads
        outputs = rope(tracked[0], mine, table, positions, impl="triton")
        torch.manual_seed(0)
        grads = [torch.randn_like(one) for one in outputs]
        torch.autograd.backward(outputs, grads)
        found.append([*outputs, *(leaf.grad for leaf in tracked)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # in every run
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    exact_heads = heads._replace(q_weight=wide[1], k_weight=wide[2]) if normed else heads
    exact = rope_reference(wide[0], exact_heads, table, positions)
    torch.autograd.backward(exact, [grad.double() for grad in grads])
    for one, other in zip(found[0], [*exact, *(leaf.grad for leaf in wide)], strict=True):
        assert relative_error(one, other) < TOLERANCE[dtype]


def test_without_prefetch_few_rows_have_the_bits_of_many():
    qkv, heads, table, positions = problem(4096, 16, 8, 128)
    whole, few = (torch.empty(2, 64, 64, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
    slots = torch.arange(4096, device="cuda", dtype=torch.int32)
    q = rope_write(qkv, heads, table, positions, Pages(slots, *whole))
    for rows in (slice(0, 1), slice(1, 1024), slice(1024, 2304), slice(2304, 4096)):
        pages = Pages(slots[rows].contiguous(), *few)
        assert torch.equal(rope_write(qkv[rows], heads, table, positions[rows], pages), q[rows])
    assert torch.equal(few, whole)


@pytest.mark.parametrize("scales", [0, 1, 8])
@pytest.mark.parametrize("kind", [BF16, FP8])
def test_write(kind, scales):
    if scales and kind == BF16:
        pytest.skip("only fp8 has scales")
    qkv, heads, table, positions = problem(777, 32, 8, 128)
    slots = torch.randperm(50 * 16, device="cuda")[:777]
    slots[::7] = -1
    factors = (
        [torch.rand(scales, device="cuda") + 0.05 for _ in range(2)] if scales else [None, None]
    )

    def caches():
        both = torch.zeros(50, 2, 16, 8, 128, device="cuda").to(kind)
        return both[:, 0], both[:, 1]

    found, wanted = Pages(slots, *caches(), *factors), Pages(slots, *caches(), *factors)
    q = rope_write(qkv, heads, table, positions, found, impl="triton")
    new_q, k, v = rope(qkv, heads, table, positions, impl="triton")
    write_reference(k, v, wanted)
    # The squares of a head may be added in another order, which moves a few values to their neighbours.
    assert relative_error(q, new_q) < 2e-3
    assert relative_error(found.cache_k, wanted.cache_k) < 4e-3
    assert torch.equal(found.cache_v.float(), wanted.cache_v.float())
    assert torch.equal(found.cache_k.float().any(-1), wanted.cache_k.float().any(-1))


@pytest.mark.parametrize("how", CANDIDATES)
def test_every_candidate(how):
    qkv, heads, table, positions = problem(301, 32, 8, 128)
    cache = torch.zeros(2, 20, 16, 8, 128, dtype=BF16, device="cuda")
    pages = Pages(torch.arange(301, device="cuda"), cache[0], cache[1])
    out = torch.empty(301, 32, 128, dtype=BF16, device="cuda")
    poison(out)
    with trying("kv_write", key(128, BF16), how):
        rope_write(qkv, heads, table, positions, pages, out=out, impl="triton")
        in_place = rope_write(
            qkv.clone(), heads, table, positions, pages, in_place=True, impl="triton"
        )
    exact = rope_reference(qkv.double(), heads, table, positions)
    assert relative_error(out, exact[0]) < 1e-2
    assert torch.equal(in_place, out)
    assert relative_error(cache[0].view(-1, 8, 128)[:301], exact[1]) < 1e-2
    assert torch.equal(cache[1].view(-1, 8, 128)[:301], exact[2].to(BF16))
    assert not cache[0].view(-1, 8, 128)[301:].any()


def test_padding_inside_a_cuda_graph():
    qkv, heads, table, positions = problem(32, 32, 8, 128)
    cache = torch.zeros(2, 4, 16, 8, 128, dtype=BF16, device="cuda")
    slots = torch.full((32,), -1, device="cuda")
    pages, out = (
        Pages(slots, cache[0], cache[1]),
        torch.empty(32, 32, 128, dtype=BF16, device="cuda"),
    )
    rope_write(qkv, heads, table, positions, pages, out=out, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope_write(qkv, heads, table, positions, pages, out=out, impl="triton")
    graph.replay()
    assert not cache.any()
    slots[:3] = torch.tensor([5, 63, 0], device="cuda")
    graph.replay()
    assert cache[0].view(-1, 8, 128).any(dim=(1, 2)).nonzero().flatten().tolist() == [0, 5, 63]
