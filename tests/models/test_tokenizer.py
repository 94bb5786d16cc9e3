"""A tokenizer read from a model folder gives the ids and the text that transformers gives."""

import functools
import json

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llamacpp_vectors import texts, vectors
from real_tokenizers import folder_of, load
from shared_data import transformers_oracle

from cairn.core.errors import ModelNotFound, RequestError, TokenizerError
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder

# Their tokenizer.json is read by transformers as it is written, or rebuilt into the same thing.
AS_TRANSFORMERS = [
    "deepseek_v3",
    "gemma3",
    "gpt2",
    "llama3_2",
    "mistral_nemo",
    "qwen2_5",
    "qwen3",
    "stories15M",
    "stories260K",
]
MISTRAL_V1 = "mistral_v1_mislabelled_llama2"

PROBES = [
    "",
    " ",
    "\n",
    " leading",
    "trailing ",
    "▁already",
    "e\u0301 decomposed",
    "nul \x00 and bell \x07",
    "<s>hi</s> there <|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>",
    " <|begin_of_text|> <|eot_id|>x",
    "<think> a </think>",
    "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>",
    "[INST] x [/INST]",
    "<start_of_turn>user\nq<end_of_turn>",
    "def f(x):\n\treturn x  # 12345",
]


@functools.cache
def oracle_of(name: str):
    return transformers_oracle().AutoTokenizer.from_pretrained(folder_of(name))


# ---- real tokenizers against transformers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", AS_TRANSFORMERS)
def test_same_ids_and_text_as_transformers(name):
    assert_same_as(oracle_of(name), load(name))


def assert_same_as(oracle, tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.bos_id == oracle.bos_token_id
    assert tokenizer.pad_id == oracle.pad_token_id
    assert tokenizer.eos_ids[:1] == (oracle.eos_token_id,)
    skipped = {id for id, token in oracle.added_tokens_decoder.items() if token.special}
    named_by_class_only = {
        id for id in (oracle.mask_token_id,) if "mask_token" not in tokenizer.special.named
    }
    assert tokenizer.special_ids == skipped - named_by_class_only
    for text in [*texts(), *PROBES]:
        ids = oracle(text).input_ids
        assert tokenizer.encode(text) == ids
        assert (
            tokenizer.encode(text, special=False)
            == oracle(text, add_special_tokens=False).input_ids
        )
        for skip in (True, False):
            want = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip) == want


def test_mistral_v1_follows_its_file_where_transformers_rebuilds_it():
    """transformers 5 replaces this file's rules by ones that lose one of several leading spaces.

    SentencePiece, llama.cpp and transformers 4 agree with the file, and so do we.
    """
    transformers = transformers_oracle()
    tokenizer = load(MISTRAL_V1)
    assert_same_as(
        transformers.PreTrainedTokenizerFast.from_pretrained(folder_of(MISTRAL_V1)), tokenizer
    )
    rebuilt = transformers.AutoTokenizer.from_pretrained(folder_of(MISTRAL_V1))
    differing = [text for text in texts() if rebuilt(text).input_ids != tokenizer.encode(text)]
    assert differing
    assert all(text.startswith(" ") for text in differing)


@given(text=st.text(st.characters(codec="utf-8"), max_size=80))
@settings(max_examples=150)
@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "deepseek_v3"])
def test_any_text_survives_the_round_trip(name, text):
    tokenizer = load(name)
    ids = tokenizer.encode(text, special=False)
    composed = tokenizer.backend.normalizer.normalize_str(text) if name == "qwen3" else text
    assert tokenizer.decode(ids, skip_special=False) == composed


@given(text=st.text(max_size=40))
def test_any_text_survives_byte_fallback_or_is_refused(text):
    tokenizer = load("stories260K")
    text = text.replace("▁", "")  # which means a space there
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode(text)
    else:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- expected ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [
        ("gpt2", "gpt-2"),
        ("llama3_2", "llama-bpe"),
        ("qwen2_5", "qwen2"),
        ("qwen3", "qwen2"),
        ("gemma3", "gemma-4"),  # one vocabulary for both
    ],
)
def test_expected_ids(name, vocabulary):
    cases = vectors(vocabulary)
    assert len(cases) >= 46
    tokenizer = load(name)
    for text, ids in cases:
        assert tokenizer.encode(text, special=False) == ids
    assert tokenizer.encode_batch([text for text, _ in cases], special=False) == [
        ids for _, ids in cases
    ]


