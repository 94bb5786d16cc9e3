"""A tokenizer rebuilt from GGUF metadata gives the ids of the original it was converted from."""

import functools
from typing import cast

import pytest
import tiny_tokenizers
from gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    byte_level_metadata,
    merges_of,
    sentencepiece_metadata,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from llamacpp_vectors import texts, vectors
from real_tokenizers import folder_of, load
from shared_data import packaged_chat_model, shared, transformers_oracle
from tokenizers import Regex, pre_tokenizers

from cairn.core.errors import CairnError, ModelNotFound, TokenizerError, WeightsError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.gguf.file import GGUFFile
from cairn.models.gguf.pretokenizers import PRETOKENIZERS
from cairn.models.gguf.tokenizer import (
    merges_by_score,
    tokenizer_from_gguf,
    tokenizer_from_metadata,
)
from cairn.models.incremental_decode import BYTE_ALPHABET
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder

UNICODE = (
    "Once upon a time, Lily's 1234 dogs 😀 — naïve café, Ελλάδα, Привет, 日本語, 한국어, עברית\n\n\t "
    " x = {'a': [1, 2]};\r\n"
)


# ---- real vocabularies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pre", "vocabulary"),
    [
        ("gpt2", "gpt-2", "gpt-2"),
        ("llama3_2", "llama-bpe", "llama-bpe"),
        ("qwen2_5", "qwen2", "qwen2"),
        ("qwen3", "qwen2", "qwen2"),
        ("deepseek_v3", "deepseek-v3", None),
        ("mistral_nemo", "tekken", None),
    ],
)
def test_byte_level_vocabularies_give_the_ids_of_the_original(name, pre, vocabulary):
    tokenizer = tokenizer_from_metadata(byte_level_metadata(folder_of(name), pre))
    original = load(name)
    assert tokenizer.vocab_size == original.vocab_size
    assert_same_ids(tokenizer, original)
    for text, ids in vectors(vocabulary) if vocabulary else []:
        assert tokenizer.encode(text, special=False) == ids


def assert_same_ids(tokenizer: Tokenizer, original: Tokenizer) -> None:
    for text in [*texts(), UNICODE, *(original.token(id) for id in original.special_ids)]:
        ids = original.encode(text, special=False)
        assert tokenizer.encode(text, special=False) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == original.decode(ids, skip)


def test_qwen35_cuts_combining_marks_with_their_letters():
    """Its vectors use Qwen 2's vocabulary, and show that nothing is composed first."""
    tokenizer = tokenizer_from_metadata(byte_level_metadata(folder_of("qwen3"), "qwen35"))
    cases = vectors("qwen35")
    assert len(cases) == 51
    for text, ids in cases:
        assert tokenizer.encode(text, special=False) == ids


@pytest.mark.parametrize("name", ["stories15M", "mistral_v1_mislabelled_llama2"])
def test_sentencepiece_vocabularies_give_the_ids_of_the_original(name):
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata(folder_of(name), space_prefix=True))
    assert_same_ids(tokenizer, load(name))


def test_llama2_and_phi3_expected_ids():
    """The vocabulary is that of stories15M; Llama's own scores put runs of spaces last."""
    metadata = sentencepiece_metadata(folder_of("stories15M"), space_prefix=True)
    metadata["tokenizer.ggml.scores"] = [
        -1e9 if len(token) > 1 and set(token) == {"▁"} else -float(id)
        for id, token in enumerate(metadata["tokenizer.ggml.tokens"])
    ]
    tokenizer = tokenizer_from_metadata(metadata)
    for vocabulary in ("llama-spm", "phi-3"):
        cases = vectors(vocabulary)
        assert len(cases) == 47
        for text, ids in cases:
            assert tokenizer.encode(text, special=False) == ids


def test_merges_follow_from_scores():
    folder = folder_of("mistral_v1_mislabelled_llama2")
    metadata = sentencepiece_metadata(folder, space_prefix=True)
    parts = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    derived, original = merges_by_score(*parts), merges_of(folder)
    assert set(derived) == set(original)
    assert ["".join(pair) for pair in derived] == ["".join(pair) for pair in original]


