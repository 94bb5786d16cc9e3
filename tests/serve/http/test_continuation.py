"""An answer that moves to another server stays the same answer; a router knows what a server has cached."""

import asyncio
import json
import re

import httpx
import msgspec
import pytest

from cairn.core.shared_secret import Secret
from cairn.fleet.config import RouterConfig
from cairn.fleet.router import Router
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.continuation import ProgressSend
from cairn.serve.token_marks import PROGRESS, TOKENS, continuation_proof, read_answer

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 14,
    "temperature": 0,
    "stream": True,
}
TEXT = {"model": "tiny", "prompt": "once upon", "max_tokens": 14, "temperature": 0, "stream": True}
CASES = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", TEXT),
    "messages": ("/v1/messages", CHAT),
    "seeded": ("/v1/completions", TEXT | {"temperature": 0.9, "seed": 7}),
    "penalties": ("/v1/completions", TEXT | {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
    "usage": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "grammar": ("/v1/completions", TEXT | {"structured_outputs": {"regex": "[a-f]{12}"}}),
}


def continues(server, tail, id=b"moved"):
    """Headers of a router that knows the server's secret."""
    proof = continuation_proof(server.service.router_secret, id, tail)
    return {"x-cairn-continue": str(len(tail)), "x-cairn-proof": proof.decode()}


def stream(server, path, body, so_far=()):
    """(events without what differs by the moment, ids of each write)."""
    sent, headers = json.dumps(body).encode(), {"x-cairn-router": "1", "x-request-id": "moved"}
    if so_far:
        more = msgspec.msgpack.encode(list(so_far))
        sent, headers = sent + more, headers | continues(server, more)
    answer = server.http.post(path, content=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith(":e\n\n")
    writes, ids, events = [], [], []
    for line in answer.text.split("\n"):
        if line.startswith(":t "):
            ids.append([int(id) for id in line[3:].split()])
            writes.append(events)
            events = []
        elif line.startswith("data: "):
            events.append(line)
    return writes, ids, events


def text_of(writes, end):
    """What a client puts together, whatever the protocol calls it."""
    found, ends = "", []
    for line in [line for events in [*writes, end] for line in events]:
        if line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ends.append(choice.get("finish_reason"))
        if event.get("type") == "content_block_delta":
            found += event["delta"]["text"]
        ends += [event["delta"].get("stop_reason")] if event.get("type") == "message_delta" else []
        ends += (
            [event["usage"]["completion_tokens"]]
            if "choices" in event and event.get("usage")
            else []
        )
    return found, [end for end in ends if end is not None]


@pytest.mark.parametrize("case", CASES)
def test_an_answer_continued_at_any_write_is_the_same_answer(server, case):
    path, body = CASES[case]
    writes, ids, end = stream(server, path, body)
    whole = text_of(writes, end)
    assert sum(map(len, ids)) >= 8
    assert all(whole)
    for cut in {1, 2, len(ids) // 2, len(ids) - 1, len(ids)}:
        so_far = [id for write in ids[:cut] for id in write]
        rest, more, last = stream(server, path, body, so_far)
        assert so_far + [id for write in more for id in write] == [id for one in ids for id in one]
        text, ends = text_of(writes[:cut] + rest, last)
        assert text == whole[0]
        assert ends == whole[1]


WHOLE = {name: (path, body | {"stream": False}) for name, (path, body) in CASES.items() if name != "usage"} | {
    "stop": ("/v1/completions", TEXT | {"stream": False, "stop": ["e"], "min_tokens": 6}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "tell me", "max_output_tokens": 14, "temperature": 0}),
    "ollama": ("/api/generate", {"model": "tiny", "prompt": "tell me", "stream": False,
                                 "options": {"num_predict": 14, "temperature": 0}}),
    "llama.cpp": ("/completion", {"prompt": "tell me", "n_predict": 14, "temperature": 0}),
}  # fmt: skip
WHEN = re.compile(
    r'"(created|created_at|input_tokens|cached_tokens|cache_n|prompt_n|cache_read_input_tokens|[a-z_]*duration|[a-z_]*_(?:ms|second|at))":("[^"]*"|[\d.]+)|moved|[0-9a-f]{24}'
)


def whole(server, path, body, so_far=()):
    """(answer, ids that were told before it), as the router's own reader sees them."""
    sent, headers = json.dumps(body).encode(), {"x-cairn-router": "1", "x-request-id": "moved"}
    if so_far:
        more = msgspec.msgpack.encode(list(so_far))
        sent, headers = sent + more, headers | continues(server, more)
    answer = server.http.post(path, content=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    raw, ids = answer.content, []
    if answer.headers["content-type"] != PROGRESS.decode():
        return WHEN.sub("", answer.text), ids
    while raw.startswith(TOKENS):
        told, _, raw = raw.partition(b"\n\n")
        ids += map(int, told.removeprefix(TOKENS).split())
    status, lines, raw = read_answer(raw)
    assert (status, lines) == (200, b"content-type: application/json\r\n")
    return WHEN.sub("", raw.decode()), ids


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_answer_continued_at_any_token_is_the_same_answer(server, case, monkeypatch):
    path, body = WHOLE[case]
    asked, _ = whole(server, path, body)  # too short for anything to be told
    monkeypatch.setattr("cairn.serve.http.server.exchange.TOLD_EVERY_S", 0.0)
    told, ids = whole(server, path, body)
    assert told == asked
    assert ids, "nothing was told"
    for cut in {1, len(ids) // 2, len(ids)} - {0}:
        assert whole(server, path, body, ids[:cut])[0] == asked


def test_an_error_behind_the_tokens_of_a_whole_answer_keeps_its_status():
    sent = []

    async def send(message):
        sent.append(message)

    async def answer():
        progress = ProgressSend(send, [(b"x-request-id", b"a")])
        await progress.tell([5, 6])
        await Refusal(503, "it fell", retry_after_s=1).response()({"type": "http"}, None, progress)

    asyncio.run(answer())
    start, told, last = sent
    assert (start["status"], told["body"], last.get("more_body", False)) == (
        200,
        b":t 5 6\n\n",
        False,
    )
    status, lines, body = read_answer(last["body"])
    assert (status, b"it fell" in body) == (503, True)
    assert b"retry-after: 1\r\n" in lines
    assert b"content-length" not in lines
    assert read_answer(last["body"][:20]) is None


@pytest.mark.parametrize(
    ("body", "tail", "length", "said"),
    [
        (TEXT | {"n": 2}, msgspec.msgpack.encode([5]), None, "one answer"),
        (TEXT | {"stream": False, "logprobs": 1}, msgspec.msgpack.encode([5]), None, "log-prob"),
        (TEXT, b"\xff", None, "no token ids"),
        (TEXT, msgspec.msgpack.encode([10**8]), None, "vocabulary"),
        (TEXT, msgspec.msgpack.encode([-1]), None, "vocabulary"),
        (TEXT, msgspec.msgpack.encode([2**63]), None, "vocabulary"),
        (TEXT, msgspec.msgpack.encode([5] * 15), None, "may have 14"),
        (TEXT, msgspec.msgpack.encode([5] * 1000), None, "at most 160 tokens"),
        (TEXT, b"", "99999", "x-cairn-continue"),
        (TEXT, b"", "9" * 5000, "x-cairn-continue"),
    ],
)
def test_a_wrong_continuation_is_refused(server, monkeypatch, body, tail, length, said):
    """Before anything makes a text of the tokens."""
    monkeypatch.setattr("cairn.serve.answer.Answer.begin", None)
    headers = {"x-request-id": "moved", **continues(server, tail)}
    headers |= {"x-cairn-continue": length} if length else {}
    sent = json.dumps(body).encode() + tail
    answer = server.http.post("/v1/completions", content=sent, headers=headers)
    assert said in answer.text
    assert answer.status_code == 400


@pytest.mark.parametrize("case", ["no proof", "another secret", "another request", "other tokens"])
def test_a_continuation_is_taken_from_the_routers_of_the_fleet_alone(server, monkeypatch, case):
    monkeypatch.setattr("cairn.serve.answer.Answer.begin", None)
    tail = msgspec.msgpack.encode([5, 6])
    headers = continues(server, tail, b"moved" if case != "another request" else b"x")
    if case == "no proof":
        del headers["x-cairn-proof"]
    elif case == "another secret":
        proof = continuation_proof(Secret.fresh(), b"moved", tail)
        headers["x-cairn-proof"] = proof.decode()
    elif case == "other tokens":
        tail = msgspec.msgpack.encode([5, 7])
    answer = server.http.post(
        "/v1/completions",
        content=json.dumps(TEXT).encode() + tail,
        headers={"x-request-id": "moved", **headers},
    )
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "not_a_router"


def test_a_router_knows_what_the_server_will_find(server, monkeypatch):
    """Conversations that grow, branch and repeat: what was predicted is what was cached, but for a page at the end."""
    page, pulse = server.service.serving.limits.page_size, server.service.pulse
    bind, bound = pulse.bind, []
    monkeypatch.setattr(pulse, "bind", lambda *args: bound.append(bind(*args)))

    async def run() -> list[tuple[int, int]]:
        router = Router(RouterConfig(port=0), [server.url])
        url = await router.start()
        pairs = []
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            while router.workers[0].state != "up":
                await asyncio.sleep(0.01)
            for name in ("anna", "bert"):
                system = {"role": "system", "content": f"you are the assistant of {name}"}
                for branch in ("x", "y"):
                    turns = [system]
                    for turn in range(3):
                        turns.append({"role": "user", "content": f"{branch}{turn}"})
                        body = {
                            "model": "tiny",
                            "messages": turns,
                            "max_tokens": 6,
                            "temperature": 0,
                        }
                        id = f"{name}-{branch}-{turn}"
                        answer = await client.post(
                            "/v1/chat/completions", json=body, headers={"x-request-id": id}
                        )
                        document = answer.json()
                        why = (await client.get(f"/cairn/fleet/requests/{id}")).json()
                        cached = document["usage"]["prompt_tokens_details"]["cached_tokens"]
                        pairs.append(
                            (why["decisions"][0]["considered"][0]["cached_tokens"], cached)
                        )
                        turns.append(
                            {
                                "role": "assistant",
                                "content": document["choices"][0]["message"]["content"],
                            }
                        )
                        # Until the keys of this answer are bound, and the router has heard of them.
                        while len(bound) < len(pairs) or {key for key, _ in pulse.book.stored} != (
                            router.index._keys_of.get(0)
                        ):
                            await asyncio.sleep(0.01)
        await router.stop(1.0)
        return pairs

    pairs = asyncio.run(run())
    assert sum(cached > 0 for _, cached in pairs) >= len(pairs) // 2
    for predicted, cached in pairs:
        assert 0 <= cached - predicted <= page, pairs
