"""Sampling, penalties and log-probabilities, in the interpreter: every way through the kernels against float64."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.sampling import logprobs as logprob_module
from cairn.kernels.sampling import sampling as sampling_module
from cairn.kernels.sampling.logprobs import LogProbs, logprobs, logprobs_reference
from cairn.kernels.sampling.penalties import (
    Penalties,
    count,
    penalize,
    penalize_reference,
    random_penalties,
    words,
)
from cairn.kernels.sampling.sampling import (
    Parameters,
    kept_reference,
    random_batch,
    sample,
    sample_reference,
)
from cairn.kernels.tuned import trying


@pytest.fixture(autouse=True)
def plan(monkeypatch):
    """As many columns at a time as fit these small vocabularies several times; a test may ask for more."""
    changes = {"lanes": 128}
    monkeypatch.setattr(sampling_module, "tuned", lambda kernel, key, default: default | changes)
    return changes


def check(batch) -> torch.Tensor:
    found_B = torch.full_like(batch.out_B, -1)
    sample(batch.logits_BV, batch.parameters, batch.position_B, out=found_B, impl="triton")
    exact_B = sample_reference(batch.logits_BV, batch.parameters, batch.position_B)
    assert found_B.tolist() == exact_B.tolist()
    return found_B


@pytest.mark.parametrize(  # one program for a row, or three with three steps each
    ("dtype", "programs"), [(torch.float32, 1), (torch.bfloat16, 12)]
)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 1.7},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.01, "top_p": 0.5},
    ],
    ids=str,
)
def test_tokens_are_those_of_float64_with_the_same_noise(dtype, programs, how, plan):
    torch.manual_seed(0)
    plan["programs"] = programs
    check(random_batch(4, 1000, dtype, device="cpu", **how))


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_more_steps_than_bits_in_a_word(how, plan):
    plan |= {"lanes": 16, "programs": 1}
    check(random_batch(2, 1000, torch.float32, device="cpu", **how))


def test_top_k_of_more_tokens_than_columns_of_a_step(plan):
    plan |= {"lanes": 16, "programs": 1}
    check(random_batch(8, 300, torch.float32, device="cpu", temperature=50.0, top_k=290))


@pytest.mark.parametrize("programs", [1, 99])
@pytest.mark.parametrize(
    "how", [{}, {"top_k": 50}, {"top_k": 999, "top_p": 0.9}, {"top_p": 0.9}], ids=str
)
def test_a_few_tokens_far_from_what_is_sampled(how, programs, plan):
    batch = random_batch(3, 1000, torch.float32, device="cpu", **how)
    batch.logits_BV[:, :950] = -torch.inf
    batch.logits_BV[:, 955:980] = torch.nan
    plan["programs"] = programs
    assert min(check(batch)) >= 950


def test_the_two_zeros_are_equal():
    batch = random_batch(20, 37, torch.float32, device="cpu", temperature=1.0, top_k=2)
    logits_BV = torch.full((20, 37), -1.0)
    logits_BV[:, 3], logits_BV[:, 20], logits_BV[:, 30] = 1.0, 0.0, -0.0
    assert set(check(batch._replace(logits_BV=logits_BV)).tolist()) == {3, 20, 30}


@pytest.mark.parametrize(
    "how", [{}, {"top_k": 100}, {"top_p": 0.9}, {"top_k": 120, "top_p": 0.7, "min_p": 0.3}], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "short_of"), [(torch.float32, "CANDIDATES"), (torch.bfloat16, "ROOM")]
)
def test_flat_rows_are_searched_in_several_passes(how, dtype, short_of, plan, monkeypatch):
    monkeypatch.setattr(sampling_module, short_of, 32 if short_of == "CANDIDATES" else 2)
    torch.manual_seed(1)
    batch = random_batch(2, 300, dtype, device="cpu", **how)
    plan["programs"] = 1 if dtype == torch.float32 else 9
    check(batch._replace(logits_BV=batch.logits_BV * 0.1))


def test_every_row_has_its_own_way():
    torch.manual_seed(2)
    batch = random_batch(7, 300, torch.float32, device="cpu")
    mixed = Parameters(
        torch.tensor([0.0, 1.0, 0.5, 0.7, 1.0, 2.0, 1.0]),
        torch.tensor([0, 0, 5, 0, 0, 1, 299], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.6, 1.0, 0.3, 0.99]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0]),
        batch.parameters.seed_N,
    )
    check(batch._replace(parameters=mixed))


def test_ties():
    """The first of the largest; all of the k-th; equal probabilities stay together."""
    logits_BV = torch.zeros(20, 37)
    logits_BV[:, [7, 30]] = 2.0
    logits_BV[:, [10, 11, 36]] = 1.9
    batch = random_batch(20, 37, torch.float32, device="cpu", temperature=0.5, top_k=3)
    tokens_B = check(batch._replace(logits_BV=logits_BV))
    assert set(tokens_B.tolist()) == {7, 30, 10, 11, 36}
    batch.parameters.temperature_N.zero_()
    assert set(check(batch._replace(logits_BV=logits_BV)).tolist()) == {7}


@pytest.mark.parametrize(
    "how", [{"top_k": 3}, {"top_p": 0.55}, {"min_p": 0.8}, {"top_k": 4, "top_p": 0.6}], ids=str
)
def test_what_is_drawn_is_all_of_what_is_kept(how):
    torch.manual_seed(3)
    logits_V = torch.full((37,), -9.0).index_copy(0, torch.randperm(37)[:5], torch.rand(5) / 2)
    batch = random_batch(20, 37, torch.float32, device="cpu", temperature=1.0, **how)
    batch = batch._replace(logits_BV=logits_V.expand(20, 37))
    kept_BV = kept_reference(
        batch.logits_BV[:1].double(), *(t[:1].double() for t in batch.parameters[1:4])
    )
    found_B = torch.empty_like(batch.out_B)
    sample(batch.logits_BV, batch.parameters, batch.position_B, out=found_B, impl="triton")
    assert set(found_B.tolist()) == set(kept_BV[0].nonzero()[:, 0].tolist())


def test_nothing_left_and_not_a_number():
    batch = random_batch(3, 37, torch.float32, device="cpu", top_k=3)
    batch.logits_BV[0] = -torch.inf
    batch.logits_BV[1, 5:] = torch.nan
    batch.parameters.temperature_N[2] = 0
    batch.logits_BV[2, ::2] = torch.nan
    tokens_B = sample(batch.logits_BV, batch.parameters, batch.position_B, impl="triton")
    assert tokens_B[0] == 0
    assert tokens_B[1] < 5
    assert tokens_B[2] % 2 == 1


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("programs", [1, 99])
def test_nothing_left(how, programs, plan):
    batch = random_batch(2, 300, torch.bfloat16, device="cpu", **how)
    batch.logits_BV[0] = -torch.inf
    batch.logits_BV[:, ::3] = torch.nan
    batch.logits_BV[1] = torch.nan
    plan["programs"] = programs
    tokens_B = sample(batch.logits_BV, batch.parameters, batch.position_B, impl="triton")
    assert tokens_B.tolist() == [0, 0]


def test_one_token_and_no_rows():
    check(random_batch(2, 1, torch.float32, device="cpu", top_p=0.5))
    empty = random_batch(1, 37, torch.float32, device="cpu")
    none = Parameters(*(t[:0] for t in empty.parameters))
    assert sample(empty.logits_BV[:0], none, empty.position_B[:0], impl="triton").shape == (0,)


def test_rows_of_state_and_padding():
    torch.manual_seed(4)
    batch = random_batch(4, 300, torch.float32, device="cpu", top_k=20)
    rows_B = torch.tensor([3, -1, 0, 1])
    tokens_B = sample(
        batch.logits_BV, batch.parameters, batch.position_B, rows_B=rows_B, impl="triton"
    )
    mine = Parameters(*(t[rows_B.clamp(min=0)] for t in batch.parameters))
    exact_B = sample_reference(batch.logits_BV, mine, batch.position_B)
    assert tokens_B[1] == 0
    assert tokens_B[[0, 2, 3]].tolist() == exact_B[[0, 2, 3]].tolist()


@pytest.mark.parametrize(("vocabulary", "prompt"), [(37, True), (300, False)])
def test_penalties_and_mask(vocabulary, prompt):
    torch.manual_seed(5)
    logits_BV = 3 * torch.randn(3, vocabulary).bfloat16()
    penalties = random_penalties(4, vocabulary, "cpu")
    penalties.repetition_N[2], penalties.presence_N[2], penalties.frequency_N[2] = 1.0, 0.0, 0.0
    penalties = penalties if prompt else penalties._replace(prompt_NW=None)
    rows_B = torch.tensor([2, -1, 1], dtype=torch.int32)
    allowed_BW = torch.randint(-(2**31), 2**31, (3, words(vocabulary))).int()
    for mask in (None, allowed_BW):
        out_BV = torch.empty(3, vocabulary)
        poison(out_BV)
        penalize(logits_BV, penalties, rows_B=rows_B, allowed_BW=mask, out=out_BV, impl="triton")
        exact_BV = penalize_reference(logits_BV, penalties, rows_B, mask)
        torch.testing.assert_close(out_BV, exact_BV, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        penalize(logits_BV, allowed_BW=allowed_BW, impl="triton"),
        penalize_reference(logits_BV, None, rows_B, allowed_BW),
    )


def test_a_mask_decides_what_is_sampled():
    batch = random_batch(5, 300, torch.float32, device="cpu", temperature=1.0, top_k=3)
    allowed_BW = torch.zeros(5, words(300), dtype=torch.int32)
    allowed_BW[:, 2] = 1 << 5
    tokens_B = sample(
        batch.logits_BV, batch.parameters, batch.position_B, allowed_BW=allowed_BW, impl="triton"
    )
    assert tokens_B.tolist() == [69] * 5


def test_counting_tokens():
    penalties = random_penalties(3, 37, "cpu")
    before_NV = penalties.counts_NV.clone()
    count(penalties, torch.tensor([5, 5, 9, 30]), torch.tensor([2, -1, 0, 2]), impl="triton")
    before_NV[2, 5] += 1
    before_NV[0, 9] += 1
    before_NV[2, 30] += 1
    assert torch.equal(penalties.counts_NV, before_NV)
    assert isinstance(penalties, Penalties)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "n", "lanes", "parts"),
    [(1000, 0, 128, 8), (1000, 20, 128, 1), (1000, 20, 64, 4), (37, 32, 16, 2), (37, 32, 4, 8)],
)
def test_logprobs(dtype, vocabulary, n, lanes, parts):
    """With few lanes some of them hide a third of the likeliest; a part may have fewer columns than are asked for."""
    torch.manual_seed(6)
    logits_BV = (3 * torch.randn(4, vocabulary)).to(dtype)
    logits_BV[1, 3:10] = -torch.inf
    tokens_B = torch.tensor([0, vocabulary - 1, 3, 2])
    room = LogProbs(torch.empty(4), torch.empty(4, n), torch.empty(4, n, dtype=torch.int32))
    poison(*room)
    with trying(
        "logprobs", logprob_module._key(vocabulary, dtype, n), {"lanes": lanes, "parts": parts}
    ):
        logprobs(logits_BV, tokens_B, n, out=room, impl="triton")
    exact = logprobs_reference(logits_BV, tokens_B, n)
    assert torch.equal(room.ids_Bn, exact.ids_Bn)
    assert relative_error(room.token_B, exact.token_B) < 1e-5
    finite = exact.top_Bn.isfinite()
    assert torch.equal(room.top_Bn.isfinite(), finite)
    assert relative_error(room.top_Bn[finite], exact.top_Bn[finite]) < 1e-5
