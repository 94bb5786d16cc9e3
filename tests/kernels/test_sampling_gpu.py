"""Sampling on a real GPU: whole vocabularies against float64 with the same noise, twice the same, inside a graph."""

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.sampling.logprobs import LogProbs, logprobs, logprobs_reference
from cairn.kernels.sampling.noise_reference import noise_reference
from cairn.kernels.sampling.penalties import (
    bits_reference,
    count,
    penalize,
    penalize_reference,
    random_penalties,
    words,
)
from cairn.kernels.sampling.sampling import (
    Batch,
    Parameters,
    random_batch,
    sample,
    sample_reference,
)

pytestmark = pytest.mark.gpu

WAYS = [
    {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 1}, {"top_k": 50, "top_p": 0.9}, {"top_k": 2000},
    {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000, "top_p": 0.8, "min_p": 1e-3}, {"temperature": 3.0, "top_p": 0.95},
]  # fmt: skip


def run(batch: Batch) -> torch.Tensor:
    batch.out_B.fill_(-1)
    return sample(
        batch.logits_BV, batch.parameters, batch.position_B, out=batch.out_B, impl="triton"
    )


def check(batch: Batch) -> None:
    """The token of float64, or one that is as good to within float32's rounding."""
    found_B, exact_B = (
        run(batch).long(),
        sample_reference(batch.logits_BV, batch.parameters, batch.position_B),
    )
    noise_BV = noise_reference(batch.parameters.seed_N, batch.position_B, batch.logits_BV.shape[1])
    heat_B1 = batch.parameters.temperature_N.double()[:, None]
    greedy_B1 = heat_B1 <= 0
    noisy_BV = batch.logits_BV.double() / heat_B1.masked_fill(
        greedy_B1, 1.0
    ) + noise_BV.masked_fill(greedy_B1, 0.0)
    lost_B1 = noisy_BV.gather(1, exact_B[:, None]) - noisy_BV.gather(1, found_B[:, None])
    scale = float(noisy_BV.abs().max())
    assert float(lost_B1.max()) <= 3e-6 * scale
    assert int((found_B != exact_B).sum()) <= 1 + len(found_B) // 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_tokens_are_those_of_float64(how, dtype):
    check(random_batch(40, 151936, dtype, **how))


@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize("vocabulary", [1, 999, 50257])
def test_odd_vocabularies(rows, vocabulary):
    for how in WAYS[:7]:
        check(random_batch(rows, vocabulary, torch.float32, **how))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_several_programs_for_a_row_find_what_one_finds(how):
    batch = random_batch(6, 151936, torch.bfloat16, **how)
    alone_B = run(batch).clone()
    many = Parameters(*(tensor.repeat(50) for tensor in batch.parameters))
    tokens_B = sample(
        batch.logits_BV.repeat(50, 1), many, batch.position_B.repeat(50), impl="triton"
    )
    assert torch.equal(tokens_B.view(50, 6), alone_B.expand(50, 6))


def test_greedy_is_exact():
    batch = random_batch(64, 151936, torch.bfloat16, temperature=0.0)  # bfloat16: equals are common
    exact_B = sample_reference(batch.logits_BV, batch.parameters, batch.position_B)
    assert torch.equal(run(batch).long(), exact_B)


def test_flat_rows():
    for dtype in (torch.bfloat16, torch.float32):
        batch = random_batch(8, 151936, dtype, top_p=0.9)
        check(batch._replace(logits_BV=batch.logits_BV * 0.05))


def test_the_same_twice_and_in_any_batch():
    batch = random_batch(300, 32000, torch.bfloat16, top_k=50, top_p=0.9)
    first_B = run(batch).clone()
    assert torch.equal(run(batch), first_B)
    order = torch.randperm(300, device="cuda")[:7]
    parameters = Parameters(*(tensor[order] for tensor in batch.parameters))
    apart_B = sample(batch.logits_BV[order], parameters, batch.position_B[order], impl="triton")
    assert torch.equal(apart_B, first_B[order])


def test_a_graph_replays_with_other_parameters():
    batch = random_batch(16, 32000, torch.float32, top_k=50)
    run(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(batch.logits_BV, batch.parameters, batch.position_B, out=batch.out_B, impl="triton")
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.7, 0, 0.8), (1.0, 20, 1.0)):
        batch.parameters.temperature_N.fill_(temperature)
        batch.parameters.top_k_N.fill_(top_k)
        batch.parameters.top_p_N.fill_(top_p)
        batch.position_B.add_(1)
        graph.replay()
        assert torch.equal(batch.out_B, run(batch.__class__(*batch[:3], batch.out_B.clone())))


def test_masks_penalties_and_counts():
    batch = random_batch(30, 151936, torch.bfloat16, temperature=1.0, top_k=20)
    penalties = random_penalties(40, 151936)
    rows_B = torch.randperm(40, device="cuda")[:30]
    rows_B[7] = -1
    allowed_BW = torch.randint(-(2**31), 2**31, (30, words(151936)), device="cuda").int()
    found_BV = torch.empty(30, 151936, device="cuda")
    poison(found_BV)
    penalize(
        batch.logits_BV,
        penalties,
        rows_B=rows_B,
        allowed_BW=allowed_BW,
        out=found_BV,
        impl="triton",
    )
    exact_BV = penalize_reference(batch.logits_BV, penalties, rows_B, allowed_BW)
    torch.testing.assert_close(found_BV, exact_BV, rtol=1e-6, atol=1e-6)
    state = Parameters(*(torch.cat([t, t[:10]]) for t in batch.parameters))
    tokens_B = sample(
        batch.logits_BV,
        state,
        batch.position_B,
        rows_B=rows_B,
        penalties=penalties,
        allowed_BW=allowed_BW,
    )
    real = rows_B >= 0
    assert bits_reference(allowed_BW, 151936).gather(1, tokens_B.long()[:, None])[real].all()
    before = penalties.counts_NV.sum()
    count(penalties, tokens_B, rows_B)
    assert penalties.counts_NV.sum() - before == 29


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocabulary", "n"), [(151936, 0), (151936, 20), (999, 32)])
def test_logprobs(dtype, vocabulary, n):
    logits_BV = (3 * torch.randn(50, vocabulary, device="cuda")).to(dtype)
    tokens_B = torch.randint(vocabulary, (50,), device="cuda")
    room = LogProbs(*(t.clone() for t in logprobs_reference(logits_BV, tokens_B, n)))
    poison(*room)
    logprobs(logits_BV, tokens_B, n, out=room, impl="triton")
    exact = logprobs_reference(logits_BV, tokens_B, n)
    assert torch.equal(room.ids_Bn, exact.ids_Bn)
    assert relative_error(room[:2], exact[:2]) < 1e-5
