"""An engine of several ranks answers as one of a single rank, and falls as one."""

import re
import signal
from subprocess import Popen

import pytest
import torch
from client_stream import submit
from forked_workers import forked
from tiny_engines import all_logits

from cairn.core.errors import CairnError, ConfigError
from cairn.models.export import export
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.layers import ModelBuild
from cairn.models.presets import preset
from cairn.models.runnable import open_model
from cairn.models.shards import ALONE
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine import worker
from cairn.serve.engine.client import EngineClient, ProcessOptions
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.messages import EngineFailed, Failure
from cairn.serve.engine.process import WorkerGroup
from cairn.serve.engine.ranks import Ranks
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start
from cairn.serve.engine.worker_exits import to_blame

OPTIONS = ProcessOptions(beat_s=0.1, grace_s=20.0, restarts=0)
PROMPTS = [[(7 * n + i * i * 3) % 160 for i in range(n)] for n in (3, 27, 46, 60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=12)
PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5, max_tokens=12
)
WISHES = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, DRAWN, PENALISED)]


def config(family="tiny-qwen3", **fields):
    pages = 12 if family == "tiny-gemma3" else 8  # it has a page table for its windows, too
    settings = dict(
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=pages,
        max_num_seqs=6,
        max_num_batched_tokens=40,
    )
    return EngineConfig(model=f"random:{family}", **(settings | fields))


def overlapped(boot):
    """As on a GPU: the next step is launched before the last has landed."""

    def begin(*args):
        started = start(*args)
        started.engine.overlap = True
        return started

    worker.start = begin


