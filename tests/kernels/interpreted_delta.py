"""The gated delta rule and its short convolution in the interpreter, against the reference in float64."""

import cairn.kernels.interpret  # noqa: F401  isort: skip

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.delta import delta_chunk
from cairn.kernels.delta.delta_chunk import delta_rule
from cairn.kernels.delta.rule import (
    DeltaCall,
    Sequences,
    delta_chunk_reference,
    delta_step_reference,
    short_conv_reference,
    unit_length,
)
from cairn.kernels.delta.short_conv import short_conv

KEY_HEADS, HEADS, K, V, SLOTS = 1, 2, 32, 48, 6


def starts_of(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


def heads_of(mixed):
    q, k, v = mixed.double().split((KEY_HEADS * K, KEY_HEADS * K, HEADS * V), dim=-1)
    q, k = (
        unit_length(x.unflatten(-1, (KEY_HEADS, -1))).repeat_interleave(HEADS // KEY_HEADS, -2)
        for x in (q, k)
    )
    return q * K**-0.5, k, v.unflatten(-1, (HEADS, -1))


@pytest.mark.parametrize(
    ("counts", "slots"),
    [((1, 1, 1), (4, -1, 0)), ((70, 1, 3, 0, 20), (2, 0, 5, -1, -1))],
    ids=["decode", "mixed"],
)
def test_states_advance_as_the_reference_says(counts, slots):
    torch.manual_seed(0)
    tokens, width = sum(counts), 2 * KEY_HEADS * K + HEADS * V
    mixed = (
        torch.randn(tokens, width) + 0.5
    )  # keys that resemble each other: the system is far from diagonal
    g, beta = -torch.rand(tokens, HEADS), torch.rand(tokens, HEADS)
    state = torch.randn(SLOTS, HEADS * K, V)
    before, starts = state.clone(), starts_of(counts)
    sequences = Sequences(torch.tensor(slots).int(), None if max(counts) == 1 else starts, tokens)
    y = delta_rule(DeltaCall(mixed, g, beta, state, sequences, KEY_HEADS, K))
    q, k, v = heads_of(mixed)
    for number, slot in enumerate(slots):
        rows = slice(starts[number], starts[number + 1])
        if slot < 0 or not counts[number]:
            continue
        old = before[slot].double().unflatten(0, (HEADS, K))
        parts = [x[rows] for x in (q, k, v, g.double(), beta.double())]
        wanted, new = [], old
        for i in range(counts[number]):
            found, (new,) = delta_step_reference(*(x[i : i + 1] for x in parts), new[None])
            wanted.append(found)
        assert relative_error(y[rows], torch.cat(wanted)) < 2e-5
        assert relative_error(state[slot].unflatten(0, (HEADS, K)), new) < 2e-5
        chunked, _ = delta_chunk_reference(*parts, old)
        assert relative_error(chunked, torch.cat(wanted)) < 1e-10
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(state[untouched], before[untouched])


def test_bfloat16_loses_no_more_than_its_own_digits(monkeypatch):
    """Keys that resemble each other: what a row takes over from those before it adds up."""
    monkeypatch.setattr(delta_chunk, "SOLVE", "tf32x3")  # the interpreter does not know bf16x3
    torch.manual_seed(0)
    tokens, width = 128, 2 * KEY_HEADS * K + HEADS * V
    mixed = (torch.randn(tokens, width) + 0.5).bfloat16()
    g, beta = -torch.rand(tokens, HEADS) / 8, torch.rand(tokens, HEADS)
    state = torch.zeros(1, HEADS * K, V)
    sequences = Sequences(torch.zeros(1, dtype=torch.int32), starts_of((tokens,)), tokens)
    y = delta_rule(DeltaCall(mixed, g, beta, state, sequences, KEY_HEADS, K))
    exact, new = delta_chunk_reference(
        *heads_of(mixed), g.double(), beta.double(), torch.zeros(HEADS, K, V, dtype=torch.float64)
    )
    assert relative_error(y, exact) < 8e-3
    assert relative_error(state[0].unflatten(0, (HEADS, K)), new) < 8e-3


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 0, 17, 1, 3)], ids=["decode", "mixed"])
def test_short_convolutions_keep_their_last_inputs(counts, silu):
    torch.manual_seed(1)
    tokens, columns = sum(counts), 130
    x, weight = torch.randn(tokens, columns), torch.randn(columns, 4)
    state = torch.randn(7, 3, columns)
    before, starts = state.clone(), starts_of(counts)
    slots = [3, 0, -1, 6, 2][: len(counts)]
    bounds = None if max(counts) == 1 else starts
    y = short_conv(
        x, weight, state, Sequences(torch.tensor(slots).int(), bounds, tokens), silu=silu
    )
    for number, slot in enumerate(slots):
        rows = slice(starts[number], starts[number + 1])
        if slot < 0:
            continue
        wanted, kept = short_conv_reference(x[rows], before[slot], weight)
        wanted = torch.nn.functional.silu(wanted) if silu else wanted
        assert torch.allclose(y[rows], wanted, atol=1e-5)
        assert torch.equal(state[slot], kept)
    assert torch.equal(state[[1, 4, 5]], before[[1, 4, 5]])


@pytest.mark.parametrize("wrong", ["slots_B", "g_TH", "state_NRV", "starts_B1"])
def test_what_does_not_fit_is_named(wrong):
    sequences = Sequences(torch.zeros(2, dtype=torch.int32), None, 2)
    call = DeltaCall(
        torch.zeros(2, 2 * K + HEADS * V),
        torch.zeros(2, HEADS),
        torch.zeros(2, HEADS),
        torch.zeros(SLOTS, HEADS * K, V),
        sequences,
        KEY_HEADS,
        K,
    )
    match wrong:
        case "slots_B":
            call = call._replace(sequences=sequences._replace(slots_B=torch.zeros(2)))
        case "starts_B1":
            call = call._replace(sequences=sequences._replace(slots_B=sequences.slots_B[:1]))
        case "g_TH":
            call = call._replace(g_TH=call.g_TH.double())
        case "state_NRV":
            call = call._replace(state_NRV=call.state_NRV[:, :3])
    with pytest.raises(ValueError, match=wrong):
        delta_rule(call)
