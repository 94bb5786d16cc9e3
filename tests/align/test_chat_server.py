"""What is refused of those who talk to a model that learns, and that nobody waits for ever."""

import http.client
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cairn.align.chat_server import ChatServer

PATH = "/v1/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def talk():
    tokenizer = SimpleNamespace(templates={}, encode=lambda text: [1, 2])
    made = ChatServer(SimpleNamespace(tokenizer=tokenizer), "run", 48, lambda: "<p>page</p>")
    yield made
    made.close()


def asked(talk, headers, body=b"", method="POST", path=PATH):
    """Status and answer; only these headers are sent."""
    connection = http.client.HTTPConnection(*talk.server.server_address, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize("length", ["-1", "ten", "9" * 5000])
def test_a_length_that_is_none(talk, length):
    assert asked(talk, {**JSON, "Content-Length": length})[0] == 400


def test_pages_of_other_sites_are_refused(talk):
    assert asked(talk, {"Content-Type": "text/plain", "Content-Length": "0"})[0] == 415
    for host in ("evil.example", "evil.example:80", "[", ""):
        assert asked(talk, {**JSON, "Host": host, "Content-Length": "0"})[0] == 403
        assert asked(talk, {"Host": host}, method="GET", path="/")[0] == 403
    assert asked(talk, {"Host": "localhost:1"}, method="GET", path="/")[0] == 200


@pytest.mark.parametrize("broken", ["updated", "generate"])
def test_whoever_waits_is_told_of_any_failure(talk, broken):
    def fail(*_):
        raise RuntimeError("broken here")

    talk.policy.updated = talk.policy.generate = lambda *_: None
    setattr(talk.policy, broken, fail)
    body = b'{"prompt": "p", "max_tokens": 4}'
    with ThreadPoolExecutor(2) as pool:
        headers = {**JSON, "Content-Length": str(len(body))}
        waiting = [pool.submit(asked, talk, headers, body) for _ in range(2)]
        while not all(one.done() for one in waiting):
            talk.answer(7)
    for one in waiting:
        status, text = one.result()
        assert status == 500
        assert "RuntimeError: broken here" in text
