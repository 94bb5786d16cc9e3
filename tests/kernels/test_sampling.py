"""Sampling without a GPU: the reference against the plain generator, its noise, and what is refused."""

import math

import pytest
import torch

from cairn.kernels.sampling.logprobs import logprobs
from cairn.kernels.sampling.noise_reference import noise_reference
from cairn.kernels.sampling.penalties import (
    bits_reference,
    count,
    penalize,
    random_penalties,
    words,
)
from cairn.kernels.sampling.sampling import Parameters, kept_reference, random_batch, sample
from cairn.models.generate import GenerateSampling, probabilities


@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_what_is_kept_is_what_the_generator_keeps(top_k, top_p):
    logits_BV = 3 * torch.randn(8, 300)
    sampling = GenerateSampling(temperature=0.7, top_k=top_k, top_p=top_p)
    expected_BV = torch.stack([probabilities(logits_V, sampling) > 0 for logits_V in logits_BV])
    kept_BV = kept_reference(
        logits_BV.double() / 0.7, torch.full((8,), top_k), torch.full((8,), top_p), torch.zeros(8)
    )
    assert torch.equal(kept_BV, expected_BV)


def test_draws_follow_the_distribution():
    """Chi-square of 20,000 draws of one row, at many positions of one request."""
    logits_V, draws = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5]), 20_000
    parameters = Parameters.neutral(draws, "cpu")
    parameters.temperature_N.fill_(0.8)
    parameters.seed_N.fill_(1234)
    tokens_B = sample(logits_V.expand(draws, 6), parameters, torch.arange(draws))
    expected_V = draws * (logits_V / 0.8).softmax(-1)
    found_V = torch.bincount(tokens_B.long(), minlength=6)
    assert float(((found_V - expected_V) ** 2 / expected_V).sum()) < 20.5  # 99.9% of 5 degrees


