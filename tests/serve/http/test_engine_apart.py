"""Streams of an engine in a process of its own: the same events as from a thread, and one end each when it dies."""

import json
import threading

import live_server
import pytest

CONTEXT = 1400
SAID = [{"role": "user", "content": "Once"}]
PATHS = {
    "/v1/chat/completions": {"messages": SAID, "n": 2},
    "/v1/completions": {"prompt": ["Once", "Twice"], "stop": ["zzz"]},
    "/v1/messages": {"messages": SAID},
    "/v1/responses": {"input": "Once"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("apart")
    return live_server.make_folder(path, context=CONTEXT)


@pytest.fixture(scope="module")
def apart(folder):
    with live_server.live(folder, engine_in="process", num_gpu_blocks_override=512) as made:
        yield made


def body_of(path, tokens):
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    base = {"model": "tiny", most: tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return base | PATHS[path]


def events(text):
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


def said(text):
    """What was said by each answer, and how often something ended."""
    texts, ends = {}, 0
    for line in events(text):
        event = {} if line == "[DONE]" else json.loads(line)
        for choice in event.get("choices", ()):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            ends += choice["finish_reason"] is not None
        kind = event.get("type", "")
        if kind in ("content_block_delta", "response.output_text.delta"):
            delta = event["delta"]
            texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else delta["text"])
        ends += kind in ("message_stop", "response.incomplete", "response.completed")
    return texts, ends


@pytest.mark.parametrize("path", PATHS)
def test_thread_process_and_a_layer_in_between_say_the_same(folder, apart, path):
    """With CORS there is something between an endpoint and its socket."""
    body = body_of(path, 40)
    found = [said(apart.http.post(path, json=body).text)]
    for settings in ({}, {"cors_origins": ["http://page"]}):
        with live_server.live(folder, **settings) as other:
            found.append(said(other.http.post(path, json=body).text))
    assert found[0] == found[1] == found[2]
    texts, ends = found[0]
    assert ends == len(texts) == (2 if "completions" in path else 1)
    assert all(len(text) > 10 for text in texts.values())


def test_the_prompts_ids_are_said_once(apart):
    body = body_of("/v1/completions", 20) | {"return_token_ids": True}
    found = {0: [], 1: []}
    for line in events(apart.http.post("/v1/completions", json=body).text)[:-1]:
        for choice in json.loads(line)["choices"]:
            found[choice["index"]].append(choice)
    prompts = [apart.service.tokenizer.encode(text) for text in ("Once", "Twice")]
    for index, choices in found.items():
        assert sum(len(choice["token_ids"]) for choice in choices) == 20
        assert [choice.get("prompt_token_ids") for choice in choices] == [
            prompts[index],
            *[None] * (len(choices) - 1),
        ]


def test_every_open_stream_ends_once_when_the_engine_dies(apart):
    """And the next request is answered by a new one."""
    begun, texts = threading.Barrier(len(PATHS) + 1), {}

    def read(path):
        with apart.http.stream("POST", path, json=body_of(path, 1000)) as answer:
            lines = answer.iter_lines()
            first = [next(lines)]
            begun.wait(live_server.PATIENCE_S)
            texts[path] = "\n".join([*first, *lines])

    threads = [threading.Thread(target=read, args=(path,)) for path in PATHS]
    for thread in threads:
        thread.start()
    begun.wait(live_server.PATIENCE_S)
    apart.service.serving.engine.client._group.processes[0].kill()
    for thread in threads:
        thread.join()
    for path, text in texts.items():
        failed = [line for line in events(text) if '"error"' in line and "SIGKILL" in line]
        assert len(failed) == 1, (path, text[-300:])
        assert said(text)[1] == 0
    live_server.wait_until(lambda: not apart.service.open)
    assert apart.service.admission.inside == 0
    assert not apart.service.serving.engine._open
    again = apart.http.post("/v1/completions", json=body_of("/v1/completions", 5)).text
    assert said(again)[1] == 2
    assert apart.http.get("/health").json()["status"] == "ok"  # as long as it was away: "starting"
    client = apart.service.serving.engine.client
    client.restarting = "SIGKILL"  # it gets no requests meanwhile, and is not killed over it
    answers = [apart.http.get(path).status_code for path in ("/health", "/live")]
    client.restarting = None
    assert answers == [503, 200]


def test_a_client_that_leaves_ends_its_request(apart):
    with apart.http.stream("POST", "/v1/messages", json=body_of("/v1/messages", 1000)) as answer:
        next(answer.iter_lines())
    live_server.wait_until(lambda: not apart.service.serving.engine.client._receivers)
    assert not apart.service.serving.engine._open
    assert not apart.service.open