def test_gemma_with_scores_and_with_merges():
    folder, original = folder_of("gemma3"), load("gemma3")
    metadata = sentencepiece_metadata(folder, space_prefix=False)
    assert_same_ids(tokenizer_from_metadata(metadata), original)

    metadata["tokenizer.ggml.model"] = "gemma4"
    metadata["tokenizer.ggml.tokens"] = [original.token(id) for id in range(original.vocab_size)]
    metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges_of(folder)]
    tokenizer = tokenizer_from_metadata(metadata)
    assert_same_ids(tokenizer, original)
    for text, ids in vectors("gemma-4"):
        assert tokenizer.encode(text, special=False) == ids


@pytest.mark.parametrize(
    "vocabulary",
    ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "refact", "starcoder"],
)
def test_no_expected_ids_contradict_how_words_are_cut(vocabulary):
    """Without the vocabulary itself: the same word has the same ids wherever it is found.

    Weaker than comparing ids: it shows that nothing is cut too finely, not that all is cut finely enough.
    """
    assert len(words_with_ids(vocabulary, rule=vocabulary)) > 20


def test_expected_ids_do_contradict_a_wrong_rule():
    for rule in ("gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-coder", "tekken", "default"):
        with pytest.raises(AssertionError):
            words_with_ids("falcon", rule)


@pytest.mark.parametrize("vocabulary", ["command-r", "refact", "starcoder"])
def test_digits_are_cut_apart(vocabulary):
    ids_of = dict(vectors(vocabulary))
    assert [ids_of["3" * count] for count in range(1, 10)] == [
        ids_of["3"] * count for count in range(1, 10)
    ]


def words_with_ids(vocabulary: str, rule: str) -> dict[str, tuple[int, ...]]:
    """The words whose ids follow from the vectors, if this is how words are cut."""
    ids_of: dict[str, tuple[int, ...]] = {}
    cases = [(words(rule, text), tuple(ids)) for text, ids in vectors(vocabulary)]
    for _ in range(5):  # each pass may settle words that the next one needs
        for pieces, ids in cases:
            settle(pieces, ids, ids_of)
    return ids_of


def words(name: str, text: str) -> list[str]:
    cuts = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRETOKENIZERS[name].patterns
    ]
    return [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


def settle(pieces: list[str], ids: tuple[int, ...], ids_of: dict[str, tuple[int, ...]]) -> None:
    """Peels known words off both ends; what is left, if it is one word, becomes known."""
    while pieces and pieces[0] in ids_of:
        known = ids_of[pieces[0]]
        assert ids[: len(known)] == known, pieces[0]
        pieces, ids = pieces[1:], ids[len(known) :]
    while pieces and pieces[-1] in ids_of:
        known = ids_of[pieces[-1]]
        assert ids[len(ids) - len(known) :] == known, pieces[-1]
        pieces, ids = pieces[:-1], ids[: len(ids) - len(known)]
    assert len(pieces) <= len(ids)
    if len(pieces) == 1:
        ids_of[pieces[0]] = ids
    elif len(pieces) == len(ids):  # one id for each word
        ids_of.update({piece: (id,) for piece, id in zip(pieces, ids, strict=True)})


# ---- real files ----------------------------------------------------------------------------------------------------


def test_stories260k_file_gives_the_ids_of_its_folder():
    tokenizer = tokenizer_from_gguf(shared("models", "stories260K.gguf"))
    original = load("stories260K")
    assert tokenizer.special == original.special
    assert tokenizer.special_ids == original.special_ids
    assert_same_ids(tokenizer, original)
    for text in texts():
        assert tokenizer.encode(text) == original.encode(text)


def test_a_vocabulary_is_given_away_and_read_again():
    checkpoint = open_checkpoint(shared("models", "stories260K.gguf"))
    first = checkpoint.tokenizer()
    kept = cast(GGUFFile, checkpoint.whole).metadata
    assert "general.architecture" in kept
    assert not any(isinstance(value, list) for value in kept.values())
    second = checkpoint.tokenizer()
    assert second.encode("Once upon a time") == first.encode("Once upon a time")


@functools.cache
def smollm2() -> Tokenizer:
    return tokenizer_from_gguf(packaged_chat_model())


def test_smollm2_has_its_published_ids():
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[:21] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
                        407, 19712, 8182, 2, 198]  # fmt: skip
    assert tokenizer.eos_ids[0] == tokenizer.id("<|im_end|>")
    assert tokenizer.chat([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
    assert [tokenizer.token(id) for id in tokenizer.encode("1234")] == ["1", "2", "3", "4"]


@given(text=st.text(st.characters(codec="utf-8"), max_size=80))
@settings(max_examples=200)
def test_smollm2_round_trips_all_text_that_it_has_bytes_for(text):
    """Its vocabulary lacks a few bytes, such as those that begin the unassigned planes of Unicode."""
    tokenizer = smollm2()
    has = {
        byte
        for char, byte in BYTE_ALPHABET.items()
        if tokenizer.backend.token_to_id(char) is not None
    }
    assert len(has) > 230
    text = "".join(char for char in text if has.issuperset(char.encode()))
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_smollm2_agrees_with_transformers_where_it_knows_the_rule():
    """transformers reads this file without the rule that cuts digits apart: texts without digits have to agree."""
    path = packaged_chat_model()
    oracle = transformers_oracle().AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name
    )
    compared = 0
    for text in [*texts(), UNICODE]:
        if not any(char.isnumeric() for char in text):
            assert smollm2().encode(text) == oracle(text).input_ids
            compared += 1
    assert compared > 25


# ---- small files ---------------------------------------------------------------------------------------------------

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "<think>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "▁",
    "a",
    "b",
    "ab",
    "▁ab",
]
KINDS = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * 5]


