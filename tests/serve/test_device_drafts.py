"""Drafts that the device makes, known to the host only when they land: every request gets what it gets without them.

The device is a CPU here, and the reference of the kernel drafts. Steps overlap, so the host schedules behind drafts
that it does not know.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_speculation import FAMILY, ask, outcome, without_drafts
from tiny_engines import VOCABULARY, at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.kernels.sampling import draft_ngrams as kernel
from cairn.serve.engine import batch, request
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate import occurrences
from cairn.serve.engine.speculate.acceptance import Acceptance
from cairn.serve.engine.speculate.controller import Prospect, choose_drafts
from cairn.serve.engine.speculate.drafter import Ask
from cairn.serve.engine.speculate.grammar_tokens import GrammarDrafter
from cairn.serve.engine.speculate.ngram import NgramDrafter
from cairn.serve.engine.speculate.synthetic import make_synthetic_on_device, rates_of_length


class Dead(NgramDrafter):
    def propose(self, asks):
        raise RuntimeError("out of ideas")


def device_engine(drafts: int = 3, host: type[NgramDrafter] = NgramDrafter, **how: Any):
    drafter = GrammarDrafter(host())
    return tiny_engine(FAMILY, drafter=drafter, drafts=drafts, device_drafts=True, **how)


@pytest.mark.parametrize(
    "how",
    [
        dict(overlap=True, tight=True),
        dict(overlap=True, chunked=True, rows=3, host=Dead),
    ],
    ids=["preempted", "chunked, and nothing drafts on the host"],
)
def test_tokens_are_those_of_a_run_without_drafts(how):
    engine = device_engine(**how)
    speculation = engine.scheduler.speculation
    speculation._on_failure = lambda problem: None
    assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    assert speculation.failed is ("host" in how)
    counts = speculation.counts
    assert 0 < counts.accepted < counts.drafted
    at_rest(engine)


@functools.cache
def texts() -> list[tuple[list[int], list[int]]]:
    prompts = [prompt_of(5 + 9 * i, seed=i) for i in range(3)]
    return [(prompt, greedy(FAMILY, prompt, 18)) for prompt in prompts]


@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    right=st.lists(st.booleans(), min_size=1, max_size=9),
    drafts=st.integers(1, 5),
    tight=st.booleans(),
    stop=st.integers(0, 17),
)
def test_any_pattern_of_drafts_that_hold(monkeypatch, right, drafts, tight, stop):
    """Drafts that are right and wrong by a pattern, requests that stop anywhere, pages that run out."""
    pattern = itertools.cycle(right)

    def told(rows_B, bounds_B1, tokens_T, positions_T, text_NC, made_NK):
        for b, row in enumerate(rows_B.tolist()):
            first, end = bounds_B1[b : b + 2].tolist()
            tokens = tokens_T[first:end]
            if kernel.DRAFTED not in tokens.tolist():
                continue
            start = int(positions_T[first])
            whole = next(p + a for p, a in texts() if p[:5] == text_NC[row, :5].tolist())
            for i in range(1, end - first):
                truth = whole[start + i] if start + i < len(whole) else 0
                tokens[i] = truth if next(pattern) else (truth + 1) % VOCABULARY

    monkeypatch.setattr(batch, "draft_ngrams", told)
    engine = device_engine(drafts, overlap=True, tight=tight)
    stops = [texts()[1][1][stop]]
    requests = []
    for at, (prompt, _) in enumerate(texts()):
        own = {"stop_token_ids": stops} if at == 1 else {}
        params = SamplingParams(temperature=0.0, max_tokens=18 - at, **own)
        requests.append(Request(at, prompt, params))
        engine.add(requests[-1])
    engine.run()
    for at, (one, (_, answer)) in enumerate(zip(requests, texts(), strict=True)):
        wanted = answer[: 18 - at]
        if at == 1 and stops[0] in wanted:
            wanted = wanted[: wanted.index(stops[0]) + 1]
        assert one.outputs == wanted
    at_rest(engine)


def test_the_device_drafts_what_the_host_does():
    """`NgramDrafter` is the same rule with an index over the text."""
    assert (kernel.SHORTEST, kernel.LONGEST) == (occurrences.SHORTEST, occurrences.LONGEST)
    assert kernel.DRAFTED == request.DRAFTED
    torch.manual_seed(0)
    drafted = 0
    for length in range(1, 90):
        text = torch.randint(0, 2 + length % 7, (length,)).tolist()
        asked = Ask(Request(length, text, SamplingParams()), [], 5)
        host = NgramDrafter().propose([asked])[0]
        assert kernel.drafts_of(text, 5) == (host or [0] * 5)
        drafted += bool(host)
    assert drafted > 40


def test_drafts_that_are_wrong_are_soon_given_up():
    """Under a rule that chooses: a fraction of the steps verifies, and those that could pay again are tried."""
    engine = device_engine(4, overlap=True)
    speculation = engine.scheduler.speculation
    speculation.seconds, speculation.widths = lambda tokens: 1.0, (1, 5)
    speculation.wait_s = 0.15
    make_synthetic_on_device(engine.runner, [0.0] * 4)
    request = submit(engine, [prompt_of(9, seed=2)], max_tokens=150)[0]
    engine.run()
    assert len(request.outputs) == 150
    assert 0 < speculation.counts.runs < 30
    assert speculation.counts.accepted == 0


@pytest.mark.parametrize("length", [2.2, 3.0])
def test_synthetic_draws_have_the_length_that_was_asked_for(length):
    engine = device_engine(4, overlap=True)
    make_synthetic_on_device(engine.runner, rates_of_length(length, 4))
    submit(engine, [prompt_of(9, seed=2)], max_tokens=150)
    engine.run()
    assert engine.scheduler.speculation.counts.length == pytest.approx(length, abs=0.15)


@pytest.mark.parametrize("longer", [0.02, 0.05, 0.1, 0.19, 0.4, 0.8])
def test_a_controller_loses_little_where_nothing_holds_and_nothing_where_all_does(longer):
    """Of one request: 256 tokens with drafts that are always wrong, then with drafts that are always right."""
    own, spent = Acceptance(), 0.0
    for _ in range(256):
        drafts = choose_drafts([Prospect(own.rate, 7)], lambda tokens: 1.0, (1, 2, 4, 8), longer)[0]
        spent += 1.0 + (longer if drafts else 0.0)
        own.note(drafts, 0)
    assert 256 / spent > 0.985
    steps, tokens = 0, 0
    while tokens < 256:  # the text begins to repeat itself
        drafts = choose_drafts([Prospect(own.rate, 7)], lambda tokens: 1.0, (1, 2, 4, 8), longer)[0]
        tokens, steps = tokens + 1 + drafts, steps + 1
        own.note(drafts, drafts)
    assert tokens / steps > 2.0
