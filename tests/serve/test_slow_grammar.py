"""A grammar that takes long to compile delays its own request, and nobody else's tokens."""

import multiprocessing
import threading
import time

import pytest
import tiny_tokenizers
import torch
import transformers
from forked_workers import forked

from cairn.models.runnable import open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_processes import EngineProcesses
from cairn.serve.grammar import Grammars
from cairn.serve.serving import GenerateRequest, Serving

FORK = multiprocessing.get_context("fork")
GATE = FORK.Event()  # until it is set, no grammar is compiled in a worker
BUILT = FORK.Value("i", 0)  # compilations in all workers
PATIENCE_S = 60
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
CHOICE = {"choice": ["yes", "no"]}


def slow_compiler(boot):
    """In the workers: compiling what was asked for takes until the test opens the gate."""
    build = Grammars._build

    def slow(self, guide):
        if "warm_up" not in guide.field:
            GATE.wait(10 * PATIENCE_S)  # longer than anything that is asserted while it is shut
            with BUILT.get_lock():
                BUILT.value += 1
        return build(self, guide)

    Grammars._build = slow


def tiny_folder(path):
    torch.manual_seed(3)
    backend = tiny_tokenizers.byte_level()
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1200,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return tiny_tokenizers.save(path, backend, eos_token="<|end|>", bos_token="<|begin|>")


def wait_until(true):
    for _ in range(100 * PATIENCE_S):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


@pytest.fixture(scope="module", params=[1, 2], ids=["one", "two ranks"])
def serving(request, tmp_path_factory):
    GATE.clear()
    folder = tiny_folder(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=256,
        max_num_seqs=8,
        tensor_parallel_size=request.param,
    )
    processes = EngineProcesses(config, forked(slow_compiler))
    made = Serving(open_model(str(folder)), processes.client.limits, processes)
    yield made
    made.close()


class Answered:
    """Jobs of one request, and how many updates came."""

    def __init__(self, serving, params):
        self.updates, self.over = 0, threading.Event()
        request = GenerateRequest(serving.tokenizer.encode("Once"), params)
        self.jobs = serving.jobs([request], self.on_update, streamed=True)
        serving.submit(self.jobs)

    def on_update(self, job):
        self.updates += 1
        if job.answer.finished:
            self.over.set()

    @property
    def answer(self):
        return self.jobs[0].answer.result()


def test_streams_go_on_while_a_grammar_is_compiled(serving):
    stream = Answered(serving, LONG)
    wait_until(lambda: stream.updates)
    guided = Answered(serving, SamplingParams(structured_outputs=CHOICE))
    left = Answered(serving, SamplingParams(structured_outputs={"choice": ["left"]}))
    serving.abort(left.jobs)
    assert left.over.wait(PATIENCE_S)  # an abort does not wait for its grammar: the gate is shut
    assert left.answer.finish_reason == "abort"
    before = stream.updates
    wait_until(lambda: stream.updates > before + 20)
    assert not guided.updates
    GATE.set()
    assert guided.over.wait(PATIENCE_S)
    assert guided.answer.text in CHOICE["choice"]
    serving.abort(stream.jobs)
    assert stream.over.wait(PATIENCE_S)


def test_the_same_grammar_is_compiled_once(serving):
    GATE.set()
    first = Answered(serving, SamplingParams(structured_outputs=CHOICE))
    assert first.over.wait(PATIENCE_S)
    built = BUILT.value
    again = Answered(serving, SamplingParams(structured_outputs=CHOICE))
    assert again.over.wait(PATIENCE_S)
    assert again.answer.text in CHOICE["choice"]
    assert BUILT.value == built
