"""Cross-entropy and its gradient in the interpreter, against float64 and its autograd."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.loss.cross_entropy import backward_, cross_entropy, cross_entropy_, statistics
from cairn.kernels.loss.cross_entropy_rule import Rule, VocabShard, cross_entropy_reference, join

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def inputs(rows, columns, dtype=torch.float32, spread=4.0):
    logits = (spread * torch.randn(rows, columns)).to(dtype)
    targets = torch.randint(columns, (rows,))
    targets[1::4] = -100
    return logits, targets


def truth(logits, targets, scale=1.0, **rule):
    wide = logits.double().requires_grad_()
    losses = cross_entropy_reference(wide, targets, Rule(**rule))
    [gradient] = torch.autograd.grad((losses.loss_T * scale).sum(), wide)
    return losses.loss_T.detach(), losses.lse_T.detach(), gradient


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        (1, {}),
        (777, {}),
        (1000, {"z_loss": 1e-2}),
        (300, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        (9000, {"z_loss": 1e-3}),  # more than one block: the loop
    ],
)
def test_in_place(dtype, columns, rule):
    logits, targets = inputs(9, columns, dtype)
    scale = torch.rand(9)
    exact = truth(logits, targets, scale, **rule)
    losses = cross_entropy_(logits, targets, grad_scale=scale, **rule, impl="triton")
    assert relative_error((*losses, logits), exact) < TOLERANCE[dtype]


def test_many_rounds_and_weights_of_any_sign():
    """bf16 logits of an even number are read two at a time, and a row's gradient comes a round later."""
    logits, targets = inputs(61, 130, torch.bfloat16)
    scale = torch.randn(61)
    scale[4] = 0.0
    exact = truth(logits, targets, scale, z_loss=1e-3)
    logits[1, 3], logits[5, 4] = float("nan"), float("inf")  # of rows that do not count
    losses = cross_entropy_(logits, targets, grad_scale=scale, z_loss=1e-3, impl="triton")
    assert relative_error((*losses, logits), exact) < 1e-2
    assert not logits[1::4].any()


@pytest.mark.parametrize("columns", [500, 9000])
def test_masked_tokens_and_ignored_rows(columns):
    logits, targets = inputs(6, columns)
    logits[:, : columns // 2] = float("-inf")
    targets = torch.where(targets >= 0, targets % (columns // 2) + columns // 2, targets)
    targets = targets.clamp(max=columns - 1)
    exact = truth(logits, targets, 0.5)
    losses = cross_entropy_(logits, targets, grad_scale=0.5, impl="triton")
    assert relative_error((*losses, logits), exact) < 1e-5
    logits, _ = inputs(3, columns)
    losses = cross_entropy_(logits, torch.full((3,), 7), ignore_index=7, impl="triton")
    assert not losses.loss_T.any()
    assert not logits.any()


def test_rows_far_apart_and_none_at_all():
    wide, targets = inputs(8, 640)
    logits = wide[:, :600]
    targets = targets.clamp(max=599)
    behind = wide[:, 600:].clone()
    exact = truth(logits, targets)
    losses = cross_entropy_(logits, targets, impl="triton")
    assert relative_error((*losses, logits), exact) < 1e-5
    assert torch.equal(wide[:, 600:], behind)
    assert cross_entropy_(logits[:0], targets[:0], impl="triton").loss_T.shape == (0,)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_autograd(reduction):
    logits, targets = inputs(10, 333)
    rule = dict(z_loss=1e-3, label_smoothing=0.05)
    wide = logits.double().requires_grad_()
    exact_T = cross_entropy_reference(wide, targets, Rule(**rule)).loss_T
    weights = torch.rand(10) if reduction == "none" else torch.ones(())
    count = (targets >= 0).sum() if reduction == "mean" else 1
    (exact_T * weights / count).sum().backward()
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf * 1.0, targets, reduction=reduction, **rule, impl="triton")
    (loss * weights).sum().backward()
    assert relative_error(leaf.grad, wide.grad) < 1e-5
    assert relative_error(loss.detach().sum(), (exact_T.detach() / count).sum()) < 1e-5


def test_a_second_backward_is_refused():
    leaf = torch.randn(4, 50, requires_grad=True)
    loss = cross_entropy(leaf * 1.0, torch.tensor([1, 2, 3, 4]), impl="triton")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_counts():
    leaf = torch.randn(3, 40, requires_grad=True)
    loss = cross_entropy(leaf * 1.0, torch.full((3,), -100), impl="triton")
    loss.backward()
    assert loss.item() == 0
    assert not leaf.grad.any()


@pytest.mark.parametrize("sizes", [(100, 100, 100), (7, 250, 43)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_of_the_vocabulary(sizes, smoothing):
    """Each rank computes on its own; the collectives hand around what all of them have computed."""
    logits, targets = inputs(12, sum(sizes))
    exact = truth(logits, targets, 0.25, z_loss=1e-2, label_smoothing=smoothing)
    parts = [part.contiguous() for part in logits.split(sizes, dim=1)]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def rule(start, all_max=None, all_sum=None):
        shard = VocabShard(start, sum(sizes), all_max, all_sum)
        return Rule(z_loss=1e-2, label_smoothing=smoothing, shard=shard)

    mine = [
        statistics(part, targets, rule(start)) for part, start in zip(parts, starts, strict=True)
    ]
    highest = torch.stack([numbers[0] for numbers in mine]).amax(0)
    sums = []
    for numbers, start in zip(mine, starts, strict=True):
        collect = rule(start, lambda top: highest, lambda rest: sums.append(rest.clone()) or rest)
        join(numbers.clone(), targets, collect, collect.shard)
    for part, start, numbers in zip(parts, starts, mine, strict=True):
        joined = rule(start, lambda top: highest, lambda rest: torch.stack(sums).sum(0))
        losses = join(numbers, targets, joined, joined.shard)
        assert relative_error(losses, exact[:2]) < 1e-5
        backward_(part, targets, losses.lse_T, torch.full((1,), 0.25), joined)
    assert relative_error(torch.cat(parts, dim=1), exact[2]) < 1e-5
