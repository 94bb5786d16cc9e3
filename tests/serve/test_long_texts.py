"""Long texts are tokenized without the interpreter lock: other threads, such as a server's event loop, go on."""

import itertools
import threading

import pytest

from cairn.models.runnable import open_model
from cairn.models.tokenizer import LONG_TEXT


@pytest.fixture(scope="module")
def tokenizer():
    return open_model("cairn-tiny", None).tokenizer


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_another_thread_runs_meanwhile(tokenizer, verb):
    text = "once upon a time " * 20_000
    value = text if verb == "encode" else tokenizer.encode(text) * 4
    work, turns, gained, ended = getattr(tokenizer, verb), [0], [], threading.Event()

    def measure():
        for _ in range(3):
            before = turns[0]
            work(value)
            gained.append(turns[0] - before)
        ended.set()

    threading.Thread(target=measure).start()
    for turn in itertools.count():
        turns[0] = turn
        if ended.is_set():
            break
    assert min(gained) > 0


def test_long_texts_have_the_tokens_of_the_plain_call(tokenizer):
    text = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 😀. " * 300
    assert len(text) > LONG_TEXT
    for special in (True, False):
        ids = tokenizer.encode(text, special)
        assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids
        for skip in (True, False):
            plain = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip) == plain
