"""Scales of a float8 cache: known, or measured once with room above; a CPU and bad numbers are refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.models.runnable import open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.start import start_with

E4M3 = torch.float8_e4m3fn


@given(largest=st.floats(1e-3, 1e4), growth=st.floats(0.01, 1.9))
def test_values_up_to_twice_as_large_are_stored_within_half_a_step(largest, growth):
    scales = CacheScales(3, "cpu")
    scales.measure(1, torch.tensor([[largest, -largest / 2]]), torch.tensor([[0.0, largest]]))
    k_scale, v_scale = scales.of_layer(1)
    value = torch.tensor([largest * growth])
    for scale in (k_scale, v_scale):
        stored = (value / scale).clamp(-448, 448).to(E4M3).float() * scale
        assert abs(float(stored - value)) <= float(value) / 15
    assert torch.equal(scales.factors_L2[0], torch.ones(2))


def test_a_graph_reads_what_is_measured_later():
    scales = CacheScales(2, "cpu")
    before, _ = scales.of_layer(0)
    scales.measure(0, torch.full((4,), 3.0), torch.zeros(4))
    assert before.data_ptr() == scales.of_layer(0)[0].data_ptr()
    assert float(before) == pytest.approx(6 / 448)
    assert float(scales.of_layer(0)[1]) > 0  # of nothing but zeros
    assert "first prompts" in scales.note()
    assert "the checkpoint" in CacheScales(1, "cpu", [(0.5, 0.25)]).note()


@pytest.mark.parametrize("known", [[(1.0, 0.0)], [(math.nan, 1.0)], [(1.0, 1.0), (1.0, 1.0)]])
def test_scales_that_cannot_be_are_refused(known):
    with pytest.raises(ConfigError, match="scales"):
        CacheScales(1, "cpu", known)


@pytest.mark.parametrize(
    ("option", "wrong"), [({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"), ({"head": "8bit"}, "head")]
)
def test_a_cpu_has_no_eight_bits(option, wrong):
    opened = open_model("random:tiny")
    config = EngineConfig(model="random:tiny", device="cpu", max_model_len=128, **option)
    with pytest.raises(ConfigError, match=wrong):
        start_with(opened, opened.load("cpu", "float32"), config)
    with pytest.raises(ConfigError, match=wrong):
        EngineConfig(model="random:tiny", **dict.fromkeys(option, "int3"))
