"""A GGUF file behind the server: how requests that do not say are sampled, and what its conversations look like."""

import gguf_vocabularies
import live_server
import pytest
import tiny_gguf
import transformers

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}]
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOnce<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def write(tiny_folder, path, **metadata):
    """The tiny model as GGUF, without a chat template."""
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_folder)
    keys = gguf_vocabularies.byte_level_metadata(tiny_folder, "gpt-2") | metadata
    return tiny_gguf.convert(model.config, tiny_gguf.hub_tensors(model), path, metadata=keys)


@pytest.fixture(scope="module")
def plain(tiny_folder, tmp_path_factory):
    """Nothing is said about sampling, and BOS stands before every text."""
    path = tmp_path_factory.mktemp("gguf") / "plain.gguf"
    write(tiny_folder, path, **{"tokenizer.ggml.add_bos_token": True})
    with live_server.live(path) as made:
        yield made
        made.at_rest()


def test_without_a_word_it_is_sampled_as_by_llama_cpp(plain):
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert plain.service.serving.sampling == defaults
    asked = {"prompt": "Once upon", "seed": 11, "max_tokens": 30}
    silent, said, openais = (
        plain.http.post("/v1/completions", json=asked | fields).json()["choices"][0]["text"]
        for fields in ({}, defaults, {"temperature": 1, "top_k": -1, "top_p": 1, "min_p": 0})
    )
    assert silent == said != openais
    theirs = {"prompt": "Once upon", "seed": 11, "n_predict": 30}
    assert plain.http.post("/completion", json=theirs).json()["content"] == silent
    props = plain.http.get("/props").json()
    assert props["v1_params"] == defaults
    assert defaults.items() <= props["default_generation_settings"]["params"].items()
    (note,) = (one for one in plain.service.serving.notes if "temperature 0.8" in one)
    assert "llama.cpp's defaults; --generation-config vllm" in note


def test_what_the_file_says_counts_and_can_be_left_out(tiny_folder, tmp_path):
    keys = {"temp": 0.25, "top_k": 7, "penalty_repeat": 1.125, "mirostat": 0, "sequence": "k"}
    path = write(
        tiny_folder, tmp_path / "own.gguf", **{f"general.sampling.{k}": v for k, v in keys.items()}
    )
    own = {
        "temperature": 0.25,
        "top_k": 7,
        "repetition_penalty": 1.125,
        "top_p": 0.95,
        "min_p": 0.05,
    }
    with live_server.live(path) as server:
        assert server.service.serving.sampling == own
        assert server.http.get("/props").json()["v1_params"] == own
    with live_server.live(path, generation_config="vllm") as server:
        assert server.service.serving.sampling == {}
        assert server.http.get("/props").json()["v1_params"] == {"temperature": 1.0}


def test_a_file_without_a_template_takes_chatml(plain):
    asked = {"messages": SAID}
    prompt = plain.http.post("/apply-template", json=asked).json()["prompt"]
    assert prompt == "<|begin|>" + CHATML
    with live_server.scripted(plain, "Hm"):
        assert plain.http.post("/v1/chat/completions", json=asked).status_code == 200
        assert plain.last_prompt() == prompt
        # Ollama adds nothing to such a prompt.
        plain.http.post("/api/generate", json={"model": "tiny", "prompt": "Once"})
        assert plain.last_prompt() == "<|begin|>Once"
    assert plain.http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == [
        "completion"
    ]
    assert any("written as ChatML" in note for note in plain.service.serving.notes)


def test_a_length_beyond_the_models_own_is_cut_and_said(tiny_folder):
    with live_server.live(tiny_folder, max_model_len=4 * live_server.CONTEXT) as server:
        assert server.service.serving.limits.context == live_server.CONTEXT
        said = (
            f"max_model_len {4 * live_server.CONTEXT} is more than the {live_server.CONTEXT} tokens"
        )
        assert any(said in note for note in server.service.serving.notes)
