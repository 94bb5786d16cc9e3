"""References of the memory-bound kernels against torch, transformers and our own model; and wrong arguments."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from cairn.core.errors import HardwareError
from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.arguments import as_rows
from cairn.kernels.layer.activation import gated_activation, gated_activation_fp8, geglu, swiglu
from cairn.kernels.layer.activation_backward import gated_activation_backward
from cairn.kernels.layer.embedding import embedding, embedding_backward
from cairn.kernels.norm.layernorm import layernorm
from cairn.kernels.norm.rmsnorm import add_rmsnorm, add_rmsnorm_fp8, rmsnorm, rmsnorm_fp8
from cairn.kernels.norm.rows import Layout, candidates, default_layout, width
from cairn.kernels.paged.kv_blocks import copy_blocks, swap_blocks
from cairn.kernels.quantize.quantize import Quantized, dequantize, quantize
from cairn.kernels.quantize.quantize_tensor import quantize_tensor
from cairn.models.build import ModelBuild
from cairn.models.layers import Norm
from cairn.models.spec import ModelSpec

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


class TestReferences:
    def test_rmsnorm(self):
        x, weight = torch.randn(6, 40), torch.randn(40)
        assert relative_error(rmsnorm(x, weight, 1e-5), F.rms_norm(x, (40,), weight, 1e-5)) < 1e-6

    @pytest.mark.parametrize("plus_one", [False, True])
    def test_rmsnorm_is_the_model_s_to_the_bit(self, plus_one):
        spec = SimpleNamespace(norm="rms", norm_eps=1e-6, norm_plus_one=plus_one)
        norm = Norm(ModelBuild("cpu", BF16), cast(ModelSpec, spec), 64)
        norm.weight.data.normal_()
        x = torch.randn(9, 64).to(BF16)
        assert torch.equal(rmsnorm(x, norm.weight, 1e-6, plus_one=plus_one), norm(x))

    def test_residual(self):
        x, residual = torch.randn(2, 5, 32).to(BF16)
        weight = torch.randn(32).to(BF16)
        y, total = add_rmsnorm(x, residual, weight)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, rmsnorm(x + residual, weight))
        stored, total = add_rmsnorm_fp8(x, residual, weight)
        assert relative_error(stored, quantize(y)) == 0
        assert torch.equal(total, x + residual)

    def test_layernorm(self):
        x, weight, bias = torch.randn(6, 40), torch.randn(40), torch.randn(40)
        for b in (bias, None):
            wanted = F.layer_norm(x, (40,), weight, b)
            assert relative_error(layernorm(x, weight, b), wanted) < 1e-6

    def test_activations(self):
        gate, up = torch.randn(2, 4, 30)
        both = torch.cat((gate, up), dim=-1)
        assert relative_error(swiglu(both), F.silu(gate) * up) < 1e-6
        assert relative_error(geglu(both), F.gelu(gate, approximate="tanh") * up) < 1e-6
        assert relative_error(geglu(gate, up, tanh=False), F.gelu(gate) * up) < 1e-6

    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
    def test_activation_gradients(self, kind):
        x = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
        gate, up = x.chunk(2, dim=-1)
        act = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        }[kind]
        grad = torch.randn(3, 10, dtype=torch.float64)
        (act(gate) * up).backward(grad)
        narrow = x.detach().float()
        found, _ = gated_activation_backward(grad.float(), narrow, activation=kind)
        assert relative_error(found, x.grad) < 1e-5

    def test_fp8_and_int8(self):
        x = torch.randn(5, 64) * torch.tensor([0.0, 1e-20, 1.0, 100.0, 1e4])[:, None]
        for dtype, error in ((FP8, 0.04), (torch.int8, 0.01)):
            found = quantize(x, dtype)
            assert found.scale.shape == (5, 1)
            assert relative_error(dequantize(found, torch.float32), x) < error
            assert found.scale[0] > 0
        found = quantize_tensor(x)
        assert float(found.values.float().abs().max()) == 448
        assert relative_error(dequantize(found, torch.float32), x) < 0.04

    def test_embedding(self):
        weight = torch.randn(20, 8, requires_grad=True)
        tokens = torch.randint(0, 20, (3, 5))
        assert torch.equal(embedding(tokens, weight), F.embedding(tokens, weight))
        grad = torch.randn(3, 5, 8)
        F.embedding(tokens, weight).backward(grad)
        assert (
            relative_error(embedding_backward(grad, tokens, 20, torch.float32), weight.grad) < 1e-6
        )

    def test_pages(self):
        cache = torch.randn(2, 5, 4, 2, 8)
        wanted = cache.clone()
        wanted[:, 4] = cache[:, 0]
        copy_blocks(cache, torch.tensor([[0, 4], [-1, 2]]))
        assert torch.equal(cache, wanted)


WRONG = {
    "x: wanted float32": lambda: rmsnorm(torch.ones(2, 4).int(), torch.ones(4)),
    "weight: wanted shape [4]": lambda: rmsnorm(torch.ones(2, 4), torch.ones(5)),
    "weight: wanted float32": lambda: rmsnorm(torch.ones(2, 4), torch.ones(4).long()),
    "residual: wanted shape [2, 4]": lambda: add_rmsnorm(
        torch.ones(2, 4), torch.ones(2, 3), torch.ones(4)
    ),
    "out: wanted shape [2, 4]": lambda: rmsnorm(
        torch.ones(2, 4), torch.ones(4), out=torch.ones(2, 3)
    ),
    "out: wanted float32": lambda: rmsnorm(
        torch.ones(2, 4), torch.ones(4), out=torch.ones(2, 4).half()
    ),
    "out.values: wanted float8_e4m3fn": lambda: rmsnorm_fp8(
        torch.ones(2, 4), torch.ones(4), out=Quantized(torch.ones(2, 4), torch.ones(2, 1))
    ),
    "out.scale: wanted shape [2, 1]": lambda: quantize(
        torch.ones(2, 4), out=Quantized(torch.ones(2, 4).to(FP8), torch.ones(2))
    ),
    "bias: wanted shape [4]": lambda: layernorm(torch.ones(2, 4), torch.ones(4), torch.ones(1)),
    "x: wanted stride 1": lambda: quantize(torch.ones(4, 4).t()),
    "dtype: wanted float8_e4m3fn or int8": lambda: quantize(torch.ones(2, 4), torch.int16),
    "scale: wanted one element": lambda: quantize_tensor(torch.ones(2, 4), torch.ones(2)),
    "x: wanted a contiguous tensor": lambda: quantize_tensor(torch.ones(4, 4)[:, :2]),
    "scale: wanted one element or shape [2, 1]": lambda: dequantize(
        Quantized(torch.ones(2, 4).to(FP8), torch.ones(3))
    ),
    "gate: wanted an even number": lambda: gated_activation(torch.ones(2, 5)),
    "activation: wanted silu": lambda: gated_activation(torch.ones(2, 4), activation="relu"),  # type: ignore[arg-type]
    "up: wanted shape [2, 4]": lambda: gated_activation_fp8(torch.ones(2, 4), torch.ones(2, 5)),
    "grad: wanted shape [2, 2]": lambda: gated_activation_backward(
        torch.ones(2, 4), torch.ones(2, 4)
    ),
    "tokens: wanted int64 or int32": lambda: embedding(torch.ones(3), torch.ones(4, 4)),
    "weight: wanted shape [*, *]": lambda: embedding(torch.ones(3).long(), torch.ones(4)),
    "into: wanted shape [4, 8]": lambda: embedding_backward(
        torch.ones(3, 8), torch.ones(3).long(), 4, BF16, into=torch.ones(4, 9)
    ),
    "pairs: wanted shape [*, 2]": lambda: copy_blocks(
        torch.ones(1, 2, 4, 2, 8), torch.ones(3).long()
    ),
    "cache: wanted pages without gaps": lambda: copy_blocks(
        torch.ones(1, 2, 4, 2, 16)[..., :8], torch.ones(3, 2).long()
    ),
    "pairs: wanted pages below 2 and 2": lambda: copy_blocks(
        torch.ones(1, 2, 4, 2, 8), torch.tensor([[-1, 5], [0, 1], [1, 2]])
    ),
    "target: wanted shape": lambda: swap_blocks(
        torch.ones(1, 2, 4, 2, 8), torch.ones(2, 2, 4, 2, 8), torch.ones(3, 2).long()
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    with pytest.raises(ValueError, match="^" + message.replace("[", r"\[").replace("*", r"\*")):
        WRONG[message]()


def test_a_kernel_that_cannot_run_here_says_so():
    with pytest.raises(HardwareError, match="a tensor is on cpu"):
        rmsnorm(torch.ones(2, 4), torch.ones(4), impl="triton")


def test_outputs_and_gradients_do_not_go_together():
    weight = torch.ones(4, requires_grad=True)
    table = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"^out: wanted none"):
        embedding(torch.zeros(2).long(), table, out=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^out: wanted none"):
        gated_activation(torch.ones(2, 4, requires_grad=True), out=torch.ones(2, 2))
    with torch.no_grad():
        rmsnorm(torch.ones(2, 4), weight, out=torch.ones(2, 4))


def test_rows_of_any_shape():
    assert as_rows("x", torch.ones(2, 3, 4)).shape == (6, 4)
    assert as_rows("x", torch.ones(4)).shape == (1, 4)
    with pytest.raises(ValueError, match=r"^x: wanted rows at one distance"):
        as_rows("x", torch.ones(4, 3, 6)[:, :2])


def test_layouts_do_not_depend_on_the_number_of_rows():
    assert default_layout(4096) == Layout(rows=1, warps=4, stages=1, per_sm=0)
    assert default_layout(1).warps == 1
    assert width(5120) == 8192
    assert Layout(rows=4).programs(9, torch.device("cpu")) == 3
    assert all(Layout(**how).warps in (1, 2, 4, 8, 16, 32) for how in candidates(8192))


def test_relative_error_sees_what_was_not_written():
    truth, found = torch.ones(3), torch.ones(3)
    assert relative_error(found, truth) == 0
    poison(found[1:])
    assert relative_error(found, truth) == math.inf
