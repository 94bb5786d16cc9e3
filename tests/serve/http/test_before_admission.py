"""What a request costs before it is let in: sizes are checked first, long texts stay off the loop, all is billed."""

import threading

import live_server
import pytest

from cairn.serve.http.chat.conversation import is_longer
from cairn.serve.http.server.keys import Keys

KEY = {"authorization": "Bearer sk-test"}


class Calls:
    """Which threads called a function."""

    def __init__(self, monkeypatch, owner, name):
        self.threads, real = [], getattr(owner, name)

        def noted(*args, **kwargs):
            self.threads.append(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/completions",
            {"prompt": ["Hi"] * 1024, "n": 128},
            ("131072 answers", "at most 1032"),
        ),
        ("/v1/completions", {"prompt": [[5]] * 11, "n": 100}, ("1100 answers", "at most 1032")),
        ("/v1/embeddings", {"input": ["Hi"] * 1033}, ("1033 entries", "at most 1032")),
        ("/v1/completions", {"prompt": "x" * 20_000}, ("20000 characters", "160 tokens")),
        ("/v1/completions", {"prompt": ["x", "x" * 20_000]}, ("20000 characters", "160 tokens")),
        ("/v1/completions", {"prompt": [5] * 20_000}, ("20000 tokens", "context is 160")),
        ("/v1/embeddings", {"input": "x" * 20_000}, ("20000 characters", "160 tokens")),
    ],
)
def test_what_is_too_much_is_refused_before_any_work(server, monkeypatch, path, body, said):
    tokenizer, backend = server.service.tokenizer, server.service.serving
    work = [
        Calls(monkeypatch, tokenizer, "encode"),
        Calls(monkeypatch, tokenizer, "encode_batch"),
        Calls(monkeypatch, backend, "jobs"),
    ]
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400
    for words in said:
        assert words in answer.json()["error"]["message"]
    assert not any(calls.threads for calls in work)


def test_a_chat_for_too_many_answers_is_not_rendered(tiny_folder, monkeypatch):
    with live_server.live(tiny_folder, max_num_seqs=2, max_waiting=3) as server:
        rendered = Calls(monkeypatch, server.service.tokenizer.templates, "render")
        body = {"messages": [{"role": "user", "content": "Hi"}], "n": 6}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "6 answers" in answer.json()["error"]["message"]
        assert not rendered.threads


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"])
def test_a_long_chat_is_rendered_and_tokenized_beside_the_loop(server, monkeypatch, path):
    answered = path == "/v1/chat/completions"  # and so it is refused before it is tokenized
    tokenizer = server.service.tokenizer
    spied = [Calls(monkeypatch, tokenizer.templates, "render")]
    if not answered:
        spied.append(Calls(monkeypatch, tokenizer, "encode"))
    messages = [{"role": "user", "content": "word " * 400}] * 10
    server.http.post(path, json={"model": "tiny", "messages": messages, "max_tokens": 1})
    for calls in spied:
        assert len(calls.threads) == 1
        assert server.thread not in calls.threads


def test_many_ids_are_spelled_beside_the_loop(server, monkeypatch):
    decoded = Calls(monkeypatch, server.service.tokenizer, "decode")
    server.http.post("/detokenize", json={"tokens": [5] * 9000})
    assert server.thread not in decoded.threads
    assert len(decoded.threads) == 1
    wrong = server.http.post("/detokenize", json={"tokens": [5] * 9000 + [10**6]})
    assert wrong.status_code == 400
    spelled = Calls(monkeypatch, server.service.tokenizer, "token")
    asked = {"prompt": "a b " * 5000, "return_token_strs": True}
    strings = server.http.post("/tokenize", json=asked).json()["token_strs"]
    assert len(strings) == len(spelled.threads) > 8192
    assert server.thread not in spelled.threads


def test_a_text_longer_than_the_context_can_still_be_counted(server):
    text = "x" * 20_000
    assert server.http.post("/tokenize", json={"prompt": text}).json()["count"] > 160
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    assert server.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 160


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "Hi"}, 200),
        ("/detokenize", {"tokens": [5]}, 200),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": []}, 400),
        ("/v1/completions", {"prompt": "Hi", "temperature": 9}, 400),
        ("/v1/completions", {"prompt": "Hi", "model": "gpt-9"}, 200),
        ("/v1/completions", {"prompt": "x" * 3000}, 413),
    ],
)
def test_every_request_is_billed_whatever_becomes_of_it(tiny_folder, path, body, status):
    settings = dict(key_requests_per_minute=2, max_body_bytes=2000)
    with live_server.live(tiny_folder, Keys([("me", "sk-test")]), **settings) as server:
        for expected in (status, status, 429):
            assert server.http.post(path, json=body, headers=KEY).status_code == expected


@pytest.mark.parametrize("value", ["abc", ["a", "b", "c"], {"a": "bc"}, [[["a"], "b"], 1], None])
def test_how_long_a_value_is(value):
    assert is_longer(["x" * 50, value], 50)
    assert not is_longer([value], 50)
