"""The gated delta rule and its convolution on a GPU at the sizes of Qwen3-Next: bfloat16 is near float64."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.delta_chunk import HEADS, KEY_HEADS, WIDTH
from cairn.kernels.delta.delta_chunk import delta_rule
from cairn.kernels.delta.rule import (
    DeltaCall,
    Sequences,
    delta_chunk_reference,
    short_conv_reference,
    unit_length,
)
from cairn.kernels.delta.short_conv import short_conv

pytestmark = pytest.mark.gpu
COUNTS = {"decode": [1] * 9, "mixed": [700, 1, 64, 65, 3, 1], "one": [2048], "four": [130] * 4}


def sequences_of(counts, slots):
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    slots = torch.tensor(slots, device="cuda").int()
    return starts.tolist(), Sequences(slots, None if max(counts) == 1 else starts, sum(counts))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("alike", [0.0, 1.0], ids=["keys apart", "keys alike"])
def test_the_rule(counts, alike):
    tokens, keys = sum(counts), KEY_HEADS * WIDTH
    mixed = torch.randn(tokens, 2 * keys + HEADS * WIDTH, device="cuda")
    mixed = (mixed + alike).bfloat16()
    g, beta = -torch.rand(tokens, HEADS, device="cuda"), torch.rand(tokens, HEADS, device="cuda")
    before = torch.randn(len(counts) + 2, HEADS * WIDTH, WIDTH, device="cuda")
    slots = [-1, *range(len(counts) - 1, 0, -1)] if len(counts) > 1 else [2]
    starts, sequences = sequences_of(counts, slots)
    state = before.clone()
    y = delta_rule(DeltaCall(mixed, g, beta, state, sequences, KEY_HEADS, WIDTH))
    q, k, v = mixed.double().split((keys, keys, HEADS * WIDTH), dim=-1)
    q, k = (
        unit_length(x.unflatten(-1, (KEY_HEADS, -1))).repeat_interleave(HEADS // KEY_HEADS, -2)
        for x in (q, k)
    )
    inputs = (q * WIDTH**-0.5, k, v.unflatten(-1, (HEADS, -1)), g.double(), beta.double())
    for number, slot in enumerate(slots):
        if slot < 0:
            continue
        rows = slice(starts[number], starts[number + 1])
        old = before[slot].double().unflatten(0, (HEADS, WIDTH))
        exact, new = delta_chunk_reference(*(x[rows] for x in inputs), old)
        assert relative_error(y[rows], exact) < 2e-2
        assert relative_error(state[slot].unflatten(0, (HEADS, WIDTH)), new) < 2e-2
    untouched = [slot for slot in range(len(before)) if slot not in slots]
    assert torch.equal(state[untouched], before[untouched])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_convolution_in_a_graph(counts):
    tokens, columns = sum(counts), 8192
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight = torch.randn(columns, 4, device="cuda").bfloat16()
    before = torch.randn(len(counts), 3, columns, device="cuda").bfloat16()
    starts, sequences = sequences_of(counts, range(len(counts)))
    state = before.clone()
    short_conv(x, weight, state, sequences, silu=True)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = short_conv(x, weight, state, sequences, silu=True)
    state.copy_(before)
    graph.replay()
    for number in range(len(counts)):
        rows = slice(starts[number], starts[number + 1])
        exact, kept = short_conv_reference(
            x[rows].double(), before[number].double(), weight.double()
        )
        assert relative_error(y[rows], torch.nn.functional.silu(exact)) < 1e-2
        assert torch.equal(state[number].double(), kept)
