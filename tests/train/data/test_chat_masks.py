"""Assistant masks: exact for our own template, for 69 real templates and for the tokenizers of real models."""

import functools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_tokenizers import folder_of, load
from shared_data import transformers_oracle, unpacked

from cairn.core.errors import DataError, TokenizerError
from cairn.models.chat_template import ChatTemplates
from cairn.train.data.chat_spans import render_with_spans
from cairn.train.data.chat_tokens import ChatEncoder
from cairn.train.data.tokenizer_trainer import byte_tokenizer, save_tokenizer

CHAT = [
    {"role": "user", "content": "Hi there"},
    {
        "role": "assistant",
        "content": "Hi there",
    },  # the same words: searching would find the wrong ones
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is four.\n\nReally: four 😀 né"},
]
ANSWERS = [CHAT[1]["content"], CHAT[3]["content"]]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


def learnt(tokenizer, messages, **options) -> str:
    encoded = ChatEncoder(tokenizer).encode(messages, **options)
    return tokenizer.decode(encoded.ids[encoded.learn].tolist(), skip_special=False)


def turns(words) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if at % 2 else "user", "content": text}
        for at, text in enumerate(words)
    ]


@given(st.lists(WORDS, min_size=2, max_size=8).filter(lambda words: len(words) % 2 == 0))
def test_our_template_marks_the_answers_and_their_end_token_whatever_is_said(words):
    """The template trims nothing, so the learnt bytes are known exactly, even where turns repeat each other."""
    tokenizer = byte_tokenizer()
    encoded = ChatEncoder(tokenizer).encode(turns(words))
    assert encoded.ids.tolist() == tokenizer.encode_chat(turns(words), add_generation_prompt=False)
    runs = tokenizer.decode(encoded.ids[encoded.learn].tolist(), skip_special=False)
    assert runs == "".join(f"{answer}<|im_end|>" for answer in words[1::2])
    for at in range(1, len(words), 2):  # each answer begins exactly where the prompt for it ends
        prompt = tokenizer.encode_chat(turns(words)[:at])
        assert encoded.ids[: len(prompt)].tolist() == prompt
        assert not encoded.learn[len(prompt) - 1]
        assert encoded.learn[len(prompt)]


@pytest.mark.parametrize(
    "answer", ["Iraq", "waltz", "Qatar", "Zoo", "Qxanswerprobexq", "q", "<|im_end|>"]
)
def test_answers_that_look_like_the_probes(answer):
    """They begin or end as the words do that stand in for them, and are found whole all the same."""
    said = learnt(byte_tokenizer(), turns(["Where?", answer, "Again?", answer]))
    assert said == f"{answer}<|im_end|>" * 2


def test_an_answer_with_weight_zero_is_read_and_not_learnt():
    messages = [{**CHAT[0]}, {**CHAT[1], "weight": 0}, *CHAT[2:]]
    assert learnt(byte_tokenizer(), messages) == f"{ANSWERS[1]}<|im_end|>"
    with pytest.raises(DataError, match="says nothing that is to be learnt"):
        ChatEncoder(byte_tokenizer()).encode(messages[:2])
    with pytest.raises(DataError, match="says nothing that is to be learnt"):
        ChatEncoder(byte_tokenizer()).encode(CHAT[:1])


def test_a_model_without_a_template_is_refused_at_once():
    plain = byte_tokenizer()
    plain.templates = ChatTemplates({}, {}, "this model")
    with pytest.raises(TokenizerError, match="no chat template"):
        ChatEncoder(plain)


@functools.cache
def template_of(path) -> ChatTemplates:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplates({"default": path.read_text()}, special, path.name)


def real_templates():
    try:
        folder = unpacked("data", "tokenizers", "llamacpp_vectors_and_templates.tar.xz")
    except pytest.skip.Exception:
        return []
    return sorted((folder / "chat_templates").glob("*.jinja"))


def test_real_templates_mark_each_answer_once_and_nothing_of_the_user():
    """What is marked ends with the answer; what comes before it is what the prompt leaves for the model to write."""
    templates = real_templates() or pytest.skip("needs shared data: real chat templates")
    refused = []
    for path in templates:
        template = template_of(path)
        try:
            template.render(CHAT, None, False)
        except TokenizerError:
            refused.append(path.name)  # those that demand tools
            continue
        rendered = render_with_spans(template, CHAT)
        assert len(rendered.spans) == 2, path.name
        for span, answer in zip(rendered.spans, ANSWERS, strict=True):
            said = rendered.text[span.start : span.stop]
            assert said.endswith(answer), path.name
            assert CHAT[2]["content"] not in said, path.name
            prompt = template.render(CHAT[: span.message], None, True)
            if rendered.text.startswith(prompt):
                assert span.start == len(prompt), path.name
            else:
                assert said == answer, path.name
    assert len(templates) - len(refused) >= 60


FRAGMENTS = [
    "Hi", " ", "\n", "<|im_end|>", "é😀", "assistant", "user\n", "</s>", "0", "Q", "Z", "\n\n", "[INST]", "aa",
]  # fmt: skip


