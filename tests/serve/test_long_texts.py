"""Long texts are tokenized without the interpreter lock: other threads, such as a server's event loop, go on."""

import threading
import time

import pytest

from cairn.models.runnable import open_model
from cairn.models.tokenizer import LONG_TEXT


@pytest.fixture(scope="module")
def tokenizer():
    return open_model("cairn-tiny", None).tokenizer


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_another_thread_runs_meanwhile(tokenizer, verb):
    """It computes for a good part of the time that the process does, however busy the machine is."""
    text = "once upon a time " * 20_000
    value = text if verb == "encode" else tokenizer.encode(text) * 40
    work, ended, shares = getattr(tokenizer, verb), threading.Event(), []
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def measure():
        own, whole = time.clock_gettime(clock), time.process_time()
        work(value)
        shares.append((time.clock_gettime(clock) - own) / (time.process_time() - whole))
        ended.set()

    threading.Thread(target=measure).start()
    while not ended.is_set():
        pass
    assert shares[0] > 0.15


def test_long_texts_have_the_tokens_of_the_plain_call(tokenizer):
    text = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 😀. " * 300
    assert len(text) > LONG_TEXT
    for special in (True, False):
        ids = tokenizer.encode(text, special)
        assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids
        for skip in (True, False):
            plain = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip) == plain
