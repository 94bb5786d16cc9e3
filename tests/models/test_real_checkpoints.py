"""Checkpoints that nobody here wrote say what they are known to say."""

import pytest
import shared_data
import tiny_gguf
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.export import export
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.hub import resolve
from cairn.models.runnable import open_model
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer

PROMPT = "Once upon a time"
# The README beside the checkpoints gives these.
STORIES = {
    "stories260K": ", there was a little girl named Lily. She loved to play outside in the park. One "
    "day, she saw a big, red ball. She wanted to play with it, but it was too high.",
    "stories15M": ", there was a little girl named Lily. She loved to play outside in the sunshine. "
    "One day, she saw a big, red ball in the sky. It was the sun!",
}
stories = pytest.mark.parametrize("name", STORIES)


def greedy(model: Transformer, prompt: list[int], max_tokens: int, eos_ids=()) -> list[int]:
    return list(Generation(model, prompt, GenerateSampling(max_tokens=max_tokens), eos_ids))


def told(checkpoint: Checkpoint, tokenizer: Tokenizer, text: str) -> str:
    """The greedy continuation of the prompt, as long as the text and no longer."""
    prompt = tokenizer.encode(PROMPT)
    count = len(tokenizer.encode(PROMPT + text)) - len(prompt)
    tokens = greedy(checkpoint.load(dtype=torch.float32), prompt, count)
    decoder = tokenizer.stream(after=prompt)
    return "".join(decoder.push(token) for token in tokens) + decoder.flush()


@stories
def test_the_readme_says_what_is_expected_here(name):
    assert (
        f'"{PROMPT}" -> "{STORIES[name]}"' in shared_data.shared("models", "README.md").read_text()
    )


@stories
def test_a_story_is_told_as_its_readme_has_it(name):
    checkpoint = open_checkpoint(shared_data.model_folder(name))
    assert told(checkpoint, checkpoint.tokenizer(), STORIES[name]) == STORIES[name]


def test_a_story_is_told_from_gguf_with_its_own_tokenizer():
    checkpoint = open_checkpoint(shared_data.model_folder("stories260K.gguf"))
    text = STORIES["stories260K"]
    assert told(checkpoint, checkpoint.tokenizer(), text) == text


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_story_is_told_from_a_gguf_form_of_the_larger_checkpoint(kind, tmp_path):
    folder = shared_data.model_folder("stories15M")
    tensors = {
        name: value.float() for name, value in load_file(folder / "model.safetensors").items()
    }
    config = transformers.AutoConfig.from_pretrained(folder)
    path = tiny_gguf.convert(config, tensors, tmp_path / "m.gguf", GGMLQuantizationType[kind])
    tokenizer = open_checkpoint(folder).tokenizer()
    text = STORIES["stories15M"]
    assert told(open_checkpoint(path), tokenizer, text) == text


@stories
@torch.no_grad()
def test_real_weights_continue_as_the_reference_does(name):
    folder = shared_data.model_folder(name)
    checkpoint = open_checkpoint(folder)
    prompt = checkpoint.tokenizer().encode(PROMPT + STORIES[name])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = greedy(checkpoint.load(dtype=torch.float32), prompt, 64)
    theirs = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :]
    assert ours == theirs.tolist()


@stories
def test_real_weights_come_back_bit_by_bit(name, tmp_path):
    folder = shared_data.model_folder(name)
    export(open_checkpoint(folder).load(fused=True), tmp_path / "out", like=folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    before.pop("lm_head.weight", None)  # tied
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype
        assert torch.equal(value, after[tensor]), tensor
    checkpoint = open_checkpoint(tmp_path / "out")
    assert told(checkpoint, checkpoint.tokenizer(), STORIES[name]) == STORIES[name]


def test_a_packaged_chat_model_answers_through_its_template():
    file = shared_data.packaged_chat_model()
    assert resolve("smollm2-135m-instruct") == file
    opened = open_model("smollm2-135m-instruct")
    prompt = opened.tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    model = opened.load("cpu", "float32").model
    tokens = greedy(model, prompt, 32, opened.eos_ids)
    assert opened.tokenizer.decode(tokens) == "The capital of France is Paris."
    assert len(tokens) < 32
