"""`LLM`: answers are those of the plain generator, whoever else is served; mistakes are refused before it runs."""

import asyncio
import gc
import json
import random
import re
import subprocess
import sys
import threading
import time

import pytest
import tiny_tokenizers
import torch
import transformers

from cairn import LLM, SamplingParams, StructuredOutputs
from cairn.core.errors import (
    ConfigError,
    HardwareError,
    ModelNotFound,
    RequestError,
)
from cairn.hw.machine import HostMemory
from cairn.models.checkpoint import open_checkpoint
from cairn.models.generate import GenerateSampling, Generation
from cairn.serve.config import INSTEAD, EngineConfig
from cairn.serve.engine import choose_limits
from cairn.serve.engine.runner import Runner
from cairn.serve.llm import read_config
from cairn.serve.progress import answer_bar
from cairn.serve.serving import GenerateRequest

CONTEXT = 160
TEMPLATE = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}{% endfor %}"
PROMPTS = ["Once upon a time", "The quick brown fox", "日本語のテキスト 😀", "It's 1234 o'clock"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama whose tokens are bytes and pieces of words, and lively enough to say many of them."""
    torch.manual_seed(3)
    backend = tiny_tokenizers.byte_level()
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return tiny_tokenizers.save(
        path, backend, eos_token="<|end|>", bos_token="<|begin|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        folder, dtype="float32", device="cpu", num_gpu_blocks_override=256, max_num_seqs=8
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def _at_rest(request):
    """Every test leaves the engine as it found it."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").serving.engine.engine
        _until(lambda: not engine.has_work)
        engine.scheduler.queues.check_integrity()
        assert engine.scheduler.blocks.usage().used == 0
        assert engine.prompt_logprobs == {}


def _until(true) -> None:
    ends = time.monotonic() + 30
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)


def reference(folder, prompt: list[int], most: int) -> list[int]:
    checkpoint = open_checkpoint(folder)
    model = checkpoint.load("cpu", torch.float32)
    return list(Generation(model, prompt, GenerateSampling(max_tokens=most), ()))


# -- answers ------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_the_plain_generator(llm, folder):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        answer = output.outputs[0]
        assert (output.prompt, output.prompt_token_ids) == (prompt, ids)
        assert answer.token_ids == reference(folder, ids, 24)
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert (answer.finish_reason, answer.stop_reason, answer.error) == ("length", None, None)
        assert output.finished


def test_a_prompt_has_many_forms(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    forms = [
        PROMPTS[0],
        ids,
        tuple(ids),
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        {"prompt": "a title", "prompt_token_ids": ids, "cache_salt": "a"},
    ]
    together = llm.generate(forms, GREEDY)
    alone = [llm.generate(form, GREEDY)[0] for form in forms]
    answers = {tuple(output.outputs[0].token_ids) for output in together + alone}
    assert len(answers) == 1
    texts = [PROMPTS[0], None, None, PROMPTS[0], None, "a title"]
    assert [output.prompt for output in together] == texts
    assert llm.generate([]) == []


def test_salts_keep_cached_prompts_apart(llm):
    prompt = [7] * 40
    salts = ("one", "one", "two")
    found = [
        llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)[0].num_cached_tokens
        for salt in salts
    ]
    assert found == [0, 32, 0]


def test_a_prompt_as_a_vector(llm):
    vectors = [
        llm.generate("Once", SamplingParams(max_tokens=1, pooling=how))[0].embedding
        for how in ("mean", "last", None)
    ]
    assert [None if vector is None else len(vector) for vector in vectors] == [32, 32, None]
    assert vectors[0] != vectors[1]


def test_each_prompt_can_have_its_own_parameters(llm):
    lengths = [3, 1, 7, 5]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_seeds_reproduce_and_several_answers_differ(llm):
    params = SamplingParams(n=4, seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate(PROMPTS[0], params)[0] for _ in range(2))
    answers = [tuple(answer.token_ids) for answer in first.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2, 3]
    assert answers == [tuple(answer.token_ids) for answer in second.outputs]
    assert len(set(answers)) == 4
    alone = SamplingParams(seed=13, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert answers[2] == tuple(llm.generate(PROMPTS[0], alone)[0].outputs[0].token_ids)


def test_several_answers_share_the_pages_of_their_prompt(llm):
    long = [5 + i % 90 for i in range(70)]
    engine = llm.serving.engine.engine
    before = engine.scheduler.blocks.prefix.statistics.hits
    llm.generate([long], SamplingParams(n=3, max_tokens=2, seed=1))
    assert engine.scheduler.blocks.prefix.statistics.hits - before == 2 * 64


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|begin|>user: Hello"
    assert output.prompt_token_ids == llm.tokenizer.encode_chat(messages)
    (same,) = llm.generate([output.prompt_token_ids], GREEDY)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"content": "Hello"}])


