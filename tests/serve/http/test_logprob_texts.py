"""Tokens, bytes and offsets of log-probabilities add up to the text, for every kind of tokenizer."""

import functools

import pytest
from real_tokenizers import folder_of, load
from shared_data import transformers_oracle

from cairn.serve.answer import Logprob, spell
from cairn.serve.http.endpoints.logprobs import TextOffsets, chat_logprobs, completion_logprobs

NAMES = ["gpt2", "qwen3", "llama3_2", "gemma3", "mistral_v1_mislabelled_llama2", "stories15M"]
TEXT = "Once upon a big time a cat ate caf\u00e9 \u4e16\u754c \U0001f642\u200d\U0001f9d1  and  slept\n a lot"
UNDECODABLE = "\ufffd"


@functools.cache
def oracle_of(name):
    return transformers_oracle().PreTrainedTokenizerFast.from_pretrained(folder_of(name))


def text_of(name, ids):
    """As transformers decodes them; half of a character at the end is none yet."""
    text = oracle_of(name).decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text.rstrip(UNDECODABLE)


def scored(name, ids):
    return [{id: Logprob(-1.0, 1, spell(load(name).piece(id)))} for id in ids]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_tokens_and_offsets_are_those_of_the_text(name, cut):
    """An answer behind a prompt of `cut` tokens; 0: the prompt itself, as `echo` shows it."""
    ids = oracle_of(name).encode(TEXT, add_special_tokens=False)
    tokenizer, prompt, answer = load(name), ids[:cut], ids[cut:]
    offsets = TextOffsets(tokenizer, after=prompt)
    found = completion_logprobs(answer, scored(name, answer), 1, offsets, tokenizer)
    before = len(text_of(name, prompt))
    ends = [len(text_of(name, ids[: cut + at])) - before for at in range(len(answer) + 1)]
    assert found.text_offset == ends[:-1]
    whole = text_of(name, ids)[before:]
    for at, (token, row) in enumerate(zip(found.tokens, found.top_logprobs, strict=True)):
        if UNDECODABLE not in token and UNDECODABLE not in "".join(found.tokens[at - 1 : at]):
            assert token == whole[ends[at] : ends[at + 1]]
            assert at == 0 or list(row) == [token]
    if not any(UNDECODABLE in token for token in found.tokens):
        assert "".join(found.tokens) == whole


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_text(name):
    ids = oracle_of(name).encode(TEXT, add_special_tokens=False)
    found = chat_logprobs(ids[1:], scored(name, ids[1:]), 1, load(name))
    written = b"".join(bytes(one.bytes) for one in found)
    assert text_of(name, ids).encode().endswith(written)
    assert len(written) >= len(TEXT.encode()) - len(b"Once")
    assert [one.bytes for one in found] == [one.top_logprobs[0].bytes for one in found]


def test_two_tokens_that_decode_alike_alone_stay_apart():
    """SentencePiece: `a` and `\u2581a` are two tokens, and as the first of a text they would be one."""
    tokenizer = load("stories15M")
    ids = [tokenizer.id("\u2581a"), tokenizer.id("a")]
    row = {id: Logprob(-1.0 - at, at + 1, spell(tokenizer.piece(id))) for at, id in enumerate(ids)}
    offsets = TextOffsets(tokenizer, after=[tokenizer.id("\u2581Once")])
    found = completion_logprobs(ids[:1], [row], 2, offsets, tokenizer)
    assert found.top_logprobs == [{" a": -1.0, "a": -2.0}]
    parts = [tokenizer.id("<0xE4>"), tokenizer.id("<0xE5>")]
    row = {
        id: Logprob(-1.0 - at, at + 1, spell(tokenizer.piece(id))) for at, id in enumerate(parts)
    }
    found = completion_logprobs(parts[:1], [row], 2, offsets, tokenizer)
    assert list(found.top_logprobs[0].values()) == [-1.0, -2.0]
