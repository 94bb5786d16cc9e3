"""The client against a real socket: counts and orders are exact, times lie where they must, errors have their names."""

import asyncio
import itertools
import random

import pytest
from mock_openai import MockServer, Reply

from cairn.bench.load_answer import LoadAnswer, RequestRecord, error_text, since
from cairn.bench.load_client import LoadClient, Target
from cairn.bench.load_drive import closed_loop, open_loop
from cairn.bench.load_prompts import LoadRequest


def ask(replies, count=1, concurrency=1, tokens=5, **target):
    """The records of so many requests, and the server that answered them."""

    async def go():
        async with MockServer(replies) as server:
            async with LoadClient(Target(url=server.url, model="mock", **target)) as client:
                asks = itertools.repeat(LoadRequest([1, 2, 3], tokens))
                records = await closed_loop(client, asks, concurrency, count=count)
            return records, server

    return asyncio.run(go())


def one(reply, **options):
    (record,), _ = ask([reply], **options)
    return record


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("crlf", [False, True])
def test_a_stream_is_counted_and_timed(endpoint, crlf):
    record = one(Reply(delay_s=0.02, gap_s=0.005, crlf=crlf), tokens=6, endpoint=endpoint)
    assert record.error is None
    assert (record.output_tokens, len(record.chunk_s), record.finish) == (6, 6, "length")
    assert record.chunk_s == sorted(record.chunk_s)
    assert record.due_s <= record.sent_s <= record.first_s <= record.last_s <= record.end_s
    # A sleep is never shorter than it says; how much longer is the machine's business.
    assert record.ttft_s >= 0.019
    assert record.tpot_s >= 0.0045
    assert record.e2e_s >= record.ttft_s + 5 * record.tpot_s - 1e-9
    assert record.tpot_s * 5 == pytest.approx(sum(record.gaps_s))


def test_several_tokens_per_event_are_told_by_usage():
    record = one(Reply(per_event=4, gap_s=0.002), tokens=10)
    assert (record.output_tokens, len(record.chunk_s), record.input_tokens) == (10, 3, 3)
    assert record.tpot_s == pytest.approx((record.last_s - record.first_s) / 9)


def test_without_usage_events_are_counted():
    record = one(Reply(usage=False), tokens=4)
    assert (record.error, record.output_tokens, record.input_tokens) == (None, 4, None)


def test_what_is_asked():
    _, server = ask([Reply()], extra={"top_k": 3}, api_key="secret", temperature=0.5)
    assert server.bodies == [
        {
            "model": "mock", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.5, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 3,
        }
    ]  # fmt: skip
    assert "authorization: Bearer secret\r\n" in server.heads[0]
    _, server = ask([Reply()], endpoint="chat", ignore_eos=False)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": [1, 2, 3]}]
    assert "ignore_eos" not in server.bodies[0]


HTTP = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (Reply(status=429), "http 429", "status 429 it is"),
        (Reply(status=503), "http 503", "status 503 it is"),
        (Reply(plain_json=True), "bad answer", "no stream"),
        (Reply(cut_after=2), "closed", ""),
        (Reply(finish=False), "cut short", "5 events"),
        (Reply(error_event="out of pages"), "error event", "out of pages"),
        (Reply(raw=b"220 mail here\r\n\r\n"), "bad answer", "no HTTP"),
        (Reply(raw=b""), "closed", ""),
        (Reply(raw=HTTP + b"data: {oops}\n\n"), "bad answer", "oops"),
        (Reply(raw=HTTP + b"data: [1]\n\n"), "bad answer", "object"),
        (Reply(raw=HTTP), "cut short", "0 events"),
        (Reply(hang=True), "timeout", "1.5 s"),
    ],
)
def test_every_failure_has_a_name_and_ends(reply, kind, says):
    """The request after it is answered: nothing stays behind on the connection."""
    timeout_s = 1.5 if reply.hang else 30.0
    records, _ = ask([reply, Reply()], count=2, timeout_s=timeout_s)
    assert [record.error for record in records] == [kind, None]
    assert says in (records[0].detail or "")