def test_logprobs_of_answers_and_prompts(llm, folder):
    params = SamplingParams(
        temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    output = llm.generate(PROMPTS[1], params)[0]
    answer = output.outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids) == 5
    total = 0.0
    for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(found) == 3
        assert next(iter(found)) == token  # greedy: the likeliest is chosen, and stands first
        assert [entry.rank for entry in found.values()] == [1, 2, 3]
        assert found[token].decoded_token == llm.tokenizer.decode([token], skip_special=False)
        total += found[token].logprob
    assert answer.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    oracle = transformers.LlamaForCausalLM.from_pretrained(folder)(
        torch.tensor([output.prompt_token_ids])
    )
    scores = oracle.logits[0].detach().log_softmax(-1)
    for at, token in enumerate(output.prompt_token_ids[1:]):
        assert output.prompt_logprobs[at + 1][token].logprob == pytest.approx(
            float(scores[at, token]), abs=1e-4
        )


def test_a_bar_where_a_person_watches(capsys, monkeypatch):
    with answer_bar(2, 10, visible=True) as show:
        show(1, 5, 9)
    assert capsys.readouterr() == ("", "")  # no terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with answer_bar(2, 10, visible=False) as show:
        show(1, 5, 9)
    assert capsys.readouterr().err == ""
    with answer_bar(2, 10, visible=True) as show:
        show(1, 5, 9)
    drawn = capsys.readouterr().err
    assert "1/2 answers" in drawn
    assert "tokens/s" in drawn


# -- where an answer ends -------------------------------------------------------------------------


def in_ascii(llm) -> dict:
    """Settings under which every token is some plain text, so that each of its characters can be a stop string."""
    texts = {id: llm.tokenizer.decode([id]) for id in range(llm.tokenizer.vocab_size)}
    bad = [id for id, text in texts.items() if not text or not text.isascii()]
    return dict(
        temperature=0, max_tokens=40, ignore_eos=True, logit_bias=dict.fromkeys(bad, -100.0)
    )


def test_a_stop_string_is_found_across_tokens(llm):
    settings = in_ascii(llm)
    whole = llm.generate(PROMPTS[0], SamplingParams(**settings))[0].outputs[0]
    pieces = [llm.tokenizer.decode([id]) for id in whole.token_ids]
    assert "".join(pieces) == whole.text
    borders = {len("".join(pieces[:n])) for n in range(len(pieces))}
    across = [
        start
        for start in range(4, len(whole.text) - 8)
        if whole.text.find(whole.text[start : start + 4]) == start
        and any(start < border < start + 4 for border in borders)
    ]
    assert across
    stops = [whole.text[start : start + 4] for start in across[::3]]
    params = [SamplingParams(**settings, stop=[stop, "never said"]) for stop in stops]
    outputs = llm.generate([PROMPTS[0]] * len(stops), params)
    for start, stop, output in zip(across[::3], stops, outputs, strict=True):
        answer = output.outputs[0]
        ending = (answer.text, answer.finish_reason, answer.stop_reason)
        assert ending == (whole.text[:start], "stop", stop)
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert len("".join(pieces[: len(answer.token_ids) - 1])) < start + 4  # and not a token more


def test_a_stop_string_can_stay_and_waits_for_min_tokens(llm):
    settings = in_ascii(llm)
    whole = llm.generate(PROMPTS[0], SamplingParams(**settings))[0].outputs[0]
    stop = whole.text[5:8]
    with_it = SamplingParams(**settings, stop=stop, include_stop_str_in_output=True)
    answer = llm.generate(PROMPTS[0], with_it)[0].outputs[0]
    assert answer.text == whole.text[: whole.text.find(stop) + 3]
    late = llm.generate(PROMPTS[0], SamplingParams(**settings, stop=stop, min_tokens=30))[
        0
    ].outputs[0]
    assert len(late.token_ids) >= 30


