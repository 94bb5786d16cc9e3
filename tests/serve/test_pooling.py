"""Prompts as vectors: the engine's against the hidden states of one plain pass, whatever else the engine does."""

import numpy as np
import pytest
import torch
from tiny_engines import at_rest, greedy, model, prompt_of, submit, tiny_engine

from cairn.core.errors import RequestError
from cairn.models.attend import PackedDocuments
from cairn.serve.engine.sampling_params import SamplingParams

LENGTHS = (1, 5, 16, 17, 33, 60)
SHARED = prompt_of(40, seed=1)


@torch.inference_mode()
def vector(family, prompt, pooling):
    attend = PackedDocuments([len(prompt)])
    hidden_TD = model(family)(torch.tensor(prompt), attend.positions_T(), attend)
    return (hidden_TD.double().mean(0) if pooling == "mean" else hidden_TD[-1]).numpy()


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-4)


def drain(engine):
    """Take the vectors as whoever reads the outputs does."""
    found = {}
    while engine.has_work:
        for output in engine.step():
            vector_D = engine.pools.pop(output.request)
            if vector_D is not None:
                found[output.request] = vector_D
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("switches", [{}, {"chunked": True}, {"tight": True, "overlap": True}])
def test_vectors_are_those_of_one_pass_and_generation_goes_on_beside_them(family, switches):
    engine = tiny_engine(family, **switches)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    prompts += [SHARED, SHARED[:35]]  # of a prefix that others have cached
    talk = submit(engine, [SHARED, prompt_of(20, seed=9)], max_tokens=10)
    pooled = []
    for at, prompt in enumerate(prompts):
        pooling = ("mean", "last")[at % 2]
        pooled += submit(engine, [prompt], max_tokens=1, pooling=pooling)
    found = drain(engine)
    assert set(found) == set(pooled)
    for request in pooled:
        close(found[request], vector(family, request.prompt, request.params.pooling))
        assert request.cached == 0
    for request in talk:
        assert request.outputs == greedy(family, request.prompt, 10)
    assert len(engine.pools) == 0
    at_rest(engine)


def test_a_request_that_is_preempted_or_aborted_leaves_no_half_of_a_vector():
    engine = tiny_engine("llama", pages=9, budget=8)
    submit(engine, [prompt_of(28, seed=6)], max_tokens=20)  # grows while the next one is computed
    prompts = [prompt_of(100, seed=3), prompt_of(70, seed=4), prompt_of(50, seed=5)]
    requests = submit(engine, prompts, max_tokens=1, pooling="mean")
    while requests[0].computed < 20:
        engine.step()
    assert len(engine.pools) == 1
    assert engine.abort(requests[2].id) is requests[2]
    found = drain(engine)
    assert requests[0].ledger.preemptions == 1
    assert set(found) == set(requests[:2])
    for request in requests[:2]:
        close(found[request], vector("llama", request.prompt, "mean"))
    assert len(engine.pools) == 0
    at_rest(engine)


def test_a_step_that_fails_takes_its_vectors_along():
    engine = tiny_engine("llama", chunked=True, budget=16)
    [request] = submit(engine, [prompt_of(40, seed=2)], max_tokens=1, pooling="mean")
    engine.step()
    assert len(engine.pools) == 1

    def broken(step):
        raise RuntimeError("no")

    engine.runner.launch = broken
    drain(engine)
    assert request.finish == "error"
    assert len(engine.pools) == 0


def test_a_pooling_that_does_not_exist():
    with pytest.raises(RequestError, match="pooling is 'median'"):
        SamplingParams(pooling="median")


@pytest.mark.gpu
@pytest.mark.parametrize("switches", [{}, {"plain": True}, {"max_num_batched_tokens": 96}])
def test_on_a_gpu(switches):
    from cairn.models.runnable import open_model
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start_with

    opened = open_model("random:tiny")
    runnable = opened.load("cuda", "bfloat16")
    config = EngineConfig(
        model="random:tiny", device="cuda", max_model_len=512, max_num_seqs=16, **switches
    )
    engine = start_with(opened, runnable, config).engine
    prompts = [prompt_of(length, seed=length) for length in (1, 64, 65, 300)]
    requests = submit(engine, prompts, max_tokens=1, pooling="mean")
    requests += submit(engine, prompts, max_tokens=1, pooling="last")
    found = drain(engine)
    for request in requests:
        attend = PackedDocuments([len(request.prompt)], "cuda")
        with torch.inference_mode():
            tokens_T = torch.tensor(request.prompt, device="cuda")
            hidden_TD = runnable.model(tokens_T, attend.positions_T(), attend).float()
        mean = request.params.pooling == "mean"
        expected = (hidden_TD.mean(0) if mean else hidden_TD[-1]).cpu().numpy()
        cosine = (
            expected @ found[request] / np.linalg.norm(expected) / np.linalg.norm(found[request])
        )
        assert cosine > 0.995  # of bfloat16, by other kernels
