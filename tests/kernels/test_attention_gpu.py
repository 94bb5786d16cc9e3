"""Attention over packed sequences on a GPU: every implementation against float64, exact on integers, repeatable."""

import functools

import pytest
import torch
from attention_examples import (
    Example,
    bounds,
    check_exactness,
    check_forward,
    check_gradients,
    tensors,
)

from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention import attention_backward, attention_forward, attention_gluon
from cairn.kernels.attention.attention import attention, attention_gradients, attention_reference
from cairn.kernels.attention.attention_problem import checked_problem
from cairn.kernels.cases.attention import Shape, exact, random_inputs
from cairn.kernels.dispatch import capability
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16

RAGGED = (1000, 0, 1, 513, 128, 65, 257)
EXAMPLES = [  # the same numbers of heads everywhere: each pair is compiled for itself
    Example(RAGGED, heads=4, kv_heads=2, width=128, behind=77, fused=True),
    Example(RAGGED, heads=4, kv_heads=2, width=64, behind=1, sinks=True),
    Example(RAGGED, heads=4, kv_heads=2, width=128, rules=dict(causal=False)),
]
TRITON_ONLY = [
    Example((300, 77), heads=4, kv_heads=2, width=96, behind=3, fused=True),
    Example((300, 77), heads=4, kv_heads=2, width=256, behind=3),
    Example(
        (900, 77), heads=4, kv_heads=2, width=128, sinks=True, rules=dict(window=130, softcap=20.0)
    ),
    Example((300, 5, 64, 0), (1000, 3, 64, 20), heads=4, kv_heads=2, width=128),
]


@functools.cache
def hopper() -> bool:
    return capability(torch.device("cuda", 0)) == (9, 0)


def needs_hopper(impl):
    if impl == "gluon" and not hopper():
        pytest.skip("needs compute capability 9.0")


@pytest.fixture
def backward(monkeypatch, request):
    """Which implementation computes gradients."""
    needs_hopper(request.param)
    monkeypatch.setenv("CAIRN_KERNELS", f"attention_backward={request.param}")


@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_forward(example, impl):
    needs_hopper(impl)
    check_forward(example, BF16, "cuda", impl, 1e-2)


@pytest.mark.parametrize("example", TRITON_ONLY, ids=str)
def test_forward_in_triton(example):
    check_forward(example, BF16, "cuda", "triton", 1e-2)


@pytest.mark.parametrize("backward", ["triton", "gluon"], indirect=True)
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_gradients(example, backward):
    check_gradients(example, BF16, "cuda", "triton", 1e-2)


@pytest.mark.parametrize("backward", ["triton"], indirect=True)
@pytest.mark.parametrize("example", TRITON_ONLY, ids=str)
def test_gradients_in_triton(example, backward):
    check_gradients(example, BF16, "cuda", "triton", 1e-2)


@pytest.mark.parametrize("backward", ["triton"], indirect=True)
@pytest.mark.parametrize("example", [EXAMPLES[0], TRITON_ONLY[2]], ids=str)
def test_float32(example, backward):
    check_forward(example, torch.float32, "cuda", "triton", 1e-5)
    check_gradients(example, torch.float32, "cuda", "triton", 1e-5)


@pytest.mark.parametrize("impl", ["auto", "gluon", "triton", "torch"])
@pytest.mark.parametrize("shape", [Shape([512] * 3, 4, 2), Shape([1000] * 2, 4, 2, 64)], ids=str)
def test_equal_lengths(shape, impl):
    """Forward by each, and backward by each from its output and log-sum-exp."""
    needs_hopper(impl)
    x = random_inputs(shape)
    length = shape.lengths[0]
    out, lse = attention(x.q, x.k, x.v, None, max_length=length, return_lse=True, impl=impl)
    truth = exact(x, shape)
    assert relative_error(out, truth[0]) < 1e-2
    problem = checked_problem(x.q, x.k, x.v, None, None, length, None, True, 0, 0.0, None)
    for backward in ("torch", "triton", *(["gluon"] if hopper() else [])):
        grads = attention_gradients(x.dout, x.q, x.k, x.v, None, out, lse, problem, impl=backward)
        assert relative_error(grads[:3], truth[1:]) < 1e-2


def test_ragged_by_torch():
    example = Example((300, 5, 211), heads=4, kv_heads=2, width=128)
    check_forward(example, BF16, "cuda", "torch", 1e-2)