def test_a_stop_token_ends_the_answer_and_has_no_text(llm):
    whole = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[
        0
    ].outputs[0]
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: first + 1]
    assert answer.text == llm.tokenizer.decode(whole.token_ids[:first])


def test_end_of_text_is_silent(llm):
    end = llm.tokenizer.eos_ids[0]
    params = SamplingParams(
        temperature=0, max_tokens=9, logit_bias={end: 100.0}, skip_special_tokens=False
    )
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (answer.token_ids, answer.text) == ([end], "")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


# -- streams --------------------------------------------------------------------------------------


def test_many_streams_at_once_say_what_generate_says(llm):
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    wanted = llm.generate(PROMPTS, params)

    async def read(prompt: str):
        pieces, last = [], None
        async for last in llm.stream(prompt, params):
            pieces.append(last.outputs[0].new_text)
        return "".join(pieces), last

    async def all_of_them():
        return await asyncio.gather(*(read(prompt) for prompt in PROMPTS))

    for (text, last), output in zip(asyncio.run(all_of_them()), wanted, strict=True):
        assert text == last.outputs[0].text == output.outputs[0].text
        assert last.outputs[0].token_ids == output.outputs[0].token_ids
        assert_alike(last.outputs[0].logprobs, output.outputs[0].logprobs)
        assert_alike(last.prompt_logprobs[1:], output.prompt_logprobs[1:])
        assert last.prompt_logprobs[0] is None
        assert last.finished
        assert last.outputs[0].finish_reason == "length"


def assert_alike(some, others) -> None:
    """Other company in the batch may change the last bits of a float."""
    for one, other in zip(some, others, strict=True):
        assert {id: entry.logprob for id, entry in one.items()} == pytest.approx(
            {id: entry.logprob for id, entry in other.items()}, abs=1e-4
        )


def test_a_stream_of_several_answers(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True)
    wanted = llm.generate(PROMPTS[1], params)[0]

    async def read():
        return [output async for output in llm.stream(PROMPTS[1], params)]

    seen = asyncio.run(read())
    assert [o.token_ids for o in seen[-1].outputs] == [o.token_ids for o in wanted.outputs]
    counts = [sum(len(answer.token_ids) for answer in output.outputs) for output in seen]
    assert counts == sorted(counts)  # earlier outputs are not changed by later tokens
    assert counts[0] < counts[-1] == 27


