"""Cross-entropy on a GPU: pieces of a row that wait for each other, long rows, chunks, memory."""

import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import relative_error
from cairn.kernels.loss.cross_entropy import _key, cross_entropy, cross_entropy_
from cairn.kernels.loss.cross_entropy_plans import CANDIDATES, LOOP
from cairn.kernels.loss.cross_entropy_rule import Rule, VocabShard, cross_entropy_reference
from cairn.kernels.loss.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def inputs(rows, columns, dtype=BF16):
    logits = (3 * torch.randn(rows, columns, device="cuda")).to(dtype)
    targets = torch.randint(columns, (rows,), device="cuda")
    targets[::5] = -100
    return logits, targets


def truth(logits, targets, scale, **rule):
    wide = logits.double().requires_grad_()
    losses = cross_entropy_reference(wide, targets, Rule(**rule))
    [gradient] = torch.autograd.grad((losses.loss_T * scale).sum(), wide)
    return losses.loss_T.detach(), losses.lse_T.detach(), gradient


def clipped(logp_C, part):
    """PPO's loss of one token."""
    old_C = -8.0 + 0.01 * torch.arange(part.start, part.stop, device="cuda")
    advantage_C = torch.where(
        torch.arange(part.start, part.stop, device="cuda") % 3 == 0, -1.0, 0.5
    )
    ratio_C = (logp_C - old_C).exp()
    kept_C = ratio_C.clamp(0.5, 2.0) * advantage_C
    moves_C = ratio_C * advantage_C <= kept_C
    return -torch.minimum(ratio_C * advantage_C, kept_C), -(ratio_C * advantage_C).where(
        moves_C, 0.0
    )


EVERYTHING = VocabShard(0, 32000, all_max=lambda top: top, all_sum=lambda rest: rest)


@pytest.mark.parametrize(("z_loss", "shard"), [(0.0, None), (1e-4, None), (1e-4, EVERYTHING)])
def test_a_rule_of_its_own_in_chunks(z_loss, shard):
    x = torch.randn(1000, 256, device="cuda", dtype=BF16, requires_grad=True)
    weight = (torch.randn(32000, 256, device="cuda") / 16).to(BF16).requires_grad_()
    targets = torch.randint(32000, (1000,), device="cuda")
    targets[::7] = -100
    weights_T = torch.full((1000,), 1 / 857, device="cuda")
    losses = linear_cross_entropy(
        x,
        weight,
        targets,
        reduction="sum",
        weights_T=weights_T,
        z_loss=z_loss,
        chunk_tokens=384,
        token_rule=clipped,
        shard=shard,
        impl="triton",
    )
    found = (losses.loss.detach(), losses.loss_T, *torch.autograd.grad(losses.loss, (x, weight)))
    wide = [part.detach().double().requires_grad_() for part in (x, weight)]
    exact = linear_cross_entropy_reference(
        *wide, targets, weights_T.double(), Rule(z_loss=z_loss), clipped
    )
    truth_of = (exact.loss.detach(), exact.loss_T.detach(), *torch.autograd.grad(exact.loss, wide))
    assert relative_error(found, truth_of) < 2e-2


@pytest.mark.parametrize("columns", [1, 1000, 8192, 8193, 50257, 128256, 151936])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sizes(columns, dtype):
    logits, targets = inputs(300, columns, dtype)
    scale = torch.rand(300, device="cuda")
    exact = truth(logits, targets, scale, z_loss=1e-3)
    losses = cross_entropy_(logits, targets, grad_scale=scale, z_loss=1e-3, impl="triton")
    # With one column the gradient is what rounding leaves of 1 - 1, and the z-loss.
    tight = 1e-4 if columns == 1 else 1e-5
    assert relative_error((*losses, logits), exact) < (1e-2 if dtype == BF16 else tight)


@pytest.mark.parametrize("plan", CANDIDATES, ids=str)
def test_every_candidate_many_times(plan):
    """Waiting programs must neither hang nor read too early; results are the same every time."""
    original, targets = inputs(1500, 128256)
    with trying("cross_entropy", _key(128256, BF16), plan._asdict()):
        first = None
        for _ in range(5):
            logits = original.clone()
            losses = cross_entropy_(logits, targets, impl="triton")
            if first is None:
                first = (*losses, logits)
            for one, other in zip(first, (*losses, logits), strict=True):
                assert torch.equal(one, other)
    few = slice(None, None, 50)
    exact = truth(original[few], targets[few], 1.0)
    assert relative_error([part[few] for part in first], exact) < 1e-2


