"""What single requests ask for beside the common parameters, against a loop over the vocabulary; and its cost."""

import random

import numpy as np
import pytest
import torch

from cairn.core.errors import RequestError
from cairn.serve.engine import sampler as sampler_module
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampler import Sampler
from cairn.serve.engine.sampling_params import MOST_BIASES, MOST_STOP_TOKENS, SamplingParams

VOCABULARY, ROWS, EOS = 100, 6, 3


class Mask:
    """A grammar that allows these tokens, whatever came before."""

    def __init__(self, allowed):
        bits = np.zeros(-(-VOCABULARY // 32) * 32, dtype=np.uint8)
        bits[list(allowed)] = 1
        self.allowed, self._words_W = allowed, np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self):
        return self._words_W


def made(draw):
    """A request that asks for any of it, at any place of its answer."""
    fields = {}
    if draw.random() < 0.6:
        tokens = draw.sample(range(VOCABULARY), draw.choice([1, 5, VOCABULARY]))
        fields["logit_bias"] = {token: draw.uniform(-100, 100) for token in tokens}
    if draw.random() < 0.5:
        fields["min_tokens"] = 4
        fields["stop_token_ids"] = draw.sample(range(VOCABULARY), draw.choice([0, 3, 60]))
    allowed = draw.sample(range(VOCABULARY), draw.choice([1, 2, 50]))
    constraint = Mask({*allowed}) if draw.random() < 0.4 else None
    params = SamplingParams(temperature=0, max_tokens=9, **fields)
    request = Request(0, [1, 2], params, eos_ids=[EOS], constraint=constraint)
    request.outputs = [7] * draw.choice([0, 3, 4])
    request.total = len(request.prompt) + len(request.outputs) + 1
    return request


def wanted(request, logits):
    """The likeliest token, by the definitions."""
    scores, params, mask = list(map(float, logits)), request.params, request.constraint
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    allowed = {*range(VOCABULARY)} if mask is None else mask.allowed
    if len(request.outputs) < params.min_tokens:
        ends = {EOS, *params.stop_token_ids}
        allowed = allowed - ends or (allowed if mask is not None else set())
    return max(allowed, key=lambda token: scores[token], default=None)


def test_every_special_draw_is_the_likeliest_token_by_the_definitions():
    """Rows are given to one request after another, and requests share a step with plain ones."""
    draw, sampler = random.Random(7), Sampler(ROWS, VOCABULARY, "cpu")
    torch.manual_seed(7)
    requests = [made(draw) for _ in range(ROWS)]
    for request, row in zip(requests, range(ROWS), strict=True):
        request.row = row
        sampler.admit(request)
    seen = 0
    for _ in range(400):
        row = draw.randrange(ROWS)
        requests[row] = made(draw)
        requests[row].row = row
        sampler.admit(requests[row])
        sampler.flush()
        step = draw.sample(requests, draw.randrange(1, ROWS + 1))
        logits_SV = torch.randn(len(step), VOCABULARY) * 3
        before_SV = logits_SV.clone()
        rows_S = torch.tensor([request.row for request in step], dtype=torch.int32)
        position_S = torch.tensor([request.total - 1 for request in step], dtype=torch.int32)
        tokens_S = sampler.sample(logits_SV, position_S, rows_S)
        sampler.sample_special(logits_SV, position_S, rows_S, tokens_S, step)
        for request, token, logits in zip(step, tokens_S.tolist(), logits_SV, strict=True):
            assert token == wanted(request, logits)
            seen += 1
        assert torch.equal(logits_SV, before_SV)  # log-probabilities need them
    assert seen > 1000


def test_a_step_copies_nothing_of_a_bias_to_the_device(monkeypatch):
    """However large it is: what it needs was made when the request got its row."""
    sampler, bias = Sampler(ROWS, 10_000, "cpu"), dict.fromkeys(range(MOST_BIASES), 1.0)
    params = SamplingParams(
        logit_bias=bias, stop_token_ids=list(range(MOST_STOP_TOKENS)), min_tokens=9
    )
    requests = [Request(at, [1], params, eos_ids=[EOS]) for at in range(2)]
    for row, request in enumerate(requests):
        request.row, request.total = row, 2
        sampler.admit(request)
    sampler.flush()
    sent = []
    original = Sampler._sent

    def counted(self, values, dtype):
        sent.append(len(values))
        return original(self, values, dtype)

    monkeypatch.setattr(sampler_module.Sampler, "_sent", counted)
    logits_SV = torch.randn(2, 10_000)
    rows_S = torch.tensor([0, 1], dtype=torch.int32)
    tokens_S = sampler.sample(logits_SV, rows_S, rows_S)
    sampler.sample_special(logits_SV, rows_S, rows_S, tokens_S, requests)
    assert sum(sent) <= 4 * len(requests)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logit_bias": dict.fromkeys(range(151_936), 1.0)}, "logit_bias has 151936 entries"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids has 1025 entries"),
    ],
)
def test_how_much_may_be_asked_for_is_bounded(fields, said):
    with pytest.raises(RequestError, match=said):
        SamplingParams(**fields)