LONG = SamplingParams(max_tokens=140, ignore_eos=True)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "drop", "with"])
def test_a_stream_that_is_left_ends_its_request(llm, how):
    engine = llm.serving.engine.engine

    async def leave():
        stream = llm.stream("Once", LONG)
        await stream.__anext__()
        request = stream.jobs[0].request
        if how == "break":
            async for _ in stream:
                break
            del stream, _
        elif how == "aclose":
            await stream.aclose()
            assert [output async for output in stream] == []
        elif how == "cancel":
            task = asyncio.ensure_future(_drain(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "with":
            async with stream:
                pass
        else:
            del stream
        gc.collect()
        return request

    request = asyncio.run(leave())
    _until(lambda: request.state == "finished")
    assert request.finish == "abort"
    assert not engine.has_work or request.id not in engine.scheduler.requests


async def _drain(stream):
    async for _ in stream:
        pass


def test_many_streams_come_and_go(llm):
    """More than there are rows, some left early, some cancelled; those that stay are not disturbed."""
    dice = random.Random(5)
    wishes = [(PROMPTS[dice.randrange(4)], dice.randrange(1, 30), dice.random()) for _ in range(30)]

    async def one(prompt: str, most: int, fate: float) -> tuple[list[int], str | None]:
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        last = None
        async for last in llm.stream(prompt, params):
            if fate < 0.3 and len(last.outputs[0].token_ids) >= most // 2:
                break
        return last.outputs[0].token_ids, last.outputs[0].finish_reason

    async def all_of_them():
        tasks = [asyncio.ensure_future(one(*wish)) for wish in wishes]
        await asyncio.sleep(0.05)
        for task, wish in zip(tasks, wishes, strict=True):
            if wish[2] > 0.8:
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    whole = {
        p: llm.generate(p, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        for p in PROMPTS
    }
    for (prompt, most, fate), result in zip(wishes, asyncio.run(all_of_them()), strict=True):
        if isinstance(result, asyncio.CancelledError):
            assert fate > 0.8
            continue
        tokens, finish = result
        assert tokens == whole[prompt][0].outputs[0].token_ids[: len(tokens)]
        assert fate < 0.3 or (len(tokens), finish) == (most, "length")


def test_other_threads_may_ask_at_the_same_time(llm):
    wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    found: dict[int, list[int]] = {}

    def ask(at: int) -> None:
        found[at] = llm.generate(PROMPTS[at], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[at] for at in range(4)] == wanted


# -- what cannot be served ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[]], r"the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([1, 2, 100_000], "100000"),
        ([1, -1], "-1"),
        ([1] * CONTEXT, f"the prompt has {CONTEXT} tokens, the context is {CONTEXT}"),
        ([1] * (CONTEXT - 10), "exceed the context"),
        (["fine", 3], r"prompts\[1\] is int"),
        (["fine", [1, "x"]], "holds 'x'"),
        ([[1, True]], "holds True"),
        ({"promt": "x"}, "unknown key 'promt'"),
        ({"cache_salt": "x"}, "the prompt is empty"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt of the prompt is int"),
        ({"prompt_token_ids": ["x"]}, "holds 'x'"),
        ({"prompt": [1]}, "prompt of the prompt is list"),
        (None, "prompts is NoneType"),
        ("half a \ud800 pair", "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(llm, prompts, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, GREEDY)


def test_one_bad_prompt_runs_none(llm):
    before = llm.serving.engine.engine.steps
    with pytest.raises(RequestError, match=r"prompts\[2\]: the prompt is empty"):
        llm.generate(["a", "b", [], "c"], GREEDY)
    assert llm.serving.engine.engine.steps == before


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([GREEDY], "1 sampling parameters for 2 prompts"),
        ("x", "sampling_params is str"),
        ([1, 2], "is list"),
    ],
)
def test_parameters_that_do_not_fit(llm, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(["a", "b"], params)


def test_each_prompt_can_have_its_own_priority(llm):
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], GREEDY)]
    ranked = llm.generate(PROMPTS[:2], GREEDY, priority=[5, -1])
    assert [output.outputs[0].token_ids for output in ranked] == plain
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[1])
    with pytest.raises(RequestError, match="priority is 'high'"):
        llm.generate(PROMPTS[0], GREEDY, priority="high")


