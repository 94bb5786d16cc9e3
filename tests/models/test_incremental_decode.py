"""The pieces of a stream, joined, are the text; and no piece ends in the middle of a character."""

import codecs
import time

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import load
from shared_data import model_folder
from tokenizers import decoders, models

from cairn.models.checkpoint import open_checkpoint
from cairn.models.incremental_decode import (
    BYTE_ALPHABET,
    UNDECODABLE,
    HeldDecoder,
    PieceTables,
    bytes_of,
    rules_of,
)
from cairn.models.tokenizer import SpecialTokens, Tokenizer

REAL = ["gpt2", "llama3_2", "qwen3", "deepseek_v3", "mistral_nemo", "mistral_v1_mislabelled_llama2"]


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, SpecialTokens())


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special)
    return [*(stream.push(id) for id in ids), stream.flush()]


def with_metaspace(scheme: str) -> tokenizers.Tokenizer:
    backend = tiny_tokenizers.sentencepiece()
    backend.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    return backend


TINY = {
    "byte level": wrap(tiny_tokenizers.byte_level()),
    "byte fallback, stripping": wrap(tiny_tokenizers.sentencepiece(strip=True)),
    "byte fallback": wrap(tiny_tokenizers.sentencepiece(strip=False)),
    "metaspace": wrap(with_metaspace("always")),
    "metaspace, never": wrap(with_metaspace("never")),
}


