"""What goes wrong ends whom it concerns, with the real reason, and nothing is left behind."""

import os
import random

import pytest
import torch
from tiny_engines import VOCABULARY, at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.core.errors import RequestError
from cairn.serve.engine.request import Request
from cairn.serve.engine.runner import Flight
from cairn.serve.engine.sampling_params import SamplingParams

FAMILY = "llama"
SOAK = int(os.environ.get("CAIRN_SOAK_REQUESTS", "500"))  # the full soak: 5000


class Once:
    """Raises at the n-th call, and never again."""

    def __init__(self, function, at: int, problem: BaseException) -> None:
        self.function, self.left, self.problem = function, at, problem

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.problem
        return self.function(*args, **kwargs)


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("where", ["launch", "land"])
def test_a_step_that_fails_ends_its_own_requests_only(monkeypatch, where, at, overlap):
    engine = tiny_engine(FAMILY, overlap=overlap, budget=48)
    if where == "launch":
        engine.runner.launch = Once(engine.runner.launch, at, out_of_memory())
    else:
        land = Once(Flight.land, at, out_of_memory())
        monkeypatch.setattr(Flight, "land", lambda flight: land(flight))
    prompts = [prompt_of(n, seed=n) for n in (30, 30, 40, 44)]  # more than one step's budget
    requests = submit(engine, prompts, max_tokens=9)
    outputs = engine.run()
    failed = [request for request in requests if request.finish == "error"]
    fine = [request for request in requests if request.finish == "length"]
    assert failed
    assert len(failed) + len(fine) == len(requests)
    for request in failed:
        said, _, hint = request.error.partition(" (hint: ")
        assert said == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        assert "max_num_batched_tokens" in hint
        assert [out.finished for out in outputs if out.request is request].count(True) == 1
    if at == 1:
        assert fine  # those that were not in the first step
    later = submit(engine, prompts, max_tokens=9)
    engine.run()
    for request in [*fine, *later]:
        assert request.outputs == greedy(FAMILY, request.prompt, 9)
    at_rest(engine)


def test_pages_of_a_step_that_never_ran_are_not_found_later():
    engine = tiny_engine(FAMILY)
    engine.runner.launch = Once(engine.runner.launch, 1, out_of_memory())
    prompt = prompt_of(40, seed=5)
    (lost,) = submit(engine, [prompt])
    engine.run()
    (again,) = submit(engine, [prompt])
    engine.run()
    assert (lost.finish, again.cached, again.outputs) == ("error", 0, greedy(FAMILY, prompt))


def test_an_answer_that_outgrows_the_cache_fails_alone():
    engine = tiny_engine(FAMILY, pages=4, overlap=True)
    (large,) = submit(engine, [prompt_of(50, seed=1)], max_tokens=60)
    (small,) = submit(engine, [prompt_of(9, seed=2)])
    engine.run()
    assert large.finish == "error"
    assert "fill all 4 pages of 16 tokens" in str(large.error)
    assert large.outputs == greedy(FAMILY, large.prompt, 60)[: len(large.outputs)]
    assert small.outputs == greedy(FAMILY, small.prompt)
    at_rest(engine)


