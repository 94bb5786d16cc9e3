"""Ten thousand bodies that nobody would send: valid ones that were bent, JSON of any kind, bytes of any kind.

    a valid body of an endpoint -> a value of another type, a field gone or twice, a list emptied or grown, text cut in
    its bytes, ... -> 4xx with an error document; 2xx where it stayed valid; never 5xx; and the server lives

The mutations know the structure of the bodies and nothing about what is checked. A seed repeats a run; CAIRN_LONG=1
makes it ten thousand.
"""

import copy
import json
import os
import random

import live_server
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valid_bodies import ODD, VALID

pytestmark = pytest.mark.timeout(1200 if os.environ.get("CAIRN_LONG") else 120)
BODIES = 10_000 if os.environ.get("CAIRN_LONG") else 1_500
BREAKS = [b'"', b"{", b"]", b",", b"\\u", b"\xff", b"NaN", b"1e999", b"//"]
PATHS = sorted({path for path, _ in VALID})
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(ODD)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def target(agent_folder):
    """Answers are short, and the line is long enough for whatever `n` is left after a mutation."""
    with live_server.live(agent_folder, max_request_tokens=2, num_gpu_blocks_override=512) as made:
        yield made
        made.at_rest()
        made.engine.scheduler.queues.check_integrity()
        assert made.service.health().status == "ok"


def error_message(document):
    """In OpenAI's shape, or at the top as Cohere has it."""
    return document["error"]["message"] if "error" in document else document["message"]


def places(value, path=()):
    """Every place in a document, the document itself included."""
    yield path
    if not isinstance(value, dict | list):
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from places(child, (*path, key))


def bend(body, draw):
    """One change somewhere in a document."""
    body = copy.deepcopy(body)
    path = draw.choice(list(places(body)))
    if not path:
        return draw.choice([body, [body], {"body": body}, draw.choice(ODD)])
    *outer, last = path
    inside = body
    for key in outer:
        inside = inside[key]
    value = inside[last]
    match draw.randrange(9):
        case 0:
            del inside[last]
        case 1:
            inside[last] = [value]
        case 2:
            inside[last] = {"x": value}
        case 3 if isinstance(value, list) and value:
            inside[last] = value * draw.choice([2, 50, 700])
        case 4 if isinstance(value, str) and value:
            inside[last] = draw.choice([value[:-1], value + "\x00", value.upper(), value * 400])
        case 5 if isinstance(value, int | float):
            inside[last] = draw.choice([-value, value * 1000, value + 0.5, str(value), value - 10])
        case 6 if isinstance(inside, dict):
            inside[draw.choice(["x", "type", "name", "content", "model"])] = inside.pop(last)
        case _:
            inside[last] = draw.choice(ODD)
    return body


def spoil(raw, draw):
    """Changes in the bytes themselves."""
    raw = bytearray(raw)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(raw) + 1)
        match draw.randrange(4):
            case 0:
                raw[at:at] = bytes([draw.randrange(256)])
            case 1:
                del raw[at : at + draw.randrange(1, 9)]
            case 2:
                raw[at : at + 1] = draw.choice(BREAKS)
            case _:
                raw = raw[:at]
    return bytes(raw)


def encoded(body):
    return json.dumps(body).encode("utf-8", "surrogatepass")


def made(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        path, body = draw.choice(VALID)
        if draw.random() < 0.1:
            path = draw.choice(PATHS)  # a body of another endpoint
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            body = bend(body, draw)
        raw = encoded(body)
        yield path, spoil(raw, draw) if draw.random() < 0.15 else raw


def refused_or_valid(server, path, raw):
    response = server.http.post(path, content=raw)
    status = response.status_code
    assert status < 500, (path, raw[:2000], response.text[:500])
    if status >= 400:
        assert error_message(response.json()), raw
    else:
        assert status == 200
    return status


def test_every_valid_body_is_valid(target):
    for path, body in VALID:
        response = target.http.post(path, json=body)
        assert response.status_code == 200, (path, body, response.text)


def test_bodies_that_were_bent(target):
    seen = {}
    for path, raw in made(BODIES, seed=BODIES):
        status = refused_or_valid(target, path, raw)
        seen[status] = seen.get(status, 0) + 1
    assert seen[400] > BODIES / 2  # they are malformed, most of them
    assert set(seen) <= {200, 400, 404}
    print(f"{sum(seen.values())} bodies: {dict(sorted(seen.items()))}")


@settings(max_examples=BODIES // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PATHS), st.one_of(st.binary(max_size=60), anything.map(encoded)))
def test_any_bytes_and_any_json(target, path, raw):
    assert refused_or_valid(target, path, raw) in (400, 404)


@settings(max_examples=BODIES // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(VALID), st.data())
def test_any_value_in_any_field(target, valid, data):
    path, body = valid
    field = data.draw(st.sampled_from(sorted(body)))
    refused_or_valid(target, path, encoded(body | {field: data.draw(anything)}))
