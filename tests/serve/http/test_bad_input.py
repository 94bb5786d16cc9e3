"""Every wrong type, range and combination, over all endpoints: the status, the field's name, what it may be.

The table of wrong values is made from the Structs themselves: whatever a field's type does not take has to be a 400.
"""

import json
import logging

import live_server
import msgspec
import pytest

from cairn.serve.http.endpoints.embeddings import EmbeddingRequest
from cairn.serve.http.protocol.messages import CountRequest, MessagesRequest
from cairn.serve.http.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cairn.serve.http.protocol.responses import ResponsesRequest
from cairn.serve.http.server.keys import Keys

USER = [{"role": "user", "content": "Hi"}]
ENDPOINTS = {
    "/v1/chat/completions": (ChatRequest, {"messages": USER, "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"model": "tiny", "messages": USER, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountRequest, {"model": "tiny", "messages": USER}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
GENERATING = [path for path in ENDPOINTS if path.startswith("/v1") and "count" not in path]
CANDIDATES = [True, "x", 0.5, -1, 7, 2**70, -(2**70), 1e300, [], {}, [None], [[{}]], [-1], [2.5], ["a", 1],
              {"x": None}, {"x": [3]}]  # fmt: skip
RECURSIVE = {"guided_json"}  # any JSON is of its type


def number_types(info):
    if isinstance(info, msgspec.inspect.UnionType):
        return [found for one in info.types for found in number_types(one)]
    is_number = isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType)
    return [info] if is_number else []


def beyond(info):
    """The first numbers on the other side of a range, and the words for it."""
    for one in number_types(info):
        if one.le is not None:
            yield one.le + 1, str(int(one.le))
        if one.ge is not None:
            yield one.ge - 1, str(int(one.ge))
        if one.gt is not None:
            yield one.gt, f"above {one.gt}"


def wrong_values(kind):
    for field in msgspec.structs.fields(kind):
        if field.encode_name in RECURSIVE:
            continue
        values = [(value, "") for value in CANDIDATES]
        values += list(beyond(msgspec.inspect.type_info(field.type)))
        for value, said in values:
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                yield field.encode_name, value, said


def error_of(response):
    """The document, whichever of the two interfaces it belongs to."""
    found = response.json()["error"]
    assert found["message"]
    return found


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_value_that_a_field_does_not_take(server, path):
    kind, good = ENDPOINTS[path]
    assert server.http.post(path, json=good).status_code == 200
    count = 0
    for name, value, said in wrong_values(kind):
        body = json.dumps(good | {name: value}).encode()
        response = server.http.post(path, content=body)
        where = (path, name, value, response.text)
        assert response.status_code == 400, where
        error = error_of(response)
        assert error["message"].startswith(name), where
        assert said in error["message"], where
        assert "it has to be" in error["message"] or "is missing" in error["message"], where
        if "param" in error:
            assert error["param"].startswith(name), where
        count += 1
    assert count > 10 * len(kind.__struct_fields__) / 2


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_missing_is_named_and_null_is_the_default(server, path):
    kind, good = ENDPOINTS[path]
    for field in msgspec.structs.fields(kind):
        if field.required:
            body = {name: value for name, value in good.items() if name != field.encode_name}
            response = server.http.post(path, json=body)
            assert response.status_code == 400
            assert error_of(response)["message"] == f"{field.encode_name} is missing"
    nulls = {
        field.encode_name: None for field in msgspec.structs.fields(kind) if not field.required
    }
    nulls |= {name: value for name, value in good.items() if value is not None}
    assert server.http.post(path, json=nulls).status_code == 200
    unknown = good | {"no_such_field": {"is": ["ignored"]}, "metadata_of_mine": 3}
    assert server.http.post(path, json=unknown).status_code == 200


COMBINATIONS = [
    ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", "stream is not"),
    ("/v1/completions", {"stream_options": {}}, "stream_options", "stream is not"),
    ("/v1/completions", {"suffix": "end"}, "suffix", "fill in the middle"),
    ("/v1/completions", {"best_of": 3, "n": 2}, "best_of", "only n (2)"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens", "at least 1, or echo"),
    ("/v1/completions", {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens 3"),
    ("/v1/completions", {"stop": ["a", ""]}, "stop", "not empty"),
    ("/v1/completions", {"stop": ["a"] * 129}, "stop", "it can have 128"),
    ("/v1/completions", {"stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary has"),
    ("/v1/completions", {"logit_bias": {"1000000": 1}}, "logit_bias", "vocabulary has"),
    ("/v1/completions", {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ("/v1/completions", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "both say"),
    ("/v1/completions", {"guided_choice": []}, "guided_choice", "1 to 10000 texts"),
    ("/v1/completions", {"guided_json": {"$ref": "#"}}, "guided_json", "cannot be followed"),
    ("/v1/completions", {"guided_grammar": "start: start"}, "guided_grammar", "cannot be followed"),
    ("/v1/completions", {"prompt": [10**6]}, "prompt", "vocabulary has"),
    ("/v1/completions", {"prompt": []}, "prompt", "list of texts"),
    ("/v1/completions", {"prompt": [""]}, "prompt", "empty"),
    ("/v1/chat/completions", {"messages": []}, "messages", "empty"),
    ("/v1/chat/completions", {"messages": [{"content": "Hi"}]}, "messages", "role is None"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice", "there are none"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "set already"),
    ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format", "text, json_object"),
    ("/v1/completions", {"allowed_token_ids": [5]}, "allowed_token_ids", "logit_bias of 100"),
    ("/v1/chat/completions", {"bad_words": ["no"]}, "bad_words", "logit_bias of -100"),
    ("/v1/completions", {"use_beam_search": True}, "use_beam_search", "no beam search"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "one of them"),
    ("/v1/chat/completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "one of them"),
    ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options", "runs no tools"),
    ("/v1/messages", {"mcp_servers": [{"name": "x"}]}, "mcp_servers", "runs no tools"),
    ("/v1/embeddings", {"dimensions": 33}, "dimensions", "between 1 and 32"),
    ("/v1/embeddings", {"input": [10**6]}, "input", "vocabulary has"),
    ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences", "not empty"),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice", "there are none"),
    ("/v1/responses", {"tool_choice": "sometimes"}, "tool_choice", "none, auto, required"),
    ("/v1/responses", {"conversation": "x"}, "conversation", "not supported"),
    ("/tokenize", {"messages": USER}, "prompt", "one of prompt, content"),
    ("/detokenize", {"tokens": [10**6]}, "tokens", "from 0 to"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "name", "said"), COMBINATIONS)
def test_combinations_that_cannot_be(server, path, change, name, said):
    response = server.http.post(path, json=ENDPOINTS[path][1] | change)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert said in error["message"]
    assert name in error["message"] or error["param"] == name
    assert error.get("param", name) == name


LONG = "x " * 400
TOO_LONG = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": [5] * 400},
    "/v1/embeddings": {"input": [[5], [5] * 400]},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
}
MOST = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}


@pytest.mark.parametrize("path", GENERATING)
def test_what_is_too_long_is_said_with_both_numbers(server, path):
    good = ENDPOINTS[path][1]
    response = server.http.post(path, json=good | TOO_LONG[path])
    error = error_of(response)
    assert response.status_code == 400
    used = int(error["message"].partition("the prompt has ")[2].split()[0])
    assert used >= 400
    assert f"the context is {live_server.CONTEXT}" in error["message"]
    if "param" in error:
        assert error["param"] in ("messages", "prompt", "input")
        assert error["code"] == "context_length_exceeded"
    else:
        assert error["message"].startswith("messages")
    if path == "/v1/embeddings":
        return
    if "param" in error:
        assert error["type"] == "invalid_request_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (used, live_server.CONTEXT)
    more = server.http.post(path, json=good | {MOST.get(path, "max_tokens"): 4321})
    assert more.status_code == 200
    room = int(more.headers["x-cairn-max-tokens"])
    assert 0 < room < live_server.CONTEXT


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_model_that_is_not_here(server, path, monkeypatch):
    """A name chooses where there are adapters; a single model answers to any name, and says its own."""
    found = server.http.post(path, json=ENDPOINTS[path][1] | {"model": "gpt-9"})
    assert found.status_code == 200
    assert found.json().get("model", "tiny") == "tiny"
    monkeypatch.setattr(server.service.serving, "had_adapters", True)
    response = server.http.post(path, json=ENDPOINTS[path][1] | {"model": "gpt-9"})
    assert response.status_code == 404
    assert "gpt-9" in error_of(response)["message"]
    assert "tiny" in error_of(response)["message"]


def test_keys_and_sizes_at_every_endpoint(tiny_folder):
    with live_server.live(tiny_folder, Keys([("me", "sk-test")]), max_body_bytes=3000) as server:
        mine = {"authorization": "Bearer sk-test"}
        for path, (_, good) in ENDPOINTS.items():
            for headers in ({}, {"authorization": "Bearer sk-other"}, {"x-api-key": "sk-other"}):
                refused = server.http.post(path, json=good, headers=headers)
                assert refused.status_code == 401, path
                assert error_of(refused)["type"] == "authentication_error"
                assert "sk-other" not in refused.text
            assert server.http.post(path, json=good, headers=mine).status_code == 200
            large = json.dumps(good | {"user": "x" * 4000}).encode()
            for content in (large, iter([large[:2000], large[2000:]])):
                refused = server.http.post(path, content=content, headers=mine)
                assert refused.status_code == 413, path
                assert "3000 bytes" in error_of(refused)["message"]
        server.at_rest()


def test_a_dead_engine_at_every_endpoint_is_told_and_logged_once(tiny_folder, caplog):
    with live_server.live(tiny_folder) as server, caplog.at_level(logging.INFO, "cairn"):

        def broken():
            raise RuntimeError("the device fell off")

        server.engine.step = broken
        for _ in range(2):
            for path in GENERATING:
                response = server.http.post(path, json=ENDPOINTS[path][1])
                assert response.status_code == 503, path
                assert "fell off" in error_of(response)["message"]
                assert int(response.headers["retry-after"]) >= 1
        assert server.http.get("/health").status_code == 503
        assert server.http.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
    said = [one for one in caplog.records if "fell off" in one.getMessage()]
    assert len(said) == 1


def test_paths_and_methods_that_are_not_there(server):
    for path in ENDPOINTS:
        assert server.http.get(path).status_code == 405
        assert error_of(server.http.get(path))["message"]
    for path in ("/v1/chat", "/v1/nothing", "/v2/models"):
        assert server.http.post(path, json={}).status_code == 404
        assert path in error_of(server.http.post(path, json={}))["message"]


def test_content_that_is_missing_is_named_and_an_answer_may_have_none(server):
    def ask(*messages):
        body = {"messages": messages, "max_tokens": 1}
        return server.http.post("/v1/chat/completions", json=body)

    for message in ({"role": "user"}, {"role": "system", "content": None}):
        refused = ask(*USER, message)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("messages[1].content is missing")
    empty, silent, absent = (
        ask(*USER, {"role": "assistant", **content}, *USER).json()["usage"]["prompt_tokens"]
        for content in ({"content": ""}, {"content": None}, {})
    )
    assert empty == silent == absent


def test_a_path_without_its_prefix_is_told_the_right_one(server):
    for path, meant in (
        ("/messages", "/v1/messages"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
    ):
        said = server.http.post(path, json={"messages": USER}).json()["error"]["message"]
        assert said == f"there is no {path}; did you mean {meant}?"
    assert server.http.get("/nothing").json()["error"]["message"] == "there is no /nothing"
    for path in ("/api/pull", "/api/blobs/sha256:29fdb92e57cf0827"):
        managed = server.http.post(path, json={"model": "llama3"})
        assert managed.status_code == 404
        assert "cairn serve MODEL" in managed.json()["error"]