def test_stories15m_differs_from_llama2_only_in_runs_of_spaces():
    """Its tokenizer.json gives ▁▁ the first merge; in Llama's own vocabulary it has the last."""
    tokenizer = load("stories15M")
    differing = [
        text for text, ids in vectors("llama-spm") if tokenizer.encode(text, special=False) != ids
    ]
    assert len(differing) == 10
    assert all("  " in " " + text for text in differing)


# ---- folders -------------------------------------------------------------------------------------------------------


def byte_level_folder(tmp_path, **config):
    return tiny_tokenizers.save(tmp_path / "model", tiny_tokenizers.byte_level(), **config)


def test_names_and_ends_come_from_the_configs(tmp_path):
    folder = byte_level_folder(
        tmp_path,
        bos_token={"__type": "AddedToken", "content": "<|begin|>", "lstrip": False},
        eos_token="<|end|>",
        image_token="<think>",
        add_bos_token=True,
    )
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.special.named == {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "image_token": "<think>",
    }
    assert tokenizer.bos_id == tokenizer.id("<|begin|>")
    assert tokenizer.eos_ids == (tokenizer.id("<|end|>"),)
    assert tokenizer.pad_id is None
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert tokenizer_from_folder(folder).eos_ids == (tokenizer.id("<|end|>"), 7, 9)


def test_the_end_comes_from_config_json_when_nothing_else_names_it(tmp_path):
    folder = byte_level_folder(tmp_path)
    assert tokenizer_from_folder(folder).eos_ids == ()
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert tokenizer_from_folder(folder).eos_ids == (5,)
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": [1, 106]}}')
    assert tokenizer_from_folder(folder).eos_ids == (1, 106)


def test_tokens_that_only_the_config_has_are_added_as_transformers_adds_them(tmp_path):
    transformers = transformers_oracle()
    size = tiny_tokenizers.byte_level().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    folder = byte_level_folder(
        tmp_path,
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        added_tokens_decoder={
            "0": {"content": "<|end|>", "special": True, **flags},
            str(size): {"content": "<|late|>", "special": True, **flags},
            str(size + 1): {"content": "<tool>", "special": False, **flags, "lstrip": True},
        },
        additional_special_tokens=["<|extra|>"],
    )
    tokenizer = tokenizer_from_folder(folder)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == len(oracle) == size + 4
    assert tokenizer.pad_id == oracle.pad_token_id
    for text in ("a<|late|>b", "a  <tool> b", "<|pad|><|extra|>", "<|end|> fox"):
        ids = oracle(text).input_ids
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_special_tokens_map_is_read_only_in_the_older_layout(tmp_path):
    folder = byte_level_folder(tmp_path, eos_token="<|end|>")
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|begin|>"}}')
    assert tokenizer_from_folder(folder).special.named["eos_token"] == "<|begin|>"
    folder = byte_level_folder(tmp_path, eos_token="<|end|>", added_tokens_decoder={})
    assert tokenizer_from_folder(folder).special.named["eos_token"] == "<|end|>"


def test_special_tokens_around_a_text_come_from_tokenizer_json(tmp_path):
    folder = tiny_tokenizers.save(
        tmp_path, tiny_tokenizers.sentencepiece(), bos_token="<s>", add_bos_token=False
    )
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("a")[0] == tokenizer.bos_id
    assert tokenizer.encode("a", special=False) == tokenizer.encode("a")[1:]