@pytest.mark.parametrize("along", ["token", "position", "seed"])
def test_noise_is_gumbel_and_independent(along):
    count_ = 20_000
    zeros = torch.zeros(1, dtype=torch.int64)
    if along == "token":
        noise = noise_reference(zeros, zeros, count_)[0]
    elif along == "position":
        noise = noise_reference(zeros.expand(count_), torch.arange(count_), 1)[:, 0]
    else:
        noise = noise_reference(torch.arange(count_), zeros.expand(count_), 1)[:, 0]
    uniform = torch.exp(-torch.exp(-noise))
    buckets = torch.histc(uniform, 50, 0.0, 1.0)
    assert float(((buckets - count_ / 50) ** 2 / (count_ / 50)).sum()) < 85.4  # 99.9% of 49
    for lag in (1, 2, 32):
        pair = torch.stack([uniform[lag:], uniform[:-lag]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.025


def chi_square(places: torch.Tensor, count_: int) -> float:
    found = torch.bincount(places, minlength=count_)
    expected = len(places) / count_
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("lag", [1, 8, 4096, "next position", "next seed", "next half of the seed"])
def test_neighbours_know_nothing_of_each_other(lag):
    """Chi-square of pairs in 16 x 16 boxes, over a vocabulary; and in the tail that decides."""
    seed, position = torch.tensor([5, 5, 6, 5 + 2**32]), torch.tensor([0, 1, 0, 0])
    noise = noise_reference(seed, position, 151936)
    uniform = torch.exp(-torch.exp(-noise))
    if isinstance(lag, int):
        first, second = uniform[0, lag:], uniform[0, :-lag]
    else:
        row = ["next position", "next seed", "next half of the seed"].index(lag)
        first, second = uniform[0], uniform[1 + row]
    for power in (1, 16):  # u^16: its upper half is the upper 4 % of u
        boxes = [(u**power * 16).long().clamp(max=15) for u in (first, second)]
        if power == 1:
            assert chi_square(boxes[0] * 16 + boxes[1], 256) < 330.5  # 99.9% of 255
        else:
            both = float(((boxes[0] >= 8) & (boxes[1] >= 8)).double().mean())
            once = 1 - 0.5 ** (1 / 16)
            assert abs(both - once**2) < 4 * (once**2 / len(first)) ** 0.5


def test_the_largest_noise_of_a_vocabulary_is_anywhere_and_of_its_size():
    rows = 300
    noise = noise_reference(torch.arange(rows), torch.full((rows,), 9), 20_000)
    largest, where = noise.max(-1)
    assert chi_square(where // 2000, 10) < 27.9  # 99.9% of 9
    ranks = torch.exp(-torch.exp(-(largest - math.log(20_000))))
    assert chi_square((ranks * 10).long(), 10) < 27.9


def test_noise_knows_all_bits_of_the_seed():
    seeds = torch.tensor([1, 1 + 2**32, 1 + 2**62, 2**31 + 1])
    noise = noise_reference(seeds, torch.zeros(4, dtype=torch.int64), 8)
    assert len({tuple(row.tolist()) for row in noise}) == 4


def test_a_request_gets_the_same_tokens_in_any_batch():
    batch = random_batch(6, 100, torch.float32, device="cpu", top_p=0.9)
    together_B = sample(batch.logits_BV, batch.parameters, batch.position_B)
    order = torch.tensor([4, 0, 5])
    parameters = Parameters(*(tensor[order] for tensor in batch.parameters))
    apart_B = sample(batch.logits_BV[order], parameters, batch.position_B[order])
    assert torch.equal(apart_B, together_B[order])


def test_rows_of_state():
    batch = random_batch(4, 50, torch.float32, device="cpu", top_k=5)
    rows_B = torch.tensor([2, -1, 3, 0])
    tokens_B = sample(batch.logits_BV, batch.parameters, batch.position_B, rows_B=rows_B)
    mine = Parameters(*(tensor[rows_B.clamp(min=0)] for tensor in batch.parameters))
    expected_B = sample(batch.logits_BV, mine, batch.position_B)
    expected_B[1] = 0
    assert torch.equal(tokens_B, expected_B)


def test_penalties_and_mask_come_first():
    batch = random_batch(2, 50, torch.float32, device="cpu", temperature=0.0)
    best_B = batch.logits_BV.argmax(-1)
    penalties = random_penalties(2, 50, "cpu")
    penalties.counts_NV.zero_()
    penalties.prompt_NW.zero_()
    penalties.presence_N.fill_(100.0)
    everything = dict(rows_B=torch.arange(2), penalties=penalties)
    assert torch.equal(
        sample(batch.logits_BV, batch.parameters, batch.position_B, **everything).long(), best_B
    )
    count(penalties, best_B, torch.arange(2))
    second_B = batch.logits_BV.topk(2).indices[:, 1]
    assert torch.equal(
        sample(batch.logits_BV, batch.parameters, batch.position_B, **everything).long(), second_B
    )
    allowed_BW = torch.zeros(2, words(50), dtype=torch.int32)
    allowed_BW[:, 1] = 1 << 3
    tokens_B = sample(batch.logits_BV, batch.parameters, batch.position_B, allowed_BW=allowed_BW)
    assert tokens_B.tolist() == [35, 35]


def test_bits():
    assert bits_reference(torch.tensor([[5, -(2**31)]]), 64)[0].nonzero()[:, 0].tolist() == [
        0,
        2,
        63,
    ]


def test_logprobs_are_those_of_torch():
    logits_BV, tokens_B = torch.randn(3, 40), torch.tensor([0, 39, 7])
    token_B, top_Bn, ids_Bn = logprobs(logits_BV, tokens_B, 5)
    expected = logits_BV.log_softmax(-1)
    torch.testing.assert_close(token_B, expected.gather(1, tokens_B[:, None])[:, 0])
    values, indices = expected.topk(5)
    torch.testing.assert_close(top_Bn, values)
    assert torch.equal(ids_Bn.long(), indices)


def test_wrong_arguments_are_named():
    batch = random_batch(2, 50, torch.float32, device="cpu")
    good = dict(logits_BV=batch.logits_BV, parameters=batch.parameters, position_B=batch.position_B)
    integers = batch.parameters._replace(top_k_N=batch.parameters.top_k_N.long())
    short = batch.parameters._replace(seed_N=batch.parameters.seed_N[:1])
    for name, change in (
        ("logits", {"logits_BV": batch.logits_BV.int()}),
        ("logits", {"logits_BV": batch.logits_BV.repeat(1, 2)[:, ::2]}),
        ("position", {"position_B": batch.position_B.float()}),
        ("top_k", {"parameters": integers}),
        ("seed", {"parameters": short}),
        ("rows", {"rows_B": torch.zeros(3, dtype=torch.int32)}),
        ("out", {"out": torch.zeros(3, dtype=torch.int32)}),
        ("allowed", {"allowed_BW": torch.zeros(2, 1, dtype=torch.int32)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            sample(**good | change)
    penalties = random_penalties(2, 50, "cpu")
    with pytest.raises(ValueError, match=r"^counts: "):
        penalize(batch.logits_BV, penalties._replace(counts_NV=penalties.counts_NV[:, :9]))
    with pytest.raises(ValueError, match=r"^prompt: "):
        penalize(batch.logits_BV, penalties._replace(prompt_NW=penalties.prompt_NW[:, :1]))
    with pytest.raises(ValueError, match=r"^n: "):
        logprobs(batch.logits_BV, batch.position_B, 33)
    with pytest.raises(ValueError, match=r"^tokens: "):
        logprobs(batch.logits_BV, batch.position_B[:1])