@pytest.mark.parametrize("backward", ["triton"], indirect=True)
@pytest.mark.parametrize("config", attention_forward.FORWARD_CANDIDATES, ids=str)
def test_every_forward_candidate_is_exact_on_integers(config, backward):
    for length in (256, 2048):
        key = attention_forward.forward_key(128, BF16, False, length)
        with trying("attention", key, config):
            check_exactness(2, length, 128, "triton")


@pytest.mark.parametrize("backward", ["triton"], indirect=True)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_exact_at_every_depth_of_the_pipeline(stages, backward):
    forward = attention_forward.forward_key(64, BF16, False, 1024)
    backward = attention_backward.backward_key(64, BF16, False, 1024, True)
    with (
        trying("attention", forward, dict(stages=stages)),
        trying("attention", backward, dict(keys_stages=stages, queries_stages=stages)),
    ):
        check_exactness(3, 1024, 64, "triton")


@pytest.mark.parametrize("backward", ["triton"], indirect=True)
@pytest.mark.parametrize("config", attention_backward.backward_candidates(128), ids=str)
def test_every_backward_candidate(config, backward):
    example = Example(RAGGED, heads=4, kv_heads=2, width=128)
    with trying("attention", attention_backward.backward_key(128, BF16, True, 1000, True), config):
        check_gradients(example, BF16, "cuda", "triton", 1e-2)


@pytest.mark.parametrize("backward", ["triton"], indirect=True)  # cuDNN's is not exact
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_gluon_is_exact_on_integers(width, ping_pong, backward):
    needs_hopper("gluon")
    for sequences, length in ((3, 128), (2, 2048)):
        key = attention_gluon.gluon_key(width, False, length)
        with trying("attention", key, dict(ping_pong=ping_pong)):
            check_exactness(sequences, length, width, "gluon")


@pytest.mark.parametrize("backward", ["gluon"], indirect=True)
@pytest.mark.parametrize("width", [64, 128])
def test_gluon_gradients_are_exact_on_integers(width, backward):
    for sequences, length in ((3, 128), (2, 2048)):
        check_exactness(sequences, length, width, "gluon")


@pytest.mark.parametrize("sections", [True, False])
def test_gluon_computes_every_tile_in_every_order(sections):
    """Fewer tiles than programs, and many times as many."""
    needs_hopper("gluon")
    for lengths in ((64,), (4096, 300, 4000), (128,) * 40):
        example = Example(lengths, heads=4, kv_heads=2, width=128)
        with trying(
            "attention", attention_gluon.gluon_key(128, True, max(lengths)), dict(sections=sections)
        ):
            check_forward(example, BF16, "cuda", "gluon", 1e-2)


@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_no_sequence_sees_another(impl):
    needs_hopper(impl)
    lengths = (200, 300)
    q, k, v = tensors(Example(lengths, width=128), BF16, "cuda")
    for x in (q, k, v):
        x[200:] = torch.nan
    out = attention(q, k, v, bounds(lengths, "cuda"), max_length=300, impl=impl)
    alone, _ = attention_reference(q[:200], k[:200], v[:200], None, max_length=200)
    assert relative_error(out[:200], alone) < 1e-2


@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_the_same_every_time(impl):
    needs_hopper(impl)
    x = random_inputs(Shape(RAGGED, 4, 2, 128))
    problem = checked_problem(x.q, x.k, x.v, x.cu_seqlens, None, 1000, None, True, 0, 0.0, None)

    def run():
        out, lse = attention(
            x.q, x.k, x.v, x.cu_seqlens, max_length=1000, return_lse=True, impl=impl
        )
        return (
            out,
            lse,
            *attention_gradients(x.dout, x.q, x.k, x.v, None, out, lse, problem, impl=impl)[:3],
        )

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_in_a_graph_lengths_may_change(impl):
    """No grid and no launch depends on what cu_seqlens holds."""
    needs_hopper(impl)
    q, k, v = tensors(Example((1024,), heads=4, kv_heads=2, width=128), BF16, "cuda")
    cu, out = bounds((1000, 0, 20), "cuda"), torch.empty_like(q)
    call = functools.partial(attention, q, k, v, cu, max_length=1024, out=out, impl=impl)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ((1, 1, 1), (300, 400, 324), (0, 1024, 0)):
        cu.copy_(bounds(lengths, "cuda"))
        out.fill_(torch.nan)
        graph.replay()
        truth, _ = attention_reference(q, k, v, cu, max_length=1024)
        assert relative_error(out, truth) < 1e-2
