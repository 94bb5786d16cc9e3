"""What a model says about how it is sampled reaches the requests that say nothing."""

import json
import shutil

import pytest
import tiny_checkpoints
import tiny_tokenizers

from cairn.core.errors import ConfigError
from cairn.models.runnable import open_model
from cairn.models.sampling_defaults import sampling_defaults
from cairn.serve.config import EngineConfig
from cairn.serve.request_defaults import checked_defaults, with_defaults


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "cairn-tiny"])
def test_the_small_models_take_the_likeliest_token(name):
    assert sampling_defaults(name, {"temperature": 0.7}) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "do_sample": True, "temperature": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_length": 9},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        (
            {"min_p": 0.1, "repetition_penalty": 1.05, "temperature": True, "top_p": "0.9"},
            {"min_p": 0.1, "repetition_penalty": 1.05},
        ),
    ],
)
def test_the_fields_of_a_generation_config_that_are_taken(generation, expected):
    assert sampling_defaults("owner/name", generation) == expected


def test_a_folder_says_it_and_a_value_out_of_range_is_refused_with_its_file(tmp_path):
    folder = shutil.copytree(tiny_checkpoints.folder("llama"), tmp_path / "llama")
    tiny_tokenizers.save(folder, tiny_tokenizers.byte_level())
    file = folder / "generation_config.json"
    stated = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(stated | {"temperature": 0.6, "top_k": 20}))
    assert checked_defaults(open_model(str(folder))) == {"temperature": 0.6, "top_k": 20}
    file.write_text(json.dumps(stated | {"top_p": 1.5}))
    with pytest.raises(ConfigError, match=r"generation_config.json of .*: top_p is 1.5"):
        checked_defaults(open_model(str(folder)))
    assert checked_defaults(open_model(str(folder)), "vllm") == {}


@pytest.mark.parametrize(
    ("defaults", "given", "temperature"),
    [
        ({"temperature": 0.0}, {}, 0.0),
        ({"temperature": 0.0}, {"n": 2}, None),  # the API's own
        ({"temperature": 0.0}, {"n": 2, "temperature": 0.0}, 0.0),
        ({"temperature": 0.6}, {"n": 2}, 0.6),
        ({}, {"n": 2}, None),
    ],
)
def test_several_answers_are_not_made_at_temperature_0_unless_somebody_asks_for_it(
    defaults, given, temperature
):
    assert with_defaults(defaults, given).get("temperature") == temperature


def test_other_sources_of_defaults_are_refused():
    with pytest.raises(ConfigError, match="generation_config is folder"):
        EngineConfig(model="cairn-tiny", generation_config="folder")