def test_a_stream_that_ends_with_its_connection_is_whole():
    event = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
    record = one(Reply(raw=HTTP + event))
    assert (record.error, record.output_tokens, record.finish) == (None, 1, "stop")


def test_nobody_there():
    async def go():
        async with MockServer() as server:
            url = server.url
        async with LoadClient(Target(url=url)) as client:
            return await client.send(client.prepare(LoadRequest([1], 1)), 0.0)

    assert asyncio.run(go()).error == "refused"


def test_connections_are_kept_and_no_more_than_needed():
    records, server = ask([Reply()], count=40, concurrency=4)
    assert [record.error for record in records] == [None] * 40
    assert server.connections == 4
    assert len(server.bodies) == 40


def test_a_connection_that_failed_is_not_used_again():
    _, server = ask([Reply(cut_after=1), Reply(status=500), Reply(), Reply()], count=4)
    assert (server.connections, len(server.bodies)) == (
        2,
        4,
    )  # a status is no failure of the connection


def test_hundreds_at_once_all_come_back():
    async def go():
        generator = random.Random(0)
        replies = [
            Reply(tokens=generator.randint(1, 9), status=generator.choice([200, 200, 200, 503]))
            for _ in range(300)
        ]
        async with MockServer(replies) as server:
            async with LoadClient(Target(url=server.url)) as client:
                records = await open_loop(
                    client, itertools.repeat(LoadRequest([1], 5)), [i / 3000 for i in range(300)]
                )
            return records, replies, server

    records, replies, server = asyncio.run(go())
    answered = [reply for reply in replies if reply.status == 200]
    assert len(records) == len(server.bodies) == 300
    assert sum(record.error is None for record in records) == len(answered)
    assert sum(record.error == "http 503" for record in records) == 300 - len(answered)
    assert sum(record.output_tokens for record in records) == sum(r.tokens for r in answered)


def test_half_a_character_is_a_token_too():
    answer = LoadAnswer()
    answer.take(b'{"choices": [{"text": ""}]}', 1.0)  # bytes of a character that is not whole
    answer.take(b'{"choices": [{"text": "x"}]}', 2.0)
    answer.take(b'{"choices": [{"text": "", "finish_reason": "stop"}]}', 3.0)
    assert answer.record(0.0, 0.0, 3.0, 9).chunk_s == [1.0, 2.0]
    answer = LoadAnswer()
    answer.take(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 1.0)
    answer.take(b'{"choices": [{"delta": {"reasoning_content": "hm"}}]}', 2.0)
    answer.take(b'{"choices": [{"delta": {"tool_calls": [{}]}}]}', 3.0)
    answer.take(b'{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}', 4.0)
    assert answer.record(0.0, 0.0, 4.0, 9).chunk_s == [2.0, 3.0]
    answer = LoadAnswer()
    answer.take(b'{"choices": [{"delta": {}, "finish_reason": "length"}]}', 4.0)
    answer.take(b'{"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 2}}', 4.0)
    record = answer.record(0.0, 0.0, 5.0, 1)
    assert (record.error, record.output_tokens, record.first_s, record.tpot_s) == (
        None,
        1,
        4.0,
        None,
    )


def test_moved_in_time_a_record_lasts_as_long():
    record = RequestRecord(
        due_s=10, sent_s=11, end_s=20, first_s=12, last_s=19, chunk_s=[12, 19], output_tokens=2
    )
    moved = since(record, 10)
    assert (moved.due_s, moved.end_s, moved.chunk_s) == (0, 10, [2, 9])
    assert (moved.ttft_s, moved.tpot_s, moved.e2e_s) == (record.ttft_s, record.tpot_s, record.e2e_s)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no", "code": 4}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"message": "no"}', "no"),
        (b'{"detail": "no"}', "no"),
        (b"<html>no", "<html>no"),
        (b'{"error": {}}', '{"error": {}}'),
        (b"", "(an empty body)"),
    ],
)
def test_the_sentence_in_an_error(body, text):
    assert error_text(body) == text
