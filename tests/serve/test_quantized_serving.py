"""A quantised checkpoint in an engine: what it is checked against, what is held, and what cannot follow."""

from pathlib import Path

import msgspec
import pytest
import torch

from cairn.core.errors import ConfigError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.maps import held_bytes
from cairn.models.runnable import OpenModel, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.start import stays_packed, with_quantization
from cairn.serve.engine.weights_in_place import replace_weights

FOLDER = Path(__file__).parent.parent / "quantized_checkpoints"
W4 = str(FOLDER / "w4a16")


def opened_w4() -> OpenModel:
    checkpoint = open_checkpoint(Path(W4))
    return OpenModel(W4, checkpoint.spec, None, (), checkpoint)


def configured(model: str = W4, **settings) -> EngineConfig:
    config = EngineConfig(model=model, **settings)
    return with_quantization(config, opened_w4() if model == W4 else open_model(model))


def test_quantization_is_checked_against_the_checkpoint():
    assert configured().weights == "auto"
    assert configured(quantization="compressed_tensors").quantization == "compressed-tensors"
    with pytest.raises(
        ConfigError, match=r"quantization is gptq, and .*w4a16 is compressed-tensors"
    ):
        configured(quantization="gptq_marlin")
    with pytest.raises(ConfigError, match="one of compressed-tensors, gptq"):
        EngineConfig(model=W4, quantization="bitsandbytes")


def test_some_schemes_make_a_checkpoint_in_floating_point_so():
    assert configured("random:qwen3-0.6b", quantization="fp8").weights == "fp8"
    assert configured("random:qwen3-0.6b", quantization="w4a16").weights == "w4a16"
    with pytest.raises(ConfigError, match=r"quantization is awq, and .* is in floating point"):
        configured("random:qwen3-0.6b", quantization="awq")
    with pytest.raises(ConfigError, match="quantization is fp8, and weights is int8"):
        configured("random:qwen3-0.6b", quantization="fp8", weights="int8")


def test_planes_stay_packed_on_a_gpu_unless_floats_are_asked_for():
    config, opened = EngineConfig(model=W4), opened_w4()
    assert stays_packed(config, "cuda:0", opened)
    assert not stays_packed(config, "cpu", opened)
    for changed in ({"weights": "float"}, {"plain": True}, {"batch_invariant": True}):
        assert not stays_packed(msgspec.structs.replace(config, **changed), "cuda", opened)


def test_a_packed_model_says_its_bytes_and_refuses_other_weights():
    opened = opened_w4()
    packed, plain = (opened.load("cpu", "float32", packed=kept) for kept in (True, False))
    # A byte for each level where bfloat16 has two: the plain form keeps no nibbles.
    assert held_bytes(packed.model) < 0.6 * held_bytes(plain.model)
    assert packed.bytes_per_token() < 0.6 * plain.bytes_per_token()
    with pytest.raises(ConfigError, match=r"packed when it started \(PlanesForm\)"):
        replace_weights(packed.model, 2, W4)


def test_the_scales_of_the_cache_come_from_the_checkpoint():
    checkpoint = open_checkpoint(FOLDER / "fp8-dynamic")
    opened = OpenModel("fp8", checkpoint.spec, None, (), checkpoint)
    runnable = opened.load("cpu", "float32")
    scales = CacheScales(1, "cpu", runnable.cache_scales)
    assert scales.factors_L2.tolist() == [
        [pytest.approx(0.02, rel=0.01), pytest.approx(0.03, rel=0.01)]
    ]
    assert "from the checkpoint" in scales.note()
    assert opened_w4().load("cpu", "float32").cache_scales is None


def test_weights_of_a_quantised_checkpoint_replace_floats():
    opened = opened_w4()
    model = opened.load("cpu", "float32").model
    expected = model.layers[0].feed_forward.down.weight.clone()
    with torch.no_grad():
        model.layers[0].feed_forward.down.weight.zero_()
    replace_weights(model, 2, W4)
    assert torch.equal(model.layers[0].feed_forward.down.weight, expected)
