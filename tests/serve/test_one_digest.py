"""In the batch-invariant mode a request has one digest: cold, warm, chunked, preempted and drafted."""

import pytest
from noisy_drafter import NoisyDrafter
from tiny_engines import fixed_model

from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.capture import digest_of
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

TOKENS = 18
WAYS = {
    "cold": dict(enable_prefix_caching=False),
    "warm": {},
    "chunked": dict(long_prefill_token_threshold=24, max_num_batched_tokens=64),
    "preempted": dict(num_gpu_blocks_override=13, max_num_batched_tokens=256),
    "drafted": {},
}


def prompts(count):
    """They share a beginning that is longer than a page."""
    return [
        [(7 * i) % 200 + 1 for i in range(70)]
        + [(n * 31 + 5 * i) % 200 + 1 for i in range(20 + 9 * n)]
        for n in range(count)
    ]


def answers(loaded, count, page, ways, **drafts):
    """Digests of all answers, and how often somebody was preempted."""
    opened, runnable = loaded
    base = dict(model="cairn-tiny", block_size=page, max_num_seqs=8, batch_invariant=True)
    base["num_gpu_blocks_override"] = 64
    engine = start_with(opened, runnable, EngineConfig(**base | ways), **drafts).engine
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for _ in range(1 if "enable_prefix_caching" in ways else 2):  # the second time from the cache
        requests = [Request(n, prompt, params) for n, prompt in enumerate(prompts(count))]
        for request in requests:
            engine.add(request)
        engine.run()
        assert [len(request.outputs) for request in requests] == [TOKENS] * count
    return (
        {n: digest_of(request.outputs) for n, request in enumerate(requests)},
        {n: list(request.outputs) for n, request in enumerate(requests)},
        sum(request.ledger.preemptions for request in requests),
        sum(request.cached for request in requests),
    )


def check_all_ways(loaded, count, page):
    opened = loaded[0]
    expected, tokens, _, cached = answers(loaded, count, page, WAYS["cold"])
    assert cached == 0
    for way in ("warm", "chunked", "preempted", "drafted"):
        ways, drafts = WAYS[way], {}
        if way == "drafted":
            drafter = NoisyDrafter(tokens, 0.7, opened.spec.vocab)
            drafts = dict(drafter=drafter, drafts=3)
        found, _, preempted, cached = answers(loaded, count, page, ways, **drafts)
        assert found == expected, way
        assert way != "preempted" or preempted
        assert way != "warm" or cached


def test_a_request_has_one_digest_on_a_cpu():
    model = fixed_model("llama")
    opened = OpenModel("llama", model.spec, None, (), None)
    check_all_ways((opened, Runnable("llama", model, "a test")), 3, 16)


@pytest.mark.gpu
def test_a_request_has_one_digest_on_a_gpu():
    WAYS["preempted"]["num_gpu_blocks_override"] = 40
    opened = open_model("cairn-tiny")
    check_all_ways((opened, opened.load("cuda", "bfloat16")), 8, 16)