def by_one_rank(family):
    engine = start(config(family)).engine
    requests = [Request(i, prompt, params) for i, (prompt, params) in enumerate(WISHES)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert sum(request.ledger.preemptions for request in requests) > 0  # the pages are too few
    return [request.outputs for request in requests]


@pytest.mark.parametrize(
    "family", ["tiny-llama", "tiny-qwen3", "tiny-moe", "tiny-gemma3", "tiny-gpt2"]
)
def test_two_ranks_answer_as_one(family):
    with EngineClient(
        config(family, tensor_parallel_size=2), OPTIONS, forked(overlapped)
    ) as client:
        streams = [submit(client, prompt, params) for prompt, params in WISHES]
        submit(client, PROMPTS[0], SamplingParams(max_tokens=100)).abort()
        found = [[token for delta in stream for token in delta.tokens] for stream in streams]
    assert found == by_one_rank(family)


def test_four_ranks_that_share_the_experts_answer_as_one():
    settings = config("tiny-deepseek", tensor_parallel_size=4, enable_expert_parallel=True)
    with EngineClient(settings, OPTIONS, forked(overlapped)) as client:
        streams = [submit(client, prompt, params) for prompt, params in WISHES]
        found = [[token for delta in stream for token in delta.tokens] for stream in streams]
    assert found == by_one_rank("tiny-deepseek")


@pytest.mark.parametrize(("family", "size"), [("tiny-qwen3", 2), ("tiny-moe", 1)])
def test_experts_are_shared_where_there_are_some_and_others(family, size):
    settings = config(family, tensor_parallel_size=size, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        start(settings, shards=Ranks(0, size) if size > 1 else ALONE)


def test_ranks_draw_the_same_without_a_seed():
    """Ranks that drew differently would attend to different tokens, and the scores would show it."""
    with EngineClient(config(tensor_parallel_size=2), OPTIONS, forked(overlapped)) as client:
        params = SamplingParams(temperature=1.5, max_tokens=20, logprobs=0)
        deltas = list(submit(client, PROMPTS[1], params))
    tokens = [token for delta in deltas for token in delta.tokens]
    scores = [scored.logprob for delta in deltas for scored in delta.logprobs]
    net = open_model("random:tiny-qwen3").load("cpu", "float32").model
    rows = all_logits(net, PROMPTS[1] + tokens)[len(PROMPTS[1]) - 1 : -1].log_softmax(-1)
    expected = [row[token].item() for row, token in zip(rows, tokens, strict=True)]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_ranks_take_new_weights_together_or_not_at_all(tmp_path):
    """Each reads its own share; what one cannot load, none does. Kept requests go on."""
    other = random_model(preset("tiny-qwen3"), ModelBuild("cpu", torch.float32), seed=1)
    export(other, tmp_path / "new")
    (tmp_path / "broken").mkdir()
    settings = config(tensor_parallel_size=2)
    with EngineClient(settings, OPTIONS, forked(overlapped)) as client:
        kept = submit(client, PROMPTS[1], SamplingParams(temperature=0, max_tokens=60))
        first = next(kept)
        client.pause()
        with pytest.raises(CairnError):
            client.load_weights(1, str(tmp_path / "broken"))
        client.load_weights(1, str(tmp_path / "new"))
        client.resume()
        tokens = [token for delta in submit(client, PROMPTS[2], GREEDY) for token in delta.tokens]
        assert len([*first.tokens, *(t for delta in kept for t in delta.tokens)]) == 60
        client.reset_prefix_cache()
        client.pause(keep=False)
    assert tokens == list(Generation(other, PROMPTS[2], GenerateSampling(max_tokens=12), ()))


def test_a_rank_that_fails_is_named_with_its_exception():
    def prepare(boot):
        step = Engine.step

        def broken(engine):
            if boot.rank == 1 and engine.steps == 4:
                raise ZeroDivisionError("rank 1 cannot")
            return step(engine)

        Engine.step = broken

    with EngineClient(config(tensor_parallel_size=2), OPTIONS, forked(prepare)) as client:
        with pytest.raises(
            EngineFailed, match="rank 1 of the engine failed with ZeroDivisionError: rank 1 cannot"
        ):
            list(submit(client, PROMPTS[0], GREEDY))
        assert not client.alive


def test_a_rank_that_is_killed_ends_the_others_and_the_group_returns():
    options = ProcessOptions(beat_s=0.1, restarts=1)
    with EngineClient(config(tensor_parallel_size=2), options, forked()) as client:
        stream = submit(client, PROMPTS[0], SamplingParams(temperature=0, max_tokens=200))
        next(stream)
        client._group.processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 1 of the engine was ended by SIGKILL"):
            list(stream)
        assert sum(len(delta.tokens) for delta in submit(client, PROMPTS[0], GREEDY)) == 12


def test_who_was_killed_is_to_blame_before_who_fell_over_it():
    assert to_blame([(0, 1), (1, -9)]) == (1, -9)
    assert to_blame([(0, -6), (1, -9)]) == (1, -9)  # NCCL's watchdog aborts those that are left
    assert to_blame([(0, 0), (1, 1), (2, 1)]) == (1, 1)
    assert to_blame([(0, 0), (1, 0)]) == (0, 0)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, r"^rank 1 of the engine was ended by SIGKILL"),
        (-6, r"^rank 0 of the engine failed with ValueError: odd .*; rank 1 aborted$"),
        (1, r"^rank 0 of the engine failed with ValueError: odd"),
    ],
)
def test_words_count_unless_somebody_was_killed(status, words):
    two = config(tensor_parallel_size=2)
    group = WorkerGroup(two, beat_s=1, grace_s=0, spawn=lambda boot: Popen(["true"]))
    group.failure = Failure(0, "ValueError", "odd", None, "")
    assert re.search(words, group.explain(1, status).message)
    group.end()
    if status == -signal.SIGKILL:  # no hint at memory, where it was us
        assert group.explain(1, status).message.startswith("the engine was stopped")


def test_a_model_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="tensor parallel 4 does not divide 2 key/value heads"):
        EngineClient(config(tensor_parallel_size=4), OPTIONS, forked())


def test_too_many_ranks_are_refused_before_one_is_started():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 999.*at most 8"):
        config(tensor_parallel_size=999)


def test_one_process_cannot_be_two_ranks():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        start(config(tensor_parallel_size=2))
