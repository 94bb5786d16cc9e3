"""`LLM` over processes that share a model says what it says in this process."""

import asyncio
import functools

import pytest
import tiny_tokenizers
import torch
import transformers
from forked_workers import forked

from cairn import LLM, SamplingParams
from cairn.core.errors import CairnError, ConfigError, RequestError
from cairn.serve import engine_processes
from cairn.serve.engine.client import ProcessOptions
from cairn.serve.engine_processes import EngineProcesses

OPTIONS = ProcessOptions(beat_s=0.1, grace_s=5.0, restarts=0)
PROMPTS = ["Once upon a time", "The quick brown fox", [5, 6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    backend = tiny_tokenizers.byte_level()
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return tiny_tokenizers.save(path, backend, eos_token="<|end|>", bos_token="<|begin|>")


@pytest.fixture
def make(folder, monkeypatch):
    """Workers by fork: torch is imported already."""

    def made(config, role, early, options):
        return EngineProcesses(config, forked(), role, early, OPTIONS)

    monkeypatch.setattr(engine_processes, "EngineProcesses", made)
    settings = dict(dtype="float32", device="cpu", num_gpu_blocks_override=32, max_num_seqs=8)
    return functools.partial(LLM, folder, **settings)


def test_two_ranks_say_what_one_says(make):
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1, ignore_eos=True
        ),
        SamplingParams(n=2, seed=7, max_tokens=12, ignore_eos=True),
        SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, stop=["a", "e", "i", "o", "t"]
        ),
    ]
    with make() as one:
        wanted = one.generate(PROMPTS, params)
    with make(tensor_parallel_size=2) as two:
        found = two.generate(PROMPTS, params)

        async def read():
            return [output async for output in two.stream(PROMPTS[0], params[0])][-1]

        found.append(asyncio.run(read()))
        with pytest.raises(RequestError, match="the prompt is empty"):
            two.generate([[]])
    wanted.append(wanted[0])
    for output, other in zip(found, wanted, strict=True):
        assert output.prompt_token_ids == other.prompt_token_ids
        for answer, same in zip(output.outputs, other.outputs, strict=True):
            assert (answer.token_ids, answer.text) == (same.token_ids, same.text)
            ending = (answer.finish_reason, answer.stop_reason, answer.error)
            assert ending == (same.finish_reason, same.stop_reason, None)
            assert (answer.logprobs is None) == (same.logprobs is None)
        assert (output.prompt_logprobs is None) == (other.prompt_logprobs is None)
    assert len(found[0].prompt_logprobs) == len(found[0].prompt_token_ids)
    with pytest.raises(ConfigError, match="the engine is closed"):
        two.generate(PROMPTS)
    two.close()


def test_a_stream_that_is_left_and_a_worker_that_dies(make):
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    with make(tensor_parallel_size=2) as two:

        async def leave_one():
            async with two.stream("a", long) as stream:
                await stream.__anext__()
            return stream.jobs[0]

        job = asyncio.run(leave_one())

        async def lose_one():
            stream = two.stream("b", long)
            await stream.__anext__()
            two.serving.engine.client._group.kill()
            return [output async for output in stream]

        with pytest.raises(CairnError):
            asyncio.run(lose_one())
        assert job.answer.finished
