"""What a request asks for is what it gets: log-probabilities, seeds, penalties, biases, stops; against brute force."""

import math

import pytest
import torch
from tiny_engines import all_logits, at_rest, greedy, model, prompt_of, submit, tiny_engine

from cairn.models.attend import KVCache
from cairn.models.generate import next_logits
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams

FAMILY = "qwen3"
SHARED = prompt_of(37, seed=1)
CROWD = [prompt_of(n, seed=n) for n in (3, 21, 40)]


def brute_force(prompt: list[int], params: SamplingParams, eos: int | None = None) -> list[int]:
    """Token by token, with every rule written out as its definition says."""
    net = model(FAMILY)
    cache = KVCache(net.spec, len(prompt) + 64, torch.float32, "cpu")
    outputs: list[int] = []
    stops = {*params.stop_token_ids, *([] if eos is None or params.ignore_eos else [eos])}
    step = prompt
    while len(outputs) < (params.max_tokens or 0):
        scores = next_logits(net, torch.tensor(step), cache).tolist()
        for token, bias in (params.logit_bias or {}).items():
            scores[token] += bias
        if len(outputs) < params.min_tokens:
            for token in stops | ({eos} if eos is not None else set()):
                scores[token] = -math.inf
        for token in {*prompt, *outputs}:
            weight = params.repetition_penalty
            scores[token] = scores[token] / weight if scores[token] > 0 else scores[token] * weight
        for token in set(outputs):
            count = outputs.count(token)
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
        chosen = max(range(len(scores)), key=lambda token: (scores[token], -token))
        outputs.append(chosen)
        if chosen in stops and len(outputs) >= params.min_tokens:
            break
        step = [chosen]
    return outputs


FREE = greedy(FAMILY, SHARED, 14)
RULES = {
    "repetition": dict(repetition_penalty=1.7),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=0.8),
    "negative": dict(frequency_penalty=-0.7, presence_penalty=-0.3),
    "bias": dict(logit_bias={FREE[0]: -100.0, 7: 1.5, 8: 1.4}),
    "stop": dict(stop_token_ids=[FREE[5]]),
    "stop later": dict(stop_token_ids=[FREE[2]], min_tokens=6),
    "all": dict(
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        min_tokens=3,
        logit_bias={5: 2.0, FREE[1]: -3.0},
        stop_token_ids=[FREE[0], FREE[3]],
    ),
}


@pytest.mark.parametrize(
    "switches", [{}, {"overlap": True, "chunked": True, "tight": True}], ids=["plain", "all on"]
)
def test_penalties_biases_and_stops_are_those_of_brute_force(switches):
    engine = tiny_engine(FAMILY, **switches)
    requests = []
    for rules in RULES.values():
        requests += submit(engine, [SHARED], **rules)
    requests += submit(engine, CROWD)  # others, without a wish
    engine.run()
    for request in requests:
        assert request.outputs == brute_force(request.prompt, request.params)
    stopped = dict(zip(RULES, requests, strict=False))["stop"]
    assert (stopped.finish, stopped.stop_reason) == ("stop", FREE[5])
    assert stopped.outputs == FREE[: FREE.index(FREE[5]) + 1]
    if switches:
        assert sum(request.ledger.preemptions for request in requests) > 0
    at_rest(engine)


def test_a_bias_may_be_a_whole_number():
    engine = tiny_engine(FAMILY)
    (request,) = submit(engine, [SHARED], logit_bias={7: 100}, max_tokens=2)
    engine.run()
    assert request.outputs == [7, 7]


def test_the_end_of_sequence_waits_for_min_tokens_and_can_be_ignored():
    engine = tiny_engine(FAMILY, overlap=True)
    eos = FREE[3]
    settings = [
        dict(),
        dict(min_tokens=8),
        dict(ignore_eos=True),
        dict(ignore_eos=True, min_tokens=8),
    ]
    requests = []
    for i, rules in enumerate(settings):
        params = SamplingParams(temperature=0.0, max_tokens=12, **rules)
        requests.append(Request(i, SHARED, params, eos_ids=[eos]))
        engine.add(requests[-1])
    engine.run()
    for request in requests:
        assert request.outputs == brute_force(SHARED, request.params, eos)
    assert (requests[0].finish, requests[0].stop_reason) == ("stop", None)
    assert requests[0].outputs == FREE[: FREE.index(eos) + 1]
    assert requests[2].finish == "length"