def test_a_stream_is_refused_before_it_is_read(llm):
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream([[]])
    with pytest.raises(RequestError, match="2 prompts for one stream"):
        llm.stream(["a", "b"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_length": 5}, "no argument 'max_model_length'"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"dtype": "int3"}, "dtype is int3"),
        ({"scheduling_policy": "random"}, "scheduling_policy is random"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1"),
        ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
        ({"seed": 0}, r"SamplingParams\(seed"),
    ],
)
def test_wrong_arguments_of_an_engine(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        LLM(folder, **options)


def test_more_pages_than_there_is_memory(folder):
    with pytest.raises(HardwareError, match="1000000000000 pages take") as error:
        LLM(folder, device="cpu", num_gpu_blocks_override=10**12)
    assert "num_gpu_blocks_override can be" in (error.value.hint or "")
    with pytest.raises(HardwareError, match="B are left of") as error:
        LLM(folder, device="cpu", max_num_batched_tokens=2**40)
    assert "lower max_num_batched_tokens" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("limit", "used", "share"),
    [(None, None, 6.4), (4, 2, 1.0), (4, 3, 0.5), (4, 4, 0.4), (4, 5, 0.4)],  # GiB
)
def test_the_share_of_a_container(monkeypatch, limit, used, share):
    """A tenth of what there is; of a small one more, while it has that."""
    limit, used = (None if size is None else size << 30 for size in (limit, used))
    host = HostMemory(
        total_bytes=64 << 30, available_bytes=60 << 30, limit_bytes=limit, used_bytes=used
    )
    monkeypatch.setattr(choose_limits, "read_memory", lambda root: (host, []))
    memory, _ = choose_limits.memory_for_pages(torch.device("cpu"), 0.5)
    assert memory.total == int(0.5 * share * 2**30)
    assert memory.free == min(memory.total, host.free_bytes)


def test_names_that_other_engines_have():
    config = read_config("m", {"dtype": "half", "scheduling_policy": "priority"})
    assert (config.dtype, config.scheduling_policy) == ("float16", "priority")
    assert read_config("m", {"dtype": "float"}).dtype == "float32"
    assert not set(INSTEAD) & set(EngineConfig.__struct_fields__)
    with pytest.raises(ConfigError, match="model is None"):
        read_config(None, {})


def test_a_model_that_is_not_there():
    with pytest.raises(ModelNotFound):
        LLM("/nowhere/at/all")


def test_without_a_tokenizer_there_are_only_ids():
    with LLM(
        "random:tiny-llama", dtype="float32", device="cpu", num_gpu_blocks_override=16
    ) as bare:
        (output,) = bare.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (4, "")
        with pytest.raises(ConfigError, match="has no tokenizer"):
            bare.generate("text")
        with pytest.raises(RequestError, match="no tokenizer to find it with"):
            bare.generate([[1]], SamplingParams(stop="x"))
    with pytest.raises(ConfigError, match="the engine is closed"):
        bare.generate([[1]])
    bare.close()


# -- structured output ----------------------------------------------------------------------------


PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["age", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("shape", "follows"),
    [
        (StructuredOutputs(json=PERSON), lambda text: set(json.loads(text)) == {"age", "kind"}),
        ({"json": json.dumps(PERSON)}, lambda text: 1 <= json.loads(text)["age"] <= 99),
        ({"regex": "[a-c]{2,5}x"}, lambda text: re.fullmatch("[a-c]{2,5}x", text)),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "<" ("u" | "v") ">"'}, lambda text: text in ("<u>", "<v>")),
    ],
)
def test_answers_have_the_shape_that_was_asked_for(llm, shape, follows):
    params = SamplingParams(max_tokens=80, n=2, seed=1, structured_outputs=shape)
    plain = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    shaped, free = llm.generate(["Once", "Twice"], [params, plain])
    assert [one.finish_reason for one in shaped.outputs] == ["stop", "stop"]
    assert all(follows(one.text) for one in shaped.outputs)
    assert [one.index for one in shaped.outputs] == [0, 1]
    assert free.outputs[0].token_ids == llm.generate("Twice", plain)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"jsno": {}}, "structured_outputs has no 'jsno'"),
        ({"regex": "("}, "structured_outputs.regex cannot be followed"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"regex": "a", "choice": ["b"]}, "both say what the answer looks like"),
        ("json", "structured_outputs is 'json'"),
    ],
)
def test_a_shape_that_cannot_be_followed_is_refused_before_anything_runs(llm, shape, said):
    before = llm.serving.engine.engine.steps
    with pytest.raises(RequestError, match=re.escape(said)):
        llm.generate(["Once", "Twice"], SamplingParams(structured_outputs=shape))
    assert llm.serving.engine.engine.steps == before


def test_only_streams_are_told_about_every_token(llm):
    """An answer that is read whole wakes its reader at the first token and at the end."""
    calls = {}
    for streamed in (False, True):
        seen = calls[streamed] = []
        over = threading.Event()

        def on_update(job, seen=seen, over=over):
            seen.append(len(job.answer.whole.token_ids))
            if job.answer.finished:
                over.set()

        params = SamplingParams(max_tokens=12, ignore_eos=True)
        jobs = llm.serving.jobs([GenerateRequest([5, 6], params)], on_update, streamed=streamed)
        llm.serving.submit(jobs)
        assert over.wait(30)
    assert calls == {False: [1, 12], True: list(range(1, 13))}


# -- failures in the engine -----------------------------------------------------------------------


def test_an_answer_that_would_outgrow_the_cache_is_refused_before_anything_runs(folder):
    """Four pages of sixteen hold 64 tokens, however long the model's context is."""
    with LLM(folder, dtype="float32", device="cpu", num_gpu_blocks_override=4) as small:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 100)]
        with pytest.raises(RequestError, match=r"prompts\[1\].*max_tokens 100.*context of 64"):
            small.generate([[1, 2, 3], [4, 5, 6]], params)
        with pytest.raises(RequestError, match="context of 64"):
            small.stream([4, 5, 6], params[1])
        assert small.serving.engine.engine.steps == 0
        whole = SamplingParams(max_tokens=None, ignore_eos=True)
        assert len(small.generate([4, 5, 6], whole)[0].outputs[0].token_ids) == 61