def test_real_templates_with_answers_that_imitate_them():
    """Answers that repeat the questions, the template's own words, or nothing at all; seeded, so never flaky."""
    templates = real_templates() or pytest.skip("needs shared data: real chat templates")
    chance = random.Random(1)
    checked = 0
    for path in templates:
        template = template_of(path)
        for length in (1, 2, 3):
            said = [
                "".join(chance.choices(FRAGMENTS, k=chance.randint(at % 2 == 0, 4)))
                for at in range(2 * length)
            ]
            try:
                rendered = render_with_spans(template, turns(said))
            except TokenizerError:
                continue
            for span in rendered.spans:
                marked = rendered.text[span.start : span.stop].strip()
                assert marked.endswith(said[span.message].strip()), (path.name, said)
                checked += 1
    assert checked > 300


def test_reasoning_within_the_content_is_learnt_where_it_is_shown():
    templates = {path.stem: path for path in real_templates()}
    path = templates.get("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16") or pytest.skip("needs shared data")
    template = template_of(path)
    messages = turns(["Why?", "<think>Well</think>Because."])
    rendered = render_with_spans(template, messages)
    (span,) = rendered.spans
    marked = rendered.text[span.start : span.stop]
    assert "Well" in marked
    assert marked.endswith("Because.")
    assert "Why" not in marked


REAL = {  # what each model has to write, end of turn included
    "qwen2_5": [f"{ANSWERS[0]}<|im_end|>", f"{ANSWERS[1]}<|im_end|>"],
    "qwen3": [f"{ANSWERS[0]}<|im_end|>", f"<think>\n\n</think>\n\n{ANSWERS[1]}<|im_end|>"],
    "llama3_2": [f"{answer}<|eot_id|>" for answer in ANSWERS],
    "deepseek_v3": [f"{answer}<｜end▁of▁sentence｜>" for answer in ANSWERS],
    "gemma3": [f"{answer}<end_of_turn>" for answer in ANSWERS],
    "mistral_nemo": [f"{answer}</s>" for answer in ANSWERS],
}


@pytest.mark.parametrize("name", REAL)
def test_the_tokens_of_real_models(name):
    tokenizer = load(name)
    if not tokenizer.templates:
        pytest.skip(f"{name} has no chat template here")
    encoded = ChatEncoder(tokenizer).encode(CHAT)
    assert encoded.ids.tolist() == tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    assert encoded.open_ends == 0
    runs = []
    for at, id in enumerate(encoded.ids.tolist()):
        if encoded.learn[at]:
            if not at or not encoded.learn[at - 1]:
                runs.append([])
            runs[-1].append(id)
    assert [tokenizer.decode(run, skip_special=False) for run in runs] == REAL[name]


CALLS = {  # how each model writes a call; Mistral's template refuses a result without the call before it
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
    "llama3_2": '{"name": "add", "parameters": {"a": 2}}<|eot_id|>',
    "mistral_nemo": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}, "id": "abcdefghi"}]</s>',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tool_call_is_part_of_the_answer_and_its_result_is_not(name):
    tokenizer = load(name)
    function = {"name": "add", "arguments": {"a": 2}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Add 2 and 2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "RESULT 4", "tool_call_id": "abcdefghi", "name": "add"},
        {"role": "assistant", "content": "It is 4."},
    ]
    said = learnt(tokenizer, messages)
    end = CALLS[name][CALLS[name].rindex("<") :]
    assert said == f"{CALLS[name]}It is 4.{end}"


def test_reasoning_is_learnt_where_the_template_shows_it():
    messages = [*CHAT[:3], {**CHAT[3], "reasoning_content": "two and two"}]
    assert learnt(load("qwen3"), messages).endswith(
        f"<think>\ntwo and two\n</think>\n\n{ANSWERS[1]}<|im_end|>"
    )


def test_the_mask_is_that_of_transformers_generation_tags(tmp_path):
    transformers = transformers_oracle()
    folder = tmp_path / "tokenizer"
    save_tokenizer(byte_tokenizer(), folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for messages in (CHAT, CHAT[:2], [{"role": "system", "content": "Be brief."}, *CHAT]):
        expected = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = ChatEncoder(byte_tokenizer()).encode(messages)
        assert encoded.ids.tolist() == expected["input_ids"]
        assert encoded.learn.astype(int).tolist() == expected["assistant_masks"]


def test_a_template_that_hides_or_repeats_the_answer_is_refused():
    hides = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    repeats = "{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}"
    for source in (hides, repeats):
        with pytest.raises(DataError, match="message 1 cannot be found"):
            render_with_spans(ChatTemplates({"default": source}, {}, "x"), CHAT[:2])


def test_a_template_without_an_end_of_turn_is_counted():
    tokenizer = byte_tokenizer()
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.templates = ChatTemplates({"default": plain}, {}, "x")
    encoded = ChatEncoder(tokenizer).encode(CHAT)
    assert encoded.open_ends == 2
    assert tokenizer.decode(encoded.ids[encoded.learn].tolist()) == "".join(ANSWERS)


def test_the_folders_hold_what_this_test_expects():
    """The published templates are read as they are, so that REAL is about them and not about ours."""
    config = json.loads((folder_of("qwen3") / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in config["chat_template"]