def small(**changes):
    """A SentencePiece vocabulary of five pieces. Changes are by the last part of the key; None takes one away."""
    metadata = {
        "model": "llama",
        "tokens": WORDS,
        "token_type": KINDS,
        "scores": [0.0] * 263 + [-2.0, -1.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(id) for id in tokenizer.encode(text)]


def test_a_file_is_read_like_its_metadata(tmp_path):
    path = write(tmp_path / "small.gguf", small() | {"tokenizer.chat_template": "{{ bos_token }}"})
    tokenizer = tokenizer_from_gguf(path)
    assert tokenizer.encode("ab a") == tokenizer_from_metadata(small()).encode("ab a")
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == "<s>"


def test_a_whole_vocabulary_through_a_file(tmp_path):
    folder = tiny_tokenizers.save(tmp_path / "model", tiny_tokenizers.byte_level())
    path = write(tmp_path / "model.gguf", byte_level_metadata(folder, "gpt-2"))
    tokenizer, original = tokenizer_from_gguf(path), tokenizer_from_folder(folder)
    for text in [*tiny_tokenizers.TEXT, "<|begin|>x<think> ｜é｜"]:
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(original.encode(text)) == original.decode(original.encode(text))


def test_sentencepiece_merges_by_score():
    tokenizer = tokenizer_from_metadata(small())
    assert spelled(tokenizer, "ab") == ["<s>", "▁ab"]
    assert spelled(tokenizer, "ba") == ["<s>", "▁", "b", "a"]
    assert spelled(tokenizer, "a<think>é") == ["<s>", "▁", "a", "<think>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é<think>")) == "ab é<think>"
    swapped = [
        *[0.0] * 263,
        -1.0,
        -2.0,
    ]  # ▁ab is still made from ▁ and ab: no other way leads to it
    assert spelled(tokenizer_from_metadata(small(scores=swapped)), "ab") == ["<s>", "▁ab"]


def test_a_better_score_is_merged_first():
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    scores = [0.0, 0.0, 0.0, 0.0, -2.0, -1.0]
    kinds = [UNKNOWN, *[NORMAL] * 5]
    metadata = small(
        tokens=tokens, token_type=kinds, scores=scores, add_space_prefix=False, add_bos_token=False
    )
    assert spelled(tokenizer_from_metadata(metadata), "abc") == ["a", "bc"]


def test_what_is_put_around_a_text():
    assert spelled(tokenizer_from_metadata(small(add_bos_token=False)), "ab") == ["▁ab"]
    assert spelled(tokenizer_from_metadata(small(add_eos_token=True)), "ab") == [
        "<s>",
        "▁ab",
        "</s>",
    ]
    assert spelled(tokenizer_from_metadata(small(add_space_prefix=False)), "ab") == ["<s>", "ab"]
    assert spelled(tokenizer_from_metadata(small(bos_token_id=None)), "ab") == ["▁ab"]
    assert spelled(tokenizer_from_metadata(small(bos_token_id=99999)), "ab") == ["▁ab"]


