"""An error that comes after the first event is an event of its protocol, and no error keeps a request's place."""

import importlib
import json

import pytest

from cairn.core.errors import RequestError

USER = [{"role": "user", "content": "tell me"}]
COUNT = 8
# Path, body, the writer of its stream, what the stream's last lines are.
PROTOCOLS = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": COUNT}, "chat.ChunkWriter", "[DONE]"),
    "completions": ("/v1/completions", {"prompt": "tell me", "max_tokens": COUNT}, "completions.ChunkWriter", "[DONE]"),
    "messages": ("/v1/messages", {"model": "tiny", "messages": USER, "max_tokens": COUNT}, "messages.EventWriter", ""),
    "responses": ("/v1/responses", {"input": "tell me", "max_output_tokens": COUNT}, "responses.EventWriter", ""),
    "ollama": ("/api/generate", {"model": "tiny", "prompt": "tell me", "options": {"num_predict": COUNT}},
               "ollama.LineWriter", ""),
    "llama.cpp": ("/completion", {"prompt": "tell me", "n_predict": COUNT}, "llamacpp_answer.LlamaWriter", ""),
}  # fmt: skip


def stream(server, case):
    """The documents of a stream that came to its end, and its last line."""
    path, body, _, _ = PROTOCOLS[case]
    answer = server.http.post(path, json={**body, "stream": True, "temperature": 0})
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    return [json.loads(line) for line in lines if line.startswith("{")], lines[-1]


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("no such thing"), RequestError("nothing is so")]
)
@pytest.mark.parametrize("case", PROTOCOLS)
def test_an_error_behind_the_first_event_is_an_event(server, monkeypatch, caplog, case, error):
    *_, name, last = PROTOCOLS[case]
    module, kind = f"cairn.serve.http.endpoints.{name}".rsplit(".", 1)
    writer = getattr(importlib.import_module(module), kind)
    write, written = writer.write, []

    def breaks_behind_the_first_event(self, delta):
        if any(written):
            raise error
        written.append(write(self, delta))
        return written[-1]

    def breaks(self):
        raise error

    monkeypatch.setattr(writer, "write", breaks_behind_the_first_event)
    monkeypatch.setattr(writer, "last", breaks)  # where all came in one delta
    events, end = stream(server, case)
    said = json.dumps(events[-1])
    assert "error" in said
    assert len(events) > 1
    if isinstance(error, RequestError):
        assert "nothing is so" in said
    else:
        assert "bug in the server" in said
        assert "no such thing" not in said
        assert "no such thing" in caplog.text  # with its traceback
    assert last in end
    monkeypatch.undo()
    assert json.dumps(stream(server, case)[0][-1]) != said


@pytest.mark.parametrize("error", [OSError("no room"), MemoryError(), RequestError("closed")])
def test_a_request_that_is_not_submitted_gives_its_place_back(server, monkeypatch, error):
    def submit(jobs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(server.service.serving, "submit", submit)
        for _ in range(3):
            answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert answer.status_code == (503 if isinstance(error, RequestError) else 500)
    assert (server.service.admission.inside, len(server.service.open)) == (0, 0)
    assert server.service.book.running() == []
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
