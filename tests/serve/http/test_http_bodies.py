"""Bodies that are wrong in every way a generator can think of: each is a 4xx with an error document."""

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.protocol.requests import ChatRequest, CompletionRequest

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)
GOOD = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/messages": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
    },
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
# What each field must never be; null is always the default.
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
WHOLE = ("n", "top_k", "seed", "min_tokens", "priority")
FLAGS = (
    "stream",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "return_token_ids",
)
no_number = st.one_of(
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.just({}),
    st.just(1e300),
    st.just(-1e9),
)
no_whole = st.one_of(
    st.text(max_size=5),
    st.booleans(),
    st.just(0.5),
    st.just(2**80),
    st.just(-(2**40)),
    st.just([1]),
)
no_flag = st.one_of(st.text(max_size=3), st.integers(), st.just([]), st.just({}))
no_text = st.one_of(st.integers(), st.booleans(), st.just({}), st.just([{}]), st.just([None]))
wrong_field = st.one_of(
    st.tuples(st.sampled_from(NUMBERS), no_number),
    st.tuples(st.sampled_from(WHOLE), no_whole),
    st.tuples(st.sampled_from(FLAGS), no_flag),
    st.tuples(st.sampled_from(["stop", "prompt", "messages", "tokens"]), no_text),
    st.tuples(
        st.just("logit_bias"), st.sampled_from([1, True, [{}], {"x": 1}, {"1": 1e9}, {"-1": 1}])
    ),
    st.tuples(
        st.just("stop_token_ids"),
        st.one_of(st.just([-1]), st.just("1"), st.just([2**40]), st.just([1.5])),
    ),
    st.tuples(st.just("model"), st.one_of(st.integers(), st.just([]))),
    st.tuples(st.just("max_tokens"), st.one_of(no_whole, st.just(2**40), st.just(-2))),
)
anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
no_object = anything.filter(lambda value: not isinstance(value, dict)).map(
    lambda value: json.dumps(value).encode()
)
broken = st.one_of(st.binary(max_size=40).filter(lambda raw: not _is_json(raw)), no_object)
RELEVANT = {
    path: set(kind.__struct_fields__)
    for path, kind in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatRequest),
    )
}
RELEVANT |= {"/v1/messages": {"temperature", "top_p", "stream", "messages", "model"}}
RELEVANT |= {"/v1/responses": {"temperature", "top_p", "stream", "model"}}
RELEVANT |= {"/tokenize": {"prompt", "messages", "model"}, "/detokenize": {"tokens", "model"}}
NAMES = st.sampled_from(sorted(RELEVANT["/v1/chat/completions"] - {"n"}))


def _is_json(raw):
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


@st.composite
def malformed(draw):
    path = draw(st.sampled_from(PATHS))
    if draw(st.integers(0, 3)) == 0:
        return path, draw(broken)
    name, value = draw(wrong_field.filter(lambda pair: pair[0] in RELEVANT[path]))
    return path, json.dumps(GOOD[path] | {name: value}).encode()


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(case=malformed())
def test_a_malformed_body_is_refused_and_the_server_lives(server, case):
    path, body = case
    response = server.http.post(path, content=body)
    assert 400 <= response.status_code < 500, (body, response.text)
    assert response.json()["error"]["message"]


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), extra=st.dictionaries(NAMES, anything, max_size=3))
def test_nothing_that_can_be_written_is_a_server_error(server, path, extra):
    response = server.http.post(path, content=json.dumps(GOOD[path] | extra).encode())
    assert response.status_code < 500, (extra, response.text)


def test_bodies_that_decoders_choke_on(server):
    deep = b'{"prompt":' + b"[" * 100_000
    lone = b'{"prompt": "\\ud800"}'
    huge = b'{"prompt": "Hi", "seed": ' + b"9" * 5000 + b"}"
    latin = b'{"prompt": "caf\xe9"}'
    nested = json.dumps(
        {"messages": [{"role": "user", "content": "Hi", "x": _nested(300)}]}
    ).encode()
    for body in (b"", b"null", deep, lone, huge, latin):
        response = server.http.post("/v1/completions", content=body)
        assert response.status_code == 400, (body[:40], response.text)
    assert server.http.post("/v1/chat/completions", content=nested).status_code == 400
    assert server.http.get("/health").json()["status"] == "ok"


def _nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "a", "n": 500}, "n is 500; it has to be a whole number between 1 and 128"),
        ({"prompt": "a", "stream": 1}, "stream is 1; it has to be true or false"),
        (
            {"prompt": "a", "stream_options": {"include_usage": 3}},
            "stream_options.include_usage is 3; it has to be true or false",
        ),
        ({"prompt": "a", "stop": ["x", 2]}, "stop[1] is 2; it has to be text"),
        ({}, "prompt is missing"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(body, said):
    with pytest.raises(Refusal) as refused:
        decode(json.dumps(body).encode(), CompletionRequest)
    assert refused.value.message == said


@given(st.text(max_size=3), st.text(max_size=3), st.integers(0xD800, 0xDFFF))
def test_half_of_a_character_is_named_with_its_place(before, behind, half):
    body = json.dumps({"prompt": before + chr(half) + behind}).encode()
    with pytest.raises(
        Refusal, match=rf"\\u{half:x} at byte {body.index(b'u%x' % half) - 1} is half"
    ):
        decode(body, CompletionRequest)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b" ", "the body is empty"),
        (b'{"prompt": "', "truncated"),
        (rb'{"prompt": "\ud83d\ude00" x}', "malformed"),
        (b'{"messages": 3}', "it has to be a list of objects"),
    ],
)
def test_what_is_wrong_with_a_body(body, said):
    with pytest.raises(Refusal, match=said):
        decode(body, ChatRequest)
