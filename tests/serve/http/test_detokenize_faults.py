"""An exception while the text of one answer is made ends that answer, with its reason, and nothing else."""

import concurrent.futures

import httpx
import live_server
import pytest

ASKED = dict(max_tokens=20, temperature=0, ignore_eos=True)


class Broken:
    """A decoder that fails at its n-th token, and at the end."""

    def __init__(self, tokens):
        self.left = tokens

    def push(self, id):
        self.left -= 1
        if self.left < 0:
            raise ValueError("no such byte")
        return "x"

    def flush(self):
        raise ValueError("no such byte")


@pytest.fixture
def poisoned(server, monkeypatch):
    """A server whose tokenizer cannot write answers to prompts that end with an exclamation mark."""
    tokenizer = server.service.tokenizer
    stream, mark = tokenizer.stream, tokenizer.encode("!", special=False)[-1]

    def poisoned(skip_special=True, after=()):
        return Broken(5) if list(after)[-1:] == [mark] else stream(skip_special, after)

    monkeypatch.setattr(tokenizer, "stream", poisoned)
    return server


@pytest.mark.parametrize("stream", [False, True])
def test_the_others_go_on(poisoned, caplog, stream):
    whole = poisoned.http.post("/v1/completions", json={"prompt": "Once", **ASKED}).json()

    def ask(prompt):
        body = {"prompt": prompt, "stream": stream and prompt == "Bad!", **ASKED}
        return poisoned.http.post("/v1/completions", json=body)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, ["Once", "Bad!", "Once", "Bad!"]))
    for fine in answers[::2]:
        assert fine.json()["choices"][0]["text"] == whole["choices"][0]["text"]
    for bad in answers[1::2]:
        if not stream:
            assert bad.status_code == 500
        assert "no such byte" in bad.text
        assert "detokenize_error" in bad.text
    assert poisoned.http.get("/health").json()["status"] == "ok"
    assert poisoned.service.serving.dead() is None
    poisoned.at_rest()
    assert "no such byte" in caplog.text


def test_an_answer_that_is_aborted_and_cannot_be_written_breaks_nothing(poisoned):
    """The end of an answer writes what its decoder holds back, and that may fail as well."""
    with poisoned.held():
        body = {"prompt": "Bad!", **ASKED}
        with pytest.raises(httpx.ReadTimeout):
            poisoned.http.post("/v1/completions", json=body, timeout=live_server.reads_for(0.3))
    poisoned.at_rest()
    fine = poisoned.http.post("/v1/completions", json={"prompt": "Once", **ASKED})
    assert fine.status_code == 200