def test_ends_of_an_answer():
    tokens = [*WORDS, "<|im_end|>", "<|eot_id|>"]
    metadata = small(
        tokens=tokens, token_type=[*KINDS, CONTROL, NORMAL], scores=[0.0] * len(tokens)
    )
    im_end = len(WORDS)
    assert tokenizer_from_metadata(metadata).eos_ids == (
        2,
        im_end,
    )  # <|eot_id|> is an ordinary word here
    metadata["tokenizer.ggml.eot_token_id"] = im_end + 1
    assert tokenizer_from_metadata(metadata).eos_ids == (2, im_end + 1, im_end)


def test_named_chat_templates():
    templates = {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = tokenizer_from_metadata(small() | templates)
    assert tokenizer.templates.sources == {"default": "D", "tool_use": "T"}


def test_a_file_that_does_not_say_how_words_are_cut_is_warned_about(caplog):
    tokenizer_from_metadata(small(model="gpt2", merges=["a b"]), source="old.gguf")
    assert "old.gguf does not say how words are cut" in caplog.text


def test_empty_tokens_get_a_name():
    tokens = [*WORDS, "", ""]
    metadata = small(tokens=tokens, token_type=[*KINDS, NORMAL, NORMAL], scores=[0.0] * len(tokens))
    assert tokenizer_from_metadata(metadata).token(len(WORDS)) == f"[EMPTY_{len(WORDS)}]"


def test_a_merge_with_a_space_as_its_first_token():
    metadata = small(model="gemma4", merges=["a b", "▁ ab"], scores=None)
    assert spelled(tokenizer_from_metadata(metadata), " ab") == ["<s>", "▁ab"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model=None), "holds no tokenizer"),
        (dict(model="bert"), "'bert'"),
        (dict(model="t5"), "'t5'"),
        (dict(model=7), "is int, not str"),
        (dict(tokens=None), "missing or empty"),
        (dict(tokens=[]), "missing or empty"),
        (dict(tokens=[*WORDS[:-1], "a"]), "'a' is twice"),
        (dict(tokens=[*WORDS[:-1], 7]), "damaged"),
        (dict(token_type=[1]), "1 token types"),
        (dict(scores=[1.0]), "1 scores"),
        (dict(scores=None), "0 scores"),
        (dict(model="gpt2", pre="future-bpe"), "'future-bpe'"),
        (dict(model="gpt2", pre="gpt-2"), "merges is missing"),
        (dict(model="gpt2", pre="gpt-2", merges=["ab"]), "not two tokens"),
        (dict(model="gpt2", pre="gpt-2", merges=["x y"]), "damaged"),
        (dict(bos_token_id="1"), "is str, not int"),
        (dict(add_bos_token="yes"), "is str, not bool"),
    ],
)
def test_damaged_metadata(changes, message):
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_metadata(small(**changes))


def test_damaged_files(tmp_path):
    with pytest.raises(ModelNotFound):
        tokenizer_from_gguf(tmp_path / "none.gguf")
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match="empty"):
        tokenizer_from_gguf(path)
    path.write_bytes(b"not a model at all, just text")
    with pytest.raises(WeightsError):
        tokenizer_from_gguf(path)


@given(data=st.data())
@settings(max_examples=60)
def test_a_file_cut_or_changed_anywhere_is_an_error_not_a_crash(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    whole = small_file(folder)
    changed = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(0, max(len(changed) - 1, 0)), max_size=3)):
        if changed:
            changed[at] = data.draw(st.integers(0, 255))
    path = folder / "changed.gguf"
    path.write_bytes(changed)
    try:
        tokenizer = tokenizer_from_gguf(path)
    except CairnError:
        return
    assert isinstance(tokenizer.encode("ab"), list)


@functools.cache
def small_file(folder) -> bytes:
    return write(folder / "small.gguf", small()).read_bytes()


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_every_rule_compiles_and_loses_nothing(name):
    for text in [UNICODE, *tiny_tokenizers.TEXT]:
        assert "".join(words(name, text)) == text
