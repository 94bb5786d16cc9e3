"""A tokenizer of our own: every text comes back, and the model folder reads as any other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import transformers_oracle

from cairn.core.errors import ConfigError, DataError
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train.data.procedural import NAMES, as_text, small_tokenizer
from cairn.train.data.tokenizer_identity import id_limit, tokenizer_hash
from cairn.train.data.tokenizer_trainer import (
    IM_END,
    MIN_VOCAB,
    SPECIAL,
    byte_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

CHAT = [{"role": "user", "content": " Hi\n"}, {"role": "assistant", "content": "Hello 12!"}]


@pytest.fixture(scope="module")
def trained():
    return small_tokenizer(vocab=600)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_comes_back(trained, text):
    for tokenizer in (trained, byte_tokenizer()):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_training_is_reproducible_and_has_the_size_asked_for(trained):
    again = small_tokenizer(vocab=600)
    assert tokenizer_hash(again) == tokenizer_hash(trained)
    assert again.vocab_size == id_limit(again) == 600
    assert tokenizer_hash(small_tokenizer(vocab=601)) != tokenizer_hash(trained)
    assert [trained.id(token) for token in SPECIAL] == [0, 1, 2, 3]


def test_it_is_worth_having(trained):
    """Merges are learnt: fewer tokens than bytes on new documents of the same kind; digits stand alone."""
    text = "\n".join(as_text(name, 1, number) for number in range(50) for name in NAMES)
    assert len(trained.encode(text)) < 0.5 * len(text.encode())
    assert len(trained.encode("1234567890")) == 10


def test_the_saved_folder_is_the_same_tokenizer(trained, tmp_path):
    save_tokenizer(trained, tmp_path / "t")
    loaded = tokenizer_from_folder(tmp_path / "t")
    assert tokenizer_hash(loaded) == tokenizer_hash(trained)
    assert loaded.special == trained.special
    assert loaded.eos_ids == (trained.id("<|endoftext|>"), trained.id(IM_END))
    assert loaded.encode_chat(CHAT) == trained.encode_chat(CHAT)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        save_tokenizer(trained, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_transformers_reads_the_folder_alike(trained, tmp_path):
    transformers = transformers_oracle()
    save_tokenizer(trained, tmp_path / "t")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    for text in (
        "Once upon a time, there were 47 ducks.\n\n  It's <|im_end|> so",
        as_text("chats", 0, 5),
    ):
        assert theirs(text)["input_ids"] == trained.encode(text)
    assert theirs.eos_token == "<|endoftext|>"
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == trained.chat(CHAT)


def test_content_in_parts_is_joined(trained):
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    assert trained.chat(parts, add_generation_prompt=False) == "<|im_start|>user\nab<|im_end|>\n"


def test_what_cannot_be_learnt_is_refused():
    with pytest.raises(ConfigError, match="vocabulary of 100 tokens is not possible"):
        train_tokenizer(["text"], 100)
    with pytest.raises(DataError, match=r"only \d+ tokens to learn, not 5000"):
        train_tokenizer(["a few words"], 5000)
    with pytest.raises(DataError, match="no text to learn"):
        train_tokenizer([], 300)
    assert MIN_VOCAB < small_tokenizer(("stories",), vocab=100_000).vocab_size < 5000
    assert train_tokenizer(["text"], MIN_VOCAB).vocab_size == MIN_VOCAB