@given(data=st.data(), skip_special=st.booleans())
@settings(max_examples=100)
@pytest.mark.parametrize("kind", TINY)
def test_pieces_joined_are_the_text_of_any_ids(kind, data, skip_special):
    tokenizer = TINY[kind]
    beyond_the_vocabulary = tokenizer.vocab_size + 10
    ids = data.draw(st.lists(st.integers(0, beyond_the_vocabulary), max_size=30))
    assert "".join(pieces(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@given(data=st.data(), skip_special=st.booleans())
@settings(max_examples=100)
def test_runs_of_byte_tokens_are_decoded_as_a_whole(data, skip_special):
    """Random ids seldom form characters; bytes of real text, cut and mixed with other tokens, do."""
    tokenizer = TINY["byte fallback, stripping"]
    others = [tokenizer.id(token) for token in ("<s>", "▁", "e")]
    text = data.draw(st.text(st.characters(codec="utf-8"), max_size=6))
    ids = [tokenizer.id(f"<0x{byte:02X}>") for byte in text.encode()]
    for at in data.draw(st.lists(st.integers(0, 20), max_size=3)):
        ids.insert(at, data.draw(st.sampled_from(others)))
    assert "".join(pieces(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_piece_shows_half_a_character(text):
    for tokenizer in TINY.values():
        if tokenizer is not TINY["metaspace"] and tokenizer is not TINY["metaspace, never"]:
            ids = tokenizer.encode(text, special=False)
            assert UNDECODABLE in text or UNDECODABLE not in "".join(pieces(tokenizer, ids))


def test_bytes_are_held_until_the_character_is_whole():
    tokenizer = TINY["byte level"]
    ids = [
        tokenizer.id(tokenizer.backend.pre_tokenizer.pre_tokenize_str("€")[0][0][n])
        for n in range(3)
    ]
    assert pieces(tokenizer, ids) == ["", "", "€", ""]
    assert pieces(tokenizer, ids[:2]) == ["", "", UNDECODABLE]
    assert pieces(tokenizer, [*ids[:2], tokenizer.id("e")]) == ["", "", UNDECODABLE + "e", ""]


@given(data=st.binary(max_size=12))
@settings(max_examples=300)
def test_any_bytes(data):
    """Among them those that Python's incremental decoder holds longer than needed, such as half a surrogate."""
    tokenizer = TINY["byte level"]
    spelling = {byte: char for char, byte in BYTE_ALPHABET.items()}
    ids = [tokenizer.id(spelling[byte]) for byte in data]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == data.decode(errors="replace")


def test_half_a_surrogate_is_two_marks():
    tokenizer = TINY["byte level"]
    spelling = {byte: char for char, byte in BYTE_ALPHABET.items()}
    ids = [tokenizer.id(spelling[byte]) for byte in b"\xed\xba"] + [tokenizer.id("e")]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == UNDECODABLE * 2 + "e"


def test_broken_byte_tokens_show_one_mark_each():
    tokenizer = TINY["byte fallback"]
    ids = [tokenizer.id(token) for token in ("<0xE2>", "<0x82>", "e", "<0xFF>")]
    assert pieces(tokenizer, ids) == ["", "", UNDECODABLE * 2 + "e", "", UNDECODABLE]


def test_the_first_word_loses_its_space_and_later_ones_keep_it():
    tokenizer = TINY["byte fallback, stripping"]
    ids = [tokenizer.id("<s>"), tokenizer.id("▁"), tokenizer.id("▁"), tokenizer.id("e")]
    assert pieces(tokenizer, ids) == ["", "", " ", "e", ""]


def answered(tokenizer: Tokenizer, prompt: list[int], answer: list[int], skip_special=True) -> str:
    stream = tokenizer.stream(skip_special, after=prompt)
    return "".join([*(stream.push(id) for id in answer), stream.flush()])


def begun_character(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> bytes:
    """The first bytes of a character with which the text of these ids ends."""
    run = b""
    for id in ids:
        piece = None if skip_special and id in tokenizer.special_ids else tokenizer.piece(id)
        run = b"" if isinstance(piece, str) else run + (piece or b"")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(run)
    return decoder.getstate()[0]


def contributed(tokenizer: Tokenizer, prompt: list[int], answer: list[int], skip: bool) -> str:
    """What the `tokenizers` library shows of both and does not show of the prompt.

    With byte fallback an answer can change how it reads whole characters of the prompt. Their text is known and
    stays as it is, so a letter takes their place.
    """
    if tokenizer.backend.token_to_id("<0x00>") is not None:
        begun = begun_character(tokenizer, prompt, skip)
        prompt = [tokenizer.id("e"), *(tokenizer.id(f"<0x{byte:02X}>") for byte in begun)]
    known, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + answer, skip)
    shown = max(at for at in range(len(known) + 1) if whole.startswith(known[:at]))
    return whole[shown:]


TEXTS = [
    "Once upon a time\nthere was\n\n a \u20ac caf\u00e9 \u4e16\u754c \U0001f642\u200d\U0001f9d1!\n",
    "\n", "\n\n  \n", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "\u20ac\u20ac\u20ac",
]  # fmt: skip


def check_every_split(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Prompt and answer are the text of both, wherever one becomes the other."""
    whole = tokenizer.decode(ids)
    for at in range(1, len(ids) + 1):
        ends = range(
            max(at - 3, 0), at + 1
        )  # the last of which is not in the middle of a character
        known = max((tokenizer.decode(ids[:end]).rstrip(UNDECODABLE) for end in ends), key=len)
        assert known + answered(tokenizer, ids[:at], ids[at:]) == whole


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TINY)
def test_prompt_and_answer_are_the_text_at_every_split(kind, text):
    tokenizer = TINY[kind]
    check_every_split(tokenizer, tokenizer.encode(text))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [*REAL, "stories260K"])
def test_prompt_and_answer_are_the_text_at_every_split_for_real_tokenizers(name, text):
    tokenizer = load(name)
    check_every_split(tokenizer, tokenizer.encode(text))


def test_prompt_and_answer_are_the_text_for_a_vocabulary_of_gguf():
    tokenizer = open_checkpoint(model_folder("stories260K.gguf")).tokenizer()
    for text in TEXTS:
        check_every_split(tokenizer, tokenizer.encode(text))
    prompt, answer = tokenizer.encode("hello\n"), [436, 440, 411, 422]
    assert answered(tokenizer, prompt, answer) == '"Hey'


@given(data=st.data(), skip_special=st.booleans())
@settings(max_examples=200)
@pytest.mark.parametrize("kind", TINY)
def test_an_answer_never_shows_the_prompt(kind, data, skip_special):
    """Any ids on both sides: half characters, special tokens, ids without a token."""
    tokenizer = TINY[kind]
    text = data.draw(
        st.text(st.characters(codec="utf-8", exclude_characters=UNDECODABLE), max_size=4)
    )
    drawn = st.lists(st.integers(0, tokenizer.vocab_size + 10), max_size=6)
    ids = [tokenizer.id("e"), *data.draw(drawn), *tokenizer.encode(text), *data.draw(drawn)]
    at = data.draw(st.integers(1, len(ids)))
    prompt, answer = ids[:at], ids[at:]
    expected = contributed(tokenizer, prompt, answer, skip_special)
    assert answered(tokenizer, prompt, answer, skip_special) == expected


def test_a_character_that_the_prompt_begins_is_the_answers_if_it_becomes_whole():
    tokenizer = TINY["byte fallback, stripping"]
    prompt = [tokenizer.id(token) for token in ("e", "<0x0A>", "<0xE2>", "<0x82>")]
    answers = {
        ("<0xAC>", "e"): "\u20ace",
        ("e",): "e",
        (): "",
        (
            "<0x0A>",
        ): UNDECODABLE,  # the library spoils the run: one mark a byte, two of them the prompt's
        ("<s>", "<0xAC>"): "\u20ac",
    }
    for tokens, text in answers.items():
        assert answered(tokenizer, prompt, [tokenizer.id(token) for token in tokens]) == text


def test_the_first_word_of_an_answer_keeps_its_space():
    tokenizer = TINY["byte fallback, stripping"]
    prompt, answer = tokenizer.encode("Once upon"), [tokenizer.id("▁"), tokenizer.id("a")]
    assert answered(tokenizer, prompt, answer) == " a"
    assert "".join(pieces(tokenizer, answer)) == "a"
    marks = [tokenizer.id("<s>")] * 40  # which have no text, such as those of a picture
    assert answered(tokenizer, prompt + marks, answer) == " a"
    assert answered(tokenizer, marks[:1], answer) == "a"  # only a mark: the text begins here


def test_special_tokens_are_shown_only_when_asked():
    tokenizer = TINY["byte level"]
    ids = [tokenizer.id("<|begin|>"), *tokenizer.encode("fox"), tokenizer.id("<|end|>")]
    assert "".join(pieces(tokenizer, ids)) == "fox"
    assert "".join(pieces(tokenizer, ids, skip_special=False)) == "<|begin|>fox<|end|>"


def test_streams_do_not_share_state():
    tokenizer = TINY["byte fallback, stripping"]
    one, two = tokenizer.stream(), tokenizer.stream()
    assert one.push(tokenizer.id("<0xE2>")) == ""
    assert two.push(tokenizer.id("e")) == "e"
    assert one.flush() == UNDECODABLE


def test_an_unknown_decoder_streams_everything_at_the_end():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece(prefix="##")
    tokenizer = wrap(backend)
    assert isinstance(tokenizer.stream(), HeldDecoder)
    assert pieces(tokenizer, [0, 1, 0]) == ["", "", "", tokenizer.decode([0, 1, 0])]
    assert tokenizer.decode([0, 1, 0]) == "ab a"
    assert [answered(tokenizer, [0, 1][:at], [1, 0]) for at in range(3)] == ["##b a", "b a", "b a"]
    backend.decoder = None
    assert "".join(pieces(wrap(backend), [0, 1, 0])) == "a ##b a"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.CTC(),
    ],
)
def test_decoders_outside_the_rules_are_not_guessed(decoder):
    backend = tiny_tokenizers.sentencepiece()
    backend.decoder = decoder
    assert isinstance(PieceTables(backend).decoder(True), HeldDecoder)


def test_nested_sequences_are_the_same_rules():
    steps = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    nested = {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": steps}]}
    assert rules_of(nested) == rules_of({"type": "Sequence", "decoders": steps}) is not None


def test_tokens_outside_the_byte_alphabet_stand_for_themselves():
    assert bytes_of("Ġthe") == b" the"
    assert bytes_of("<｜end｜>") == "<｜end｜>".encode()


@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
@settings(max_examples=60)
def test_real_tokenizers(name, data):
    tokenizer = load(name)
    skip_special = data.draw(st.booleans())
    drawn = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 50), max_size=20))
    text = tokenizer.encode(data.draw(st.text(st.characters(codec="utf-8"), max_size=20)))
    cut = data.draw(st.integers(0, len(text)))
    ids = [*text[:cut], *drawn, *text[cut:]]
    assert "".join(pieces(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


def test_a_token_costs_microseconds_however_long_the_answer():
    tokenizer = load("stories15M")
    ids = tokenizer.encode("Once upon a time there was a little girl who liked the sun. " * 50)

    def seconds_per_token(repeats: int) -> float:
        stream = tokenizer.stream()
        began = time.thread_time()
        for _ in range(repeats):
            for id in ids:
                stream.push(id)
        return (time.thread_time() - began) / (repeats * len(ids))

    seconds_per_token(1)
    assert min(seconds_per_token(20) for _ in range(5)) < 10e-6
