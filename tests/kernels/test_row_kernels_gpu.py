"""Norms, activations, quantisation, embedding and page moves on a GPU: right, odd shapes, the same in every run."""

import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.layer.activation import (
    gated_activation,
    gated_activation_fp8,
    gated_activation_reference,
)
from cairn.kernels.layer.embedding import embedding, embedding_backward
from cairn.kernels.norm.layernorm import layernorm, layernorm_reference
from cairn.kernels.norm.rmsnorm import add_rmsnorm, add_rmsnorm_fp8, rmsnorm, rmsnorm_reference
from cairn.kernels.norm.rows import candidates, key
from cairn.kernels.paged.kv_blocks import copy_blocks, swap_blocks
from cairn.kernels.quantize.nf4 import dequantize_nf4, dequantize_nf4_reference, quantize_nf4
from cairn.kernels.quantize.quantize import dequantize, quantize, quantize_reference
from cairn.kernels.quantize.quantize_tensor import quantize_tensor, quantize_tensor_reference
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 1e-2, F32: 1e-5}


def random(*shape, dtype=BF16):
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize(("rows", "columns", "dtype"), [
    (1, 4096, BF16), (4097, 4096, BF16), (33, 1000, BF16), (7, 5120, F32), (3, 1, F32), (5, 16384, BF16),
])  # fmt: skip
def test_rmsnorm(rows, columns, dtype):
    x, weight = random(rows, columns, dtype=dtype), random(columns, dtype=dtype)
    out = torch.empty_like(x)
    poison(out)
    rmsnorm(x, weight, out=out, impl="triton")
    assert (
        relative_error(out, rmsnorm_reference(x.double(), weight.double(), 1e-6)) < TOLERANCE[dtype]
    )
    assert torch.equal(rmsnorm(x, weight, impl="triton"), out)
    assert torch.equal(rmsnorm(x[-1:], weight, impl="triton"), out[-1:])  # whatever the batch


@pytest.mark.parametrize("how", candidates(4096))
def test_every_candidate_layout(how):
    x, residual, weight = random(999, 4096), random(999, 4096), random(4096)
    with trying("rmsnorm", key("add", 4096, BF16), how):
        y, total = add_rmsnorm(x, residual, weight, impl="triton")
    assert torch.equal(total, x + residual)
    assert relative_error(y, rmsnorm_reference(total.double(), weight.double(), 1e-6)) < 1e-2


def test_fused_forms_equal_their_parts():
    x, residual, weight = random(513, 2048), random(513, 2048), random(2048)
    y, _ = add_rmsnorm(x, residual, weight, impl="triton")
    stored, total = add_rmsnorm_fp8(x, residual, weight, impl="triton")
    assert torch.equal(total, x + residual)
    # A row's squares may be added in another order, which moves a few values to their neighbours.
    assert relative_error(stored, quantize(y, impl="triton")) < 2e-3


@pytest.mark.parametrize(("rows", "columns", "dtype"), [(2049, 4096, BF16), (77, 1000, F32)])
def test_norm_gradients(rows, columns, dtype):
    for norm, reference in ((rmsnorm, rmsnorm_reference), (layernorm, layernorm_reference)):
        with_bias = norm is layernorm
        leaves = [random(rows, columns, dtype=dtype), random(columns, dtype=dtype)]
        leaves += [random(columns, dtype=dtype)] if with_bias else []
        grad = random(rows, columns, dtype=dtype)
        found = []
        for _ in range(2):
            tracked = [leaf.clone().requires_grad_() for leaf in leaves]
            norm(*tracked, eps=1e-5, impl="triton").backward(grad)
            found.append([leaf.grad for leaf in tracked])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # in every run
        wide = [leaf.double().requires_grad_() for leaf in leaves]
        reference(*wide, eps=1e-5).backward(grad.double())
        for one, leaf in zip(found[0], wide, strict=True):
            assert relative_error(one, leaf.grad) < TOLERANCE[dtype]