def test_a_step_that_raises_is_told_to_its_requests(folder, monkeypatch):
    with LLM(folder, dtype="float32", device="cpu", num_gpu_blocks_override=32) as one:
        launch = Runner.launch

        def failing(self, step):
            raise RuntimeError("the device is on fire")

        monkeypatch.setattr(Runner, "launch", failing)
        with pytest.warns(RuntimeWarning, match="the device is on fire"):
            (output,) = one.generate(["x"], GREEDY)
        assert output.outputs[0].error == "RuntimeError: the device is on fire"
        monkeypatch.setattr(Runner, "launch", launch)
        assert one.generate(["x"], GREEDY)[0].outputs[0].finish_reason in ("length", "stop")


def test_a_loop_that_breaks_leaves_nobody_waiting(folder, monkeypatch):
    with LLM(folder, dtype="float32", device="cpu", num_gpu_blocks_override=32) as one:
        monkeypatch.setattr(one.serving.engine.engine, "step", lambda: 1 / 0)
        with pytest.warns(RuntimeWarning, match="the engine has broken: ZeroDivisionError"):
            outputs = one.generate(["x", "y"], GREEDY)
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        with pytest.raises(ConfigError, match="the engine has broken"):
            one.generate(["z"], GREEDY)


def test_closing_ends_what_runs(folder):
    one = LLM(folder, dtype="float32", device="cpu", num_gpu_blocks_override=32)

    async def read():
        stream = one.stream("Once", LONG)
        await stream.__anext__()
        one.close()
        return [output async for output in stream][-1]

    assert asyncio.run(read()).outputs[0].finish_reason == "abort"


def test_ctrl_c_ends_the_requests_and_not_the_engine(llm, monkeypatch):
    """The interrupt comes while the caller waits."""
    from cairn.serve import llm as module

    engine = llm.serving.engine.engine

    class Interrupted(module._Countdown):
        def __init__(self):
            super().__init__()
            self.over.wait = self._interrupt
            self.before = engine.steps

        def _interrupt(self, timeout=None):
            _until(lambda: engine.steps > self.before + 2)
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_Countdown", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once", "Twice"], LONG)
    monkeypatch.undo()
    _until(lambda: not engine.has_work)
    assert llm.generate(PROMPTS[0], GREEDY)[0].finished


def test_importing_cairn_loads_nothing_and_a_script_ends_by_itself(folder):
    code = f"""
import sys, cairn
assert not {{"torch", "msgspec", "numpy"}} & set(sys.modules), "imported early"
from cairn import LLM, SamplingParams, StructuredOutputs
llm = LLM({str(folder)!r}, device="cpu", dtype="float32", num_gpu_blocks_override=16)
print(llm.generate("Once", SamplingParams(max_tokens=2))[0].outputs[0].finish_reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in ("length", "stop")


def test_drafts_change_no_answer(folder):
    """Stop strings inside a run, several answers to a prompt, log-probabilities, grammars and streams."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=40, logprobs=1),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=30, stop=["e", "é"]),
        SamplingParams(
            temperature=0, max_tokens=60, structured_outputs=StructuredOutputs(regex="(abc){3,9}")
        ),
        SamplingParams(temperature=1.0, seed=1, max_tokens=30, frequency_penalty=0.5, min_tokens=9),
    ]
    prompts = ["say it again, say it again, say", "ab ab ab ab", "Once upon a time", PROMPTS[2]]

    async def streamed(llm):
        pieces = [output.outputs[0].new_text async for output in llm.stream(prompts[0], kinds[0])]
        return "".join(pieces)

    def answers(speculate):
        with LLM(folder, device="cpu", speculate=speculate, draft_tokens=3) as llm:
            found = [
                (
                    o.text,
                    o.token_ids,
                    o.finish_reason,
                    o.stop_reason,
                    sorted(o.logprobs[0]) if o.logprobs else None,
                )
                for output in llm.generate(prompts, kinds, use_tqdm=False)
                for o in output.outputs
            ]
            engine = llm.serving.engine.engine
            counts = engine.scheduler.speculation.counts if speculate != "off" else None
            assert counts is None or counts.accepted > 0
            return found, asyncio.run(streamed(llm))

    plain = answers("off")
    assert answers("auto") == plain
    assert answers(str(folder)) == plain  # the model drafts for itself
    with pytest.raises(ConfigError, match="draft_tokens is 0"):
        LLM(folder, speculate="ngram", draft_tokens=0)
    with pytest.raises(ConfigError, match="names no drafter"):
        LLM(folder, device="cpu", speculate="/no/such/folder")
