"""From a token to an event: templates say what Structs say, no news are lost on the way, both ways are equal."""

import asyncio
import json
import threading

import live_server
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.answer import Answer
from cairn.serve.answer_reader import AnswerReader, LoopWaker
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.protocol.answers import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
)
from cairn.serve.http.server.sse import HOLE, EventStream, Template, event_bytes
from cairn.serve.job import Job

ENCODABLE = st.text(st.characters(exclude_categories=["Cs"]))


def chat(text):
    choice = ChatChunkChoice(index=1, delta=ChatDelta(content=text))
    return ChatChunk(id="chatcmpl-1", created=7, model="a/b", choices=[choice], usage=None)


def completion(text):
    choice = CompletionChoice(index=0, text=text)
    return Completion(id="cmpl-1", created=7, model='"odd" \\ name', choices=[choice])


@pytest.mark.parametrize("make", [chat, completion])
@given(text=ENCODABLE)
def test_a_template_says_what_the_struct_says(make, text):
    assert Template(make(HOLE)).fill(text) == event_bytes(make(text))


class Spelled:
    """A tokenizer whose tokens are numbers."""

    def stream(self, skip_special, after=()):
        return self

    def push(self, id):
        return f"{id} "

    def flush(self):
        return "."


def job(index, most, on_update):
    params = SamplingParams(max_tokens=most)
    return Job(Request(index, [1], params), Answer(index, params, Spelled()), most, on_update)


def test_no_update_is_lost_between_the_engines_thread_and_the_loop():
    """Two answers of one request and one of another, pushed as fast as a thread can."""
    most = 3000

    async def main():
        waker = LoopWaker(asyncio.get_running_loop())
        readers = [AnswerReader(waker), AnswerReader(waker)]
        jobs = [
            job(0, most, readers[0].on_update),
            job(1, most, readers[0].on_update),
            job(0, most, readers[1].on_update),
        ]

        def engine():
            for token in range(most):
                for each in jobs:
                    each.answer.push(token, "length" if token == most - 1 else None)
                for each in jobs:
                    each.on_update(each)

        thread = threading.Thread(target=engine)
        thread.start()
        async with asyncio.timeout(60):
            pulled, forwarded = await asyncio.gather(pull(readers[0], 2), forward(readers[1]))
        thread.join()
        return pulled, forwarded

    pulled, forwarded = asyncio.run(main())
    whole = "".join(f"{token} " for token in range(most)) + "."
    assert pulled == {0: (whole, list(range(most))), 1: (whole, list(range(most)))}
    assert forwarded == (whole, list(range(most)))


async def pull(reader, answers):
    seen, left = {}, answers
    while left:
        for delta in await reader.next():
            text, ids = seen.get(delta.index, ("", []))
            seen[delta.index] = text + delta.text, ids + delta.token_ids
            left -= delta.finished
    return seen


async def forward(reader):
    """Half of the time by one way, half by the other: as when a client is slow now and then."""
    texts, ids, ended = [], [], False

    def push(deltas):
        nonlocal ended
        for delta in deltas:
            texts.append(delta.text)
            ids.extend(delta.token_ids)
            ended = delta.finished
        return len(texts) % 50 != 0 and not ended

    while not ended:
        push(await reader.next())
        if not ended:
            await reader.forward(push)
    return "".join(texts), ids


def test_what_push_raises_is_raised_where_it_is_waited_for():
    async def main():
        reader = AnswerReader(LoopWaker(asyncio.get_running_loop()))
        one = job(0, 4, reader.on_update)

        def push(deltas):
            raise ValueError("a bug")

        one.answer.push(1)
        one.on_update(one)
        with pytest.raises(ValueError, match="a bug"):
            await reader.forward(push)
        reader.fail(KeyError("gone"))
        await reader.forward(push)  # leaves the problem to `next`
        with pytest.raises(KeyError, match="gone"):
            await reader.next()

    asyncio.run(main())


class Socket:
    """An ASGI `send` that waits, in layers of coroutines, while the client is behind."""

    def __init__(self):
        self.sent, self.room = [], asyncio.Event()
        self.room.set()

    async def __call__(self, message):
        await self._drained()
        self.sent.append(message.get("body", b""))

    async def _drained(self):
        while not self.room.is_set():
            await self.room.wait()


def test_a_write_without_a_task_waits_in_the_next_task():
    async def main():
        socket = Socket()
        events = EventStream(socket)
        await events.write(b"1")
        assert events.write_now(b"2")
        assert events.write_now(b"")
        assert socket.sent == [b"", b"1", b"2"]  # the headers, and what followed
        socket.room.clear()
        assert not events.write_now(b"3")
        assert socket.sent[-1] == b"2"
        flushing = asyncio.create_task(events.flush())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not flushing.done()
        socket.room.set()
        await flushing
        await events.flush()  # nothing is left
        assert events.write_now(b"4")
        await events.write(b"5", last=True)
        assert socket.sent[2:] == [b"2", b"3", b"4", b"5"]

    asyncio.run(main())


def test_a_suspended_write_can_be_cancelled_and_can_fail():
    async def main():
        socket = Socket()
        events = EventStream(socket)
        socket.room.clear()
        assert not events.write_now(b"1")
        flushing = asyncio.create_task(events.flush())
        await asyncio.sleep(0)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        assert socket.sent == []

        async def broken(message):
            await asyncio.sleep(0)
            raise OSError("the socket is gone")

        events = EventStream(broken)
        assert not events.write_now(b"1")
        with pytest.raises(OSError, match="gone"):
            await events.flush()

    asyncio.run(main())


@pytest.mark.parametrize("implementation", ["h11", "httptools"])
def test_both_of_uvicorns_protocols_stream_alike(tiny_folder, implementation, monkeypatch):
    config = uvicorn.Config.__init__
    monkeypatch.setattr(
        uvicorn.Config,
        "__init__",
        lambda self, *args, **kwargs: config(self, *args, **kwargs | {"http": implementation}),
    )
    body = dict(prompt="Once", max_tokens=40, temperature=0, stream=True, n=2, ignore_eos=True)
    with live_server.live(tiny_folder) as server:
        said = _texts(server.http, "/v1/completions", body)
        whole = server.http.post("/v1/completions", json=body | {"stream": False}).json()["choices"]
    assert said == {one["index"]: (one["text"], "length") for one in whole}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_straight_to_the_socket_or_through_other_layers_is_the_same(tiny_folder, server, path):
    """With CORS there is something between an endpoint and its socket."""
    body = dict(max_tokens=60, temperature=0, stream=True, n=2, ignore_eos=True)
    body |= (
        {"prompt": "Once"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Once"}]}
    )
    with live_server.live(tiny_folder, cors_origins=["http://page"]) as other:
        said = [_texts(each.http, path, body) for each in (server, other)]
        for method in ("GET", "POST", "DELETE"):  # all that the server has
            preflight = {"origin": "http://page", "access-control-request-method": method}
            assert other.http.options("/v1/responses/x", headers=preflight).status_code == 200
    assert said[0] == said[1]
    assert [end for _, end in said[0].values()] == ["length", "length"]


def _texts(http, path, body):
    found = {}
    answer = http.post(path, json=body).text
    assert answer.endswith("data: [DONE]\n\n")
    for line in answer.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text = choice.get("text", choice.get("delta", {}).get("content")) or ""
            before, _ = found.get(choice["index"], ("", None))
            found[choice["index"]] = before + text, choice["finish_reason"]
    return found