def test_residual_gradients():
    leaves = [random(1025, 2048), random(1025, 2048), random(2048)]
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = [random(1025, 2048), random(1025, 2048)]
    torch.autograd.backward(add_rmsnorm(*tracked, impl="triton"), grads)
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    total = wide[0] + wide[1]
    exact = (rmsnorm_reference(total, wide[2], 1e-6), total)
    torch.autograd.backward(exact, [grad.double() for grad in grads])
    for one, leaf in zip(tracked, wide, strict=True):
        assert relative_error(one.grad, leaf.grad) < 1e-2


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_activations(kind):
    x, grad = random(1001, 2 * 3000).requires_grad_(), random(1001, 3000)
    y = gated_activation(x, activation=kind, impl="triton")
    y.backward(grad)
    wide = x.detach().double().requires_grad_()
    exact = gated_activation_reference(*wide.chunk(2, dim=-1), kind)
    exact.backward(grad.double())
    assert relative_error(y, exact) < 1e-2
    assert relative_error(x.grad, wide.grad) < 1e-2
    stored = gated_activation_fp8(x.detach(), activation=kind, impl="triton")
    assert relative_error(stored, quantize(y.detach(), impl="triton")) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(3, 4096), (1000, 3001)])
def test_quantize_to_the_bit(shape, dtype):
    x = random(*shape) * 30
    x[1] = 0
    found = quantize(x, dtype, impl="triton")
    assert relative_error(found, quantize_reference(x, dtype)) == 0
    assert relative_error(dequantize(found, BF16, impl="triton"), x) < 0.05


def test_quantize_tensor_to_the_bit():
    x = random(1023, 4096)
    found = quantize_tensor(x, impl="triton")
    assert relative_error(found, quantize_tensor_reference(x)) == 0
    given = quantize_tensor(2 * x, found.scale, impl="triton")
    assert relative_error(given, quantize_tensor_reference(2 * x, found.scale)) == 0


def test_nf4_to_the_bit():
    packed = quantize_nf4(random(1023, 4097))
    found = dequantize_nf4(packed, BF16, impl="triton")
    assert torch.equal(found, dequantize_nf4_reference(packed, BF16))


def test_embedding():
    tokens = torch.randint(0, 500, (4000,), device="cuda").square() // 500  # small ones more often
    weight = random(500, 1000).requires_grad_()
    embedding(tokens, weight, impl="triton").backward(grad := random(4000, 1000))
    wide = weight.detach().double().requires_grad_()
    F.embedding(tokens, wide).backward(grad.double())
    assert torch.equal(embedding(tokens, weight, impl="triton"), F.embedding(tokens, weight))
    assert relative_error(weight.grad, wide.grad) < 1e-2
    again = embedding_backward(grad, tokens, 500, BF16, impl="triton")
    assert torch.equal(again, weight.grad)


def test_pages_within_the_gpu_and_to_the_host():
    cache = random(6, 40, 16, 4, 64)
    wanted = cache.clone()
    pairs = torch.tensor([[0, 39], [-1, 3], [7, 20]], device="cuda")
    wanted[:, [39, 20]] = cache[:, [0, 7]]
    copy_blocks(cache, pairs, impl="triton")
    assert torch.equal(cache, wanted)
    host = torch.zeros(5, 6, 16, 4, 64, dtype=BF16, pin_memory=True).transpose(0, 1)
    away = torch.tensor([[39, 0], [7, 4]], device="cuda")
    swap_blocks(cache, host, away, impl="triton")
    back = torch.zeros_like(cache)
    swap_blocks(host, back, away.flip(1).contiguous(), impl="triton")
    torch.cuda.synchronize()
    assert torch.equal(host[:, [0, 4]].cuda(), cache[:, [39, 7]])
    assert torch.equal(back[:, [39, 7]], cache[:, [39, 7]])


def test_inside_a_cuda_graph():
    x, weight, out = (
        random(64, 4096),
        random(4096),
        torch.empty(64, 4096, dtype=BF16, device="cuda"),
    )
    rmsnorm(x, weight, out=out, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rmsnorm(x, weight, out=out, impl="triton")
    x.normal_()
    graph.replay()
    assert torch.equal(out, rmsnorm(x, weight, impl="triton"))
