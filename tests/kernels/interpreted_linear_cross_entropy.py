"""The last layer and its loss in chunks, with the loss kernel in the interpreter, against float64."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.loss.cross_entropy_rule import Rule, VocabShard
from cairn.kernels.loss.linear_cross_entropy import (
    LOGITS_MIB,
    _chunk,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

# Products of bfloat16 on a CPU without them fall back with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def inputs(tokens, width, vocabulary, dtype=torch.float32):
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    targets[2::5] = -100
    return x, weight, targets


def truth(x, weight, targets, scale, **rule):
    wide = [part.detach().double().requires_grad_() for part in (x, weight)]
    losses = linear_cross_entropy_reference(*wide, targets, scale.double(), Rule(**rule))
    gradients = torch.autograd.grad(losses.loss, wide)
    return losses.loss.detach(), losses.loss_T.detach(), *gradients


def ours(x, weight, targets, factor=1.0, **options):
    losses = linear_cross_entropy(x, weight, targets, **options, impl="triton")
    gradients = torch.autograd.grad(losses.loss * factor, (x, weight))
    return losses.loss.detach(), losses.loss_T, *gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("chunk", [7, 64])
def test_mean(dtype, rule, chunk):
    x, weight, targets = inputs(20, 24, 301, dtype)
    exact = truth(x, weight, targets, 1.0 / (targets >= 0).sum(), **rule)
    found = ours(x, weight, targets, **rule, chunk_tokens=chunk)
    assert relative_error(found, exact) < (1e-5 if dtype == torch.float32 else 1e-2)


def clipped(logp_C, part):
    """PPO's loss of one token, whose slope is 0 where the ratio has gone too far."""
    old_C = -4.0 + 0.1 * torch.arange(part.start, part.stop)
    advantage_C = torch.where(torch.arange(part.start, part.stop) % 3 == 0, -1.0, 0.5).to(logp_C)
    ratio_C = (logp_C - old_C).exp()
    taken_C = torch.minimum(ratio_C * advantage_C, ratio_C.clamp(0.8, 1.2) * advantage_C)
    moves_C = ratio_C * advantage_C <= ratio_C.clamp(0.8, 1.2) * advantage_C
    return -taken_C, -(ratio_C * advantage_C).where(moves_C, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "z_loss"), [(7, 0.0), (64, 1e-2)])
def test_a_rule_of_its_own(dtype, chunk, z_loss):
    x, weight, targets = inputs(20, 24, 301, dtype)
    scale = torch.tensor(0.25)
    wide = [part.detach().double().requires_grad_() for part in (x, weight)]
    terms = Rule(z_loss=z_loss)
    losses = linear_cross_entropy_reference(*wide, targets, scale.double(), terms, clipped)
    gradients = torch.autograd.grad(losses.loss, wide)
    exact = (losses.loss.detach(), losses.loss_T.detach(), *gradients)
    options = dict(reduction="sum", weights_T=torch.full((20,), 0.25), chunk_tokens=chunk)
    found = ours(x, weight, targets, **options, z_loss=z_loss, token_rule=clipped)
    assert relative_error(found, exact) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_sum_with_weights_and_a_factor_in_backward():
    x, weight, targets = inputs(18, 16, 130)
    weights = torch.rand(18)
    exact = truth(x, weight, targets, weights)
    options = dict(reduction="sum", weights_T=weights, chunk_tokens=5)
    loss, loss_T, grad_x, grad_weight = ours(x, weight, targets, 3.0, **options)
    assert relative_error((loss, loss_T, grad_x / 3, grad_weight / 3), exact) < 1e-5


def test_sums_of_many_chunks_round_once():
    x, weight, targets = inputs(512, 16, 90, torch.bfloat16)
    exact = truth(x, weight, targets, 1.0 / (targets >= 0).sum())[3]

    def error(**options):
        return relative_error(ours(x, weight, targets, **options)[3], exact)

    whole = error(chunk_tokens=512)
    assert error(chunk_tokens=4) < 1.1 * whole
    assert error(chunk_tokens=4, accumulate=torch.bfloat16) > 3 * whole


def test_one_operand_without_a_gradient_and_none_at_all():
    x, weight, targets = inputs(9, 8, 50)
    loss = linear_cross_entropy(x, weight.detach(), targets, impl="triton").loss
    [grad_x] = torch.autograd.grad(loss, x)
    assert relative_error(grad_x, truth(x, weight, targets, 1.0 / (targets >= 0).sum())[2]) < 1e-5
    with torch.no_grad():
        silent = linear_cross_entropy(x, weight, targets, impl="triton")
    assert not silent.loss.requires_grad
    assert relative_error(silent.loss, loss.detach()) < 1e-6


def test_no_tokens_and_nothing_that_counts():
    x, weight, targets = inputs(6, 8, 50)
    empty = ours(x[:0].detach().requires_grad_(), weight, targets[:0])
    assert empty[0] == 0
    assert not empty[3].any()
    ignored = ours(x, weight, torch.full((6,), -100))
    assert ignored[0] == 0
    assert not ignored[2].any()
    assert not ignored[3].any()


def test_backward_works_once():
    x, weight, targets = inputs(6, 8, 50)
    loss = linear_cross_entropy(x, weight, targets, impl="triton").loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gone after one backward"):
        loss.backward()


@pytest.mark.parametrize("rule", [None, clipped])
def test_a_single_rank_is_a_shard_of_everything(rule):
    x, weight, targets = inputs(11, 8, 70)
    shard = VocabShard(0, 70, all_max=lambda top: top, all_sum=lambda rest: rest)
    options = dict(z_loss=1e-3, chunk_tokens=4, token_rule=rule)
    whole = ours(x, weight, targets, **options)
    sharded = ours(x, weight, targets, **options, shard=shard)
    assert relative_error(sharded, whole) < 1e-5


def test_chunks_are_even_and_small():
    assert _chunk(8192, 131072, torch.bfloat16) == 2816  # three: with two a gigabyte is too little
    assert _chunk(32768, 151936, torch.bfloat16) == 3328
    assert _chunk(1, 1000, torch.float32) == 128
    for tokens in (1, 127, 5000, 100_000):
        chunk = _chunk(tokens, 151936, torch.bfloat16)
        assert chunk * 151936 * 2 <= LOGITS_MIB * 2**20
