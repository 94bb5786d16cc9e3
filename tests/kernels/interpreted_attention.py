"""Attention over packed sequences, in the interpreter: forward and backward against float64."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import itertools

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
from cairn.kernels.attention.attention import attention
from cairn.kernels.attention.attention_problem import checked_problem
from cairn.kernels.attention.attention_schedule import schedule

EXAMPLES = [
    Example((70, 0, 1, 40), behind=5),
    Example((33, 50), width=96, rules=dict(causal=False)),
    Example((75,), width=128, behind=3, sinks=True, fused=True, rules=dict(window=20, softcap=5.0)),
    Example((20, 5, 33), (60, 3, 40)),
    Example((20, 5, 33), (60, 3, 40), sinks=True, rules=dict(window=10)),
    Example((40,), (0,), rules=dict(causal=False)),
]
NARROW = [
    Example((90, 7), heads=4, kv_heads=2, behind=3),
    Example((66,), width=96, rules=dict(window=30, softcap=2.0)),
    Example((9, 40), width=256, sinks=True),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is no number, so whatever a kernel forgets to write shows."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned_empty(*sizes, **named):
        fresh = empty(*sizes, **named)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_float32(example):
    check_forward(example, torch.float32, "cpu", "triton", 1e-5)
    check_gradients(example, torch.float32, "cpu", "triton", 1e-5)


@pytest.mark.parametrize("example", NARROW, ids=str)
def test_bfloat16(example):
    check_forward(example, torch.bfloat16, "cpu", "triton", 1e-2)
    check_gradients(example, torch.bfloat16, "cpu", "triton", 1e-2)


def test_weights_are_exact_on_integers():
    check_exactness(2, 64, 64, "triton", "cpu")


def test_equal_lengths_need_no_bounds():
    q, k, v = tensors(Example((40, 40)), torch.float32, "cpu")
    ragged = attention(q, k, v, bounds((40, 40), "cpu"), max_length=40, impl="triton")
    assert torch.equal(attention(q, k, v, None, max_length=40, impl="triton"), ragged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # by pointers, by descriptors
def test_no_sequence_sees_another(dtype):
    lengths = (21, 30)
    q, k, v = (x.requires_grad_() for x in tensors(Example(lengths), dtype, "cpu"))
    with torch.no_grad():
        for x in (q, k, v):
            x[21:] = torch.nan
    out = attention(q, k, v, bounds(lengths, "cpu"), max_length=30, impl="triton")
    grads = torch.autograd.grad(out[:21].float().square().sum(), (q, k, v))
    alone = attention(q[:21], k[:21], v[:21], None, max_length=21, impl="reference")
    assert relative_error(out[:21].detach(), alone.detach()) < 1e-2
    assert all(grad[:21].isfinite().all() for grad in grads)


@pytest.mark.parametrize("causal", [True, False])
def test_schedule_is_longest_first(causal):
    lengths = (130, 0, 400, 1, 128, 399)
    q, k, v = tensors(Example(lengths), torch.bfloat16, "cpu")
    problem = checked_problem(
        q, k, v, bounds(lengths, "cpu"), None, 512, None, causal, 0, 0.0, None
    )
    (count, *_), *entries = schedule(problem, q.shape[0], 128).tolist()
    starts = [0, *itertools.accumulate(lengths)]
    tiles = {(starts[s], n, row) for s, n in enumerate(lengths) for row in range(0, n, 128)}
    found = [tuple(entry[:3]) for entry in entries[:count]]
    assert len(found) == len(tiles)
    assert set(found) == tiles
    work = [row // 128 if causal else length for _, length, row in found]
    assert work == sorted(work, reverse=True)
