"""On a GPU: the engine computes the model, and a broken product is named by its layer."""

import pytest
from planted import TINY

from cairn.models.runnable import open_model
from cairn.serve.capture import Captured, CapturedAnswer, digest_of
from cairn.serve.config import EngineConfig
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.verify.replay import replay
from cairn.verify.run import EngineOptions, expected_level, gather, judge

pytestmark = pytest.mark.gpu


def test_the_engine_computes_the_model_in_bfloat16():
    opened = open_model(str(TINY))
    engine = EngineOptions(device="cuda")
    evidence = gather(opened, engine, None)
    verdict = judge(opened, evidence, expected_level(opened, engine), lambda said: None, "cuda")
    print(verdict)
    assert verdict.status == "agrees"


def captured(count=24):
    prompt = open_model(str(TINY)).tokenizer.encode("Once upon a time there was a small stone.")
    params = SamplingParams(temperature=0.0, max_tokens=count, seed=1)
    answer = CapturedAnswer(
        prompt=prompt, params=params, tokens=[0] * count, finish="length", digest=""
    )
    config = EngineConfig(model=str(TINY), device="cuda", num_gpu_blocks_override=64)
    return Captured(id="one", engine=config, device="cuda", versions={}, answers=[answer])


def test_a_replay_repeats_itself_and_names_a_broken_layer():
    one = captured()
    (first,) = replay(one)
    assert first.departure is None, first
    (again,) = replay(one)
    assert again.fast_digest == first.fast_digest

    def broken(engine):
        engine.runner.model.layers[5].feed_forward.down.matrices()[0].data[::7] *= 3.0

    (found,) = replay(one, prepare=broken)
    print(first.errors, found.errors)
    assert found.departure is not None
    assert found.departure.layer == 5
    assert digest_of([0] * 24) != first.fast_digest
