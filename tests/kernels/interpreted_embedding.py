"""Embedding, forward and backward, in the interpreter."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.layer.embedding import embedding, embedding_backward, embedding_reference
from cairn.kernels.tuned import trying

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (1,), (0,)])
def test_forward(shape, dtype):
    weight = torch.randn(30, 40).to(dtype)
    tokens = torch.randint(0, 30, shape)
    out = torch.empty(*shape, 40, dtype=dtype)
    poison(out)
    with trying("embedding", f"forward,{str(dtype)[6:]}", {"block": 16, "warps": 1}):
        assert embedding(tokens, weight, out=out, impl="triton") is out
    assert torch.equal(out, F.embedding(tokens, weight))


def test_tokens_of_other_ranks_are_zero():
    weight, tokens = torch.randn(10, 24), torch.tensor([3, 10, 19, 25, 0, 12], dtype=torch.int32)
    found = embedding(tokens, weight, first=10, impl="triton")
    assert torch.equal(found, embedding_reference(tokens, weight, 10))
    assert found.abs().sum(1).nonzero().flatten().tolist() == [1, 2, 5]


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("config", [{}, {"block": 16, "chunk": 2, "warps": 1}])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradient(dtype, config, first):
    tokens = torch.tensor([[3, 9, 3, 0, 9, 9, 5], [9, 3, 9, 9, 9, 11, 0]])
    weight = torch.randn(8 if first else 12, 20).to(dtype).requires_grad_()
    grad = torch.randn(2, 7, 20).to(dtype)
    with trying("embedding", f"backward,{str(dtype)[6:]}", config):
        embedding(tokens, weight, first, impl="triton").backward(grad)
    wide = weight.detach().double().requires_grad_()
    embedding_reference(tokens, wide, first).backward(grad.double())
    assert relative_error(weight.grad, wide.grad) < (1e-2 if dtype == BF16 else 1e-6)


def test_one_token_all_the_time():
    tokens, grad = torch.zeros(100, dtype=torch.int64), torch.ones(100, 8)
    found = embedding_backward(grad, tokens, 3, F32, impl="triton")
    assert found.tolist() == [[100.0] * 8, [0.0] * 8, [0.0] * 8]


def test_gradient_is_added_to_a_buffer():
    tokens, grad = torch.tensor([1, 4, 1]), torch.randn(3, 12).to(BF16)
    buffer = torch.ones(6, 12)
    found = embedding_backward(grad, tokens, 6, F32, into=buffer, impl="triton")
    assert found is buffer
    wanted = torch.ones(6, 12).index_add(0, tokens, grad.float())
    assert relative_error(found, wanted) < 1e-6


def test_no_tokens_have_no_gradient():
    weight = torch.randn(4, 8, requires_grad=True)
    embedding(torch.empty(0, dtype=torch.int64), weight, impl="triton").sum().backward()
    assert not weight.grad.any()