def test_masked_tokens():
    logits, targets = inputs(64, 32768)
    logits[:, :16384] = float("-inf")  # whole pieces without a finite logit
    targets = torch.where(targets >= 0, targets % 16384 + 16384, targets)
    exact = truth(logits, targets, 1.0)
    losses = cross_entropy_(logits, targets, impl="triton")
    assert relative_error((*losses, logits), exact) < 1e-2


def test_a_row_that_is_not_a_number_does_not_hang():
    logits, targets = inputs(64, 32768)
    targets[:] = 5
    logits[3, 100] = float("nan")
    losses = cross_entropy_(logits, targets, impl="triton")
    assert losses.loss_T[3].isnan()
    assert losses.loss_T.isnan().sum() == 1


def test_in_a_graph():
    original, targets = inputs(256, 65536)
    logits = original.clone()
    expected = cross_entropy_(logits, targets, impl="triton")
    gradient = logits.clone()
    logits.copy_(original)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses = cross_entropy_(logits, targets, impl="triton")
    for _ in range(3):
        logits.copy_(original)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(losses.loss_T, expected.loss_T)
        assert torch.equal(logits, gradient)


def test_loop_and_pieces_agree():
    """Also about targets that are no token: they raise nothing there, and no other row notices."""
    original, targets = inputs(512, 100_000)
    targets[torch.tensor([1, 2, 3, 511])] = torch.tensor([-1, 100_000, 131_071, 1 << 30]).cuda()
    results = []
    for plan in (CANDIDATES[0], LOOP):
        logits = original.clone()
        with trying("cross_entropy", _key(100_000, BF16), plan._asdict()):
            losses = cross_entropy_(logits, targets, z_loss=1e-4, impl="triton")
        results.append((*losses, logits))
    assert relative_error(results[0], results[1]) < 1e-3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autograd(smoothing):
    logits, targets = inputs(400, 151936)
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf.float(), targets, label_smoothing=smoothing).backward()
    ours = logits.clone().requires_grad_()
    loss = cross_entropy(ours * 1.0, targets, label_smoothing=smoothing, impl="triton")
    loss.backward()
    assert relative_error(ours.grad, leaf.grad) < 1e-2


def test_a_shard_of_everything():
    logits, targets = inputs(256, 40_000)
    exact = truth(logits, targets, 1.0, z_loss=1e-3)
    shard = VocabShard(0, 40_000, all_max=lambda top: top, all_sum=lambda rest: rest)
    losses = cross_entropy_(logits, targets, z_loss=1e-3, shard=shard, impl="triton")
    assert relative_error((*losses, logits), exact) < 1e-2


@pytest.mark.parametrize("accumulate", [None, BF16])
def test_linear_cross_entropy(accumulate):
    x = torch.randn(3000, 512, device="cuda", dtype=BF16, requires_grad=True)
    weight = (torch.randn(40_000, 512, device="cuda") * 512**-0.5).to(BF16).requires_grad_()
    targets = torch.randint(40_000, (3000,), device="cuda")
    targets[::3] = -100
    options = dict(chunk_tokens=640, accumulate=accumulate)
    loss = linear_cross_entropy(x, weight, targets, **options, impl="triton").loss
    found = (loss.detach(), *torch.autograd.grad(loss, (x, weight)))
    wide = [part.detach().double().requires_grad_() for part in (x, weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].T, targets)
    expected = (exact.detach(), *torch.autograd.grad(exact, wide))
    assert relative_error(found, expected) < 1e-2


def test_the_logits_are_never_there_all_at_once():
    tokens, width, vocabulary = 8192, 4096, 131072
    x = torch.randn(tokens, width, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=BF16, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, weight, targets, impl="triton").loss
    gradients = torch.autograd.grad(loss, (x, weight))
    kept = sum(part.numel() * part.element_size() for part in gradients)
    extra = torch.cuda.max_memory_allocated() - before - kept
    sums = 4 * weight.numel()  # float32, while there are several chunks
    assert extra < 2**30 + sums