def test_a_length_limit_in_the_file_does_not_cut_the_text(tmp_path):
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = tokenizer_from_folder(tiny_tokenizers.save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a rather long text")) == "a rather long text"


def test_split_special_tokens_reads_them_as_text(tmp_path):
    tokenizer = tokenizer_from_folder(byte_level_folder(tmp_path, split_special_tokens=True))
    assert tokenizer.id("<|end|>") not in tokenizer.encode("<|end|>")


def test_chat_templates_of_a_folder(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert tokenizer_from_folder(
        byte_level_folder(tmp_path, chat_template="C")
    ).templates.sources == {"default": "C"}
    folder = byte_level_folder(tmp_path, chat_template=named)
    assert tokenizer_from_folder(folder).templates.sources == {"default": "D", "tool_use": "T"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    (folder / "chat_template.jinja").write_text("F")
    assert tokenizer_from_folder(folder).templates.sources == {"default": "F", "rag": "R"}


def test_a_chat_has_no_second_bos():
    tokenizer = load("llama3_2")
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], date_string="26 Jul 2024")
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


@pytest.mark.parametrize(
    "name", ["llama3_2", "qwen2_5", "qwen3", "deepseek_v3", "mistral_nemo", "gemma3"]
)
def test_a_chat_has_the_ids_of_transformers(name):
    oracle = oracle_of(name)
    messages = [
        {"role": "user", "content": "Hé 😀 <b>?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    want = oracle.apply_chat_template(
        messages, add_generation_prompt=True, date_string="x", return_dict=False
    )
    assert load(name).encode_chat(messages, date_string="x") == want


# ---- errors --------------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path):
    with pytest.raises(ModelNotFound, match="does not exist"):
        tokenizer_from_folder(tmp_path / "nowhere")
    (tmp_path / "file.gguf").write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        tokenizer_from_folder(tmp_path / "file.gguf")


def test_no_tokenizer_json_says_what_was_found(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json") as raised:
        tokenizer_from_folder(tmp_path)
    assert "holds nothing" in (raised.value.hint or "")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "m.gguf").write_bytes(b"x")
    with pytest.raises(TokenizerError) as raised:
        tokenizer_from_folder(tmp_path)
    assert "tokenizer.model" in (raised.value.hint or "")
    assert "m.gguf" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": {"type": "Magic"}}', "\x00\xff"]
)
def test_a_damaged_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match="damaged"):
        tokenizer_from_folder(tmp_path)


@given(data=st.data())
@settings(max_examples=30)
def test_a_tokenizer_json_cut_anywhere_is_an_error_not_a_crash(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "cut"
    folder.mkdir(exist_ok=True)
    content = tiny_tokenizers.byte_level().to_str().encode()
    (folder / "tokenizer.json").write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
    with pytest.raises(TokenizerError):
        tokenizer_from_folder(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "holds list"),
        ("generation_config.json", "nonsense", "cannot be read"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {"content": "y"}}}',
            "added_tokens_decoder",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}', "added_tokens_decoder"),
    ],
)
def test_a_damaged_config(tmp_path, file, content, message):
    folder = byte_level_folder(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_folder(folder)


@pytest.fixture
def tiny(tmp_path) -> Tokenizer:
    return tokenizer_from_folder(byte_level_folder(tmp_path))


def test_text_that_no_utf8_can_hold(tiny):
    with pytest.raises(RequestError, match=r"U\+D83D.* at character 3"):
        tiny.encode("ab \ud83d")
    with pytest.raises(RequestError, match="surrogate"):
        tiny.encode_batch(["fine", "\ude00"])
    with pytest.raises(RequestError, match="not int"):
        tiny.encode(3)
    with pytest.raises(RequestError, match="not bytes"):
        tiny.encode_batch(["fine", b"not"])


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], [None]])
def test_ids_that_are_no_ids(tiny, ids):
    with pytest.raises(RequestError, match="token ids"):
        tiny.decode(ids)


def test_ids_beyond_the_vocabulary_have_no_text_and_no_name(tiny):
    assert tiny.decode([*tiny.encode("fox"), tiny.vocab_size + 3]) == "fox"
    for id in (tiny.vocab_size, -1, 2**40):
        with pytest.raises(TokenizerError, match=str(id)):
            tiny.token(id)
    with pytest.raises(TokenizerError, match="'no such'"):
        tiny.id("no such")


def test_a_model_without_chat_template_says_so(tiny):
    with pytest.raises(TokenizerError, match="no chat template") as raised:
        tiny.chat([{"role": "user", "content": "Hi"}])
    assert "completion" in (raised.value.hint or "")


def test_every_id_has_its_token(tiny):
    assert [tiny.id(tiny.token(id)) for id in range(tiny.vocab_size)] == list(
        range(tiny.vocab_size)
    )
    assert tiny.special_ids == {tiny.id("<|end|>"), tiny.id("<|begin|>")}


def test_the_file_written_by_the_library_is_the_file_read(tmp_path, tiny):
    again = tokenizers.Tokenizer.from_str(tiny.backend.to_str())
    assert json.loads(again.to_str())["model"] == json.loads(tiny.backend.to_str())["model"]
