"""From a token to an event: templates say what Structs say, no news are lost on the way, both ways are equal."""

import asyncio
import json
import threading

import live_server
import pytest
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
from cairn.serve.http.server.sse import HOLE, Template, event_bytes
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
        jobs = [job(0, most, readers[0].on_update), job(1, most, readers[0].on_update),
                job(0, most, readers[1].on_update)]  # fmt: skip

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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_straight_to_the_socket_or_through_other_layers_is_the_same(tiny_folder, server, path):
    """With CORS there is something between an endpoint and its socket."""
    body = dict(max_tokens=60, temperature=0, stream=True, n=2, ignore_eos=True)
    body |= {"prompt": "Once"} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "Once"}]
    }  # fmt: skip
    with live_server.live(tiny_folder, cors_origins=["http://page"]) as other:
        said = [_texts(each.http, path, body) for each in (server, other)]
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