REFUSED = {
    "empty": ([], {}, "the prompt is empty"),
    "vocabulary": ([1, VOCABULARY], {}, "the vocabulary has 211 tokens"),
    "context": ([1] * 160, {}, "the prompt has 160 tokens, the context is 160"),
    "max_tokens": ([1] * 100, {"max_tokens": 100}, "exceed the context of 160"),
    "cache": ([1] * 130, {}, "needs 9 pages of 16, the whole cache has 8"),
    "stop": ([1], {"stop_token_ids": [500]}, "stop_token_ids holds 500"),
    "bias": ([1], {"logit_bias": {999: 1.0}}, "logit_bias holds 999"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_can_never_be_served_is_refused_at_once_and_others_go_on(case):
    prompt, params, message = case
    engine = tiny_engine(FAMILY, pages=8)
    (other,) = submit(engine, [prompt_of(5, seed=2)])
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add(Request("bad", prompt, SamplingParams(**params)))
    engine.run()
    assert other.outputs == greedy(FAMILY, other.prompt)
    at_rest(engine)


# -- the soak -----------------------------------------------------------------------------------


def random_request(chance: random.Random, id: int, prefixes: list[list[int]]) -> Request:
    prompt = chance.choice(prefixes)[: chance.randrange(0, 48)]
    prompt = prompt + [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 24))]
    most = chance.randrange(1, 24)
    params = SamplingParams(
        temperature=chance.choice([0.0, 0.0, 0.7, 1.5]),
        top_p=chance.choice([1.0, 0.8]),
        top_k=chance.choice([0, 1, 20]),
        min_p=chance.choice([0.0, 0.1]),
        seed=chance.choice([None, 3]),
        max_tokens=most,
        min_tokens=chance.randrange(0, most + 1),
        repetition_penalty=chance.choice([1.0, 1.0, 1.3]),
        presence_penalty=chance.choice([0.0, 0.0, 1.0]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
        logprobs=chance.choice([None, None, 0, 3]),
        prompt_logprobs=chance.choice([None, None, None, 1]),
        logit_bias=chance.choice([None, None, {3: -5.0, 200: 1.0}]),
        stop_token_ids=[chance.randrange(VOCABULARY) for _ in range(chance.choice([0, 0, 9]))],
    )
    return Request(
        id,
        prompt,
        params,
        priority=chance.choice([0, 0, 0, 1, -1]),
        salt=chance.choice(["", "", "a"]),
        eos_ids=[2],
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_soak(overlap, monkeypatch):
    """Random requests, aborts and failing steps, in a cache that is much too small."""
    chance = random.Random(7 + overlap)
    engine = tiny_engine(FAMILY, pages=10, rows=6, budget=40, overlap=overlap)
    launch = engine.runner.launch

    def sometimes(step):
        if chance.random() < 0.003:
            raise out_of_memory()
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", sometimes)
    prefixes = [prompt_of(48, seed=seed) for seed in range(3)]
    requests, ended, aborted, tokens = [], set(), set(), {}
    while len(requests) < SOAK // 2 or engine.has_work:
        if len(requests) < SOAK // 2 and chance.random() < 0.5:
            for _ in range(chance.randrange(1, 4)):
                requests.append(random_request(chance, len(requests), prefixes))
                engine.add(requests[-1])
        if requests and chance.random() < 0.08:
            request = engine.abort(chance.choice(requests).id)
            if request is not None:
                aborted.add(request)
        for out in engine.step():
            assert out.request not in ended | aborted  # nothing after the end
            if out.tokens:
                tokens.setdefault(out.request, []).extend(out.tokens)
            if out.finished:
                ended.add(out.request)
                engine.prompt_logprobs.pop(out.request, None)
        if engine.steps % 16 == 0:
            engine.scheduler.queues.check_integrity()
    assert {request.state for request in requests} == {"finished"}
    assert ended | aborted == set(requests)
    for request in requests:
        _check_ended(request, request in aborted)
        assert tokens.get(request, []) == request.outputs
    reasons = {request.finish for request in requests}
    assert reasons == {"stop", "length", "abort", "error"}
    assert sum(request.ledger.preemptions for request in requests) > 20
    at_rest(engine)


def _check_ended(request, aborted):
    most, least = request.params.max_tokens, request.params.min_tokens
    if aborted:
        assert request.finish == "abort"
    elif request.finish == "length":
        assert len(request.outputs) == most
    elif request.finish == "stop":
        assert request.outputs[-1] in request.stop_ids
        assert least <= len(request.outputs) <= most
        assert not request.stop_ids & set(request.outputs[max(least - 1, 0) : -1])
    else:
        assert "out of memory" in request.error or "fill all" in request.error
    plain = request.params.temperature == 0 and request.params.repetition_penalty == 1
    plain = plain and not (request.params.presence_penalty or request.params.frequency_penalty)
    if plain and not request.params.logit_bias and least == 0 and request.id % 5 == 0:
        expected = greedy(FAMILY, request.prompt, request.params.max_tokens)
        assert request.outputs == expected[: len(request.outputs)]