def test_logprobs_are_the_log_softmax_of_the_reference_s_logits():
    engine = tiny_engine(FAMILY, chunked=True, overlap=True)
    wanted = submit(engine, [SHARED], logprobs=3) + submit(engine, [CROWD[2]], logprobs=0)
    wanted += submit(engine, [SHARED], logprobs=20, temperature=1.3, seed=5)
    # Raw ones, whatever was done to the logits before the token was chosen.
    wanted += submit(engine, [SHARED], logprobs=2, logit_bias={7: 50.0}, repetition_penalty=1.3)
    silent = submit(engine, CROWD)
    found = {}
    for output in engine.run():
        if output.request in wanted:
            found.setdefault(output.request, []).extend(output.logprobs)
        else:
            assert output.logprobs is None
    assert {len(request.outputs) for request in silent} == {14}
    for request in wanted:
        start = len(request.prompt) - 1
        logits = all_logits(model(FAMILY), request.prompt + request.outputs)[start:-1]
        expected = logits.double().log_softmax(-1)
        for row, token, entry in zip(expected, request.outputs, found[request], strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=2e-5)
            likeliest = row.topk(request.params.logprobs)
            assert [t for t, _ in entry.top] == likeliest.indices.tolist()
            assert [p for _, p in entry.top] == pytest.approx(likeliest.values.tolist(), abs=2e-5)


@pytest.mark.parametrize("chunked", [False, True])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first(chunked):
    engine = tiny_engine(FAMILY, chunked=chunked, overlap=True)
    submit(engine, [SHARED])
    engine.run()  # pages that could be found, and must not be used
    prompts = [SHARED, [4], prompt_of(50, seed=9)]
    requests = submit(engine, prompts, prompt_logprobs=2, max_tokens=2)
    engine.run()
    for request in requests:
        expected = all_logits(model(FAMILY), request.prompt).double().log_softmax(-1)
        entries = engine.prompt_logprobs.pop(request, [])
        assert len(entries) == len(request.prompt) - 1
        for row, token, entry in zip(expected[:-1], request.prompt[1:], entries, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=2e-5)
            assert [t for t, _ in entry.top] == row.topk(2).indices.tolist()
    at_rest(engine)


@pytest.mark.parametrize("chunked", [False, True])
def test_prompt_logprobs_from_a_token_on_take_pages_before_it_from_the_cache(chunked):
    engine = tiny_engine(FAMILY, chunked=chunked, overlap=True)
    submit(engine, [SHARED])
    engine.run()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    requests = [Request(100 + at, SHARED, params, scored_from=at) for at in (1, 30, 36)]
    for request in requests:
        engine.add(request)
    engine.run()
    expected = all_logits(model(FAMILY), SHARED).double().log_softmax(-1)
    whole = [row[token].item() for row, token in zip(expected[:-1], SHARED[1:], strict=True)]
    for request in requests:
        entries = engine.prompt_logprobs.pop(request)
        least = request.scored_from
        assert [one.logprob for one in entries] == pytest.approx(whole[least - 1 :], abs=2e-5)
        assert request.cached < least
    assert [bool(request.cached) for request in requests] == [False, True, True]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    wish = dict(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, max_tokens=14)
    alone = tiny_engine(FAMILY)
    mine = {seed: submit(alone, [SHARED], seed=seed, **wish) for seed in (0, 1, 2**63 - 1)}
    alone.run()
    for switches in (
        {},
        {"chunked": True, "tight": True, "overlap": True},
        {"prefix": False, "overlap": True},
    ):
        engine = tiny_engine(FAMILY, **switches)
        crowd = submit(engine, CROWD, temperature=2.0)
        again = {seed: submit(engine, [SHARED], seed=seed, **wish) for seed in mine}
        submit(engine, CROWD[::-1], temperature=0.5, seed=3)
        engine.run()
        for seed, (request,) in again.items():
            assert request.outputs == mine[seed][0].outputs
        assert {len(request.outputs) for request in crowd} == {14}
    assert len({tuple(r.outputs) for (r,) in mine.values()}) == 3  # seeds differ


def test_without_a_seed_every_answer_is_different():
    engine = tiny_engine(FAMILY, overlap=True)
    requests = submit(engine, [SHARED] * 6, temperature=1.0)
    engine.run()
    assert len({tuple(request.outputs) for request in requests}) == 6


def test_identical_prompts_of_one_step_share_pages_and_answers():
    engine = tiny_engine(FAMILY, overlap=True)
    requests = submit(engine, [SHARED] * 5)
    engine.step()
    tables = [request.blocks for request in requests]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 5
    engine.run()
    assert {tuple(request.outputs) for request in requests} == {tuple(FREE)}
    assert [request.cached for request in requests] == [0, 32, 32, 32, 32]
