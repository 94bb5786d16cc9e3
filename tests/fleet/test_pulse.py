"""What a server tells of itself: speeds from its steps, and which text key ends at which page."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest

from cairn.serve.engine.page_events import PageEvent, PageEvents
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine.weight_sources import identity_of
from cairn.serve.http.server import followers
from cairn.serve.pulse import KeyBook, Outbox, speeds
from cairn.serve.text_keys import prompt_keys, read_fields, token_counts, with_answer


def step(seconds: float, rows: int, prefill: int = 0) -> StepTimes:
    return StepTimes(0, rows, rows + prefill, 0.0, seconds, 0.0, 0.0, 0.0, prefill, rows)


def test_speeds_are_those_of_the_line_that_made_the_steps():
    made = [step(0.01 + 0.002 * rows, rows) for rows in (1, 2, 4, 8, 8, 4)]
    found = speeds([*made, step(0.018 + 100 * 1e-4, 4, 100)])
    assert found.row == pytest.approx(0.002)
    assert found.step == pytest.approx(0.018)
    assert found.token == pytest.approx(1e-4)
    assert speeds([]) == (0, 0, 0)
    assert speeds([step(0.04, 2)]).row == pytest.approx(0.005)


def test_keys_of_a_longer_conversation_begin_with_those_of_the_shorter():
    short = {
        "model": "m",
        "messages": [{"role": "system", "content": "s" * 1400}, {"role": "user", "content": "hi"}],
    }
    longer = short | {"messages": [*short["messages"], {"role": "assistant", "content": "yes"}]}
    encode = msgspec.json.encode
    first, second = read_fields(encode(short)), read_fields(encode(longer))
    keys = prompt_keys(first).keys
    assert len(keys) == 3  # 1,024 bytes, the end of the system prompt, the end of the question
    assert prompt_keys(second).keys[:3] == keys
    assert with_answer(first, "yes").keys == prompt_keys(second).keys
    other = read_fields(encode(longer | {"cache_salt": "x"}))
    assert not set(prompt_keys(other).keys) & set(keys)


def test_tokens_before_a_boundary_are_counted_in_what_the_template_made():
    asked = read_fields(
        b'{"messages": [{"role": "user", "content": " abc "}, {"role": "user", "content": "de"}]}'
    )
    pieces = [
        b"<u>",
        b"ab",
        b"c",
        b"<u>",
        b"d",
        b"e",
        b"<a>",
    ]  # the template has trimmed the first text
    assert token_counts(prompt_keys(asked), range(7), pieces.__getitem__) == [3, 6]
    ids = prompt_keys(read_fields(b'{"prompt": [%b]}' % b",".join([b"7"] * 130)))
    assert (ids.tokens, token_counts(ids, [7] * 130, pieces.__getitem__)) == ([64, 128], [64, 128])


def test_a_key_lives_as_long_as_the_page_that_it_ends_at():
    book, box = KeyBook(16), Outbox()
    book.note([PageEvent(True, b"p0"), PageEvent(True, b"p1")])
    digests = [b"p0", b"p1", b"p2"]
    assert book.bind([1, 2, 3, 4], [10, 20, 40, 60], digests) == [
        (2, 16),
        (3, 32),
    ]  # p2 is not there
    box.store(book.stored)
    assert book.note([PageEvent(False, b"p1"), PageEvent(True, b"p1")]) == ([3], False)
    box.remove([3])
    assert box.take().stored == [(2, 16)]
    assert book.bind([3], [40], digests) == [(3, 32)]
    assert book.note([PageEvent(False, b"")]) == ([], True)
    assert book.stored == []


def test_keys_are_bound_to_pages_of_the_weights_that_the_engine_has_now(monkeypatch):
    """An engine that was started again has its first weights, whatever was loaded before."""
    bound = []
    monkeypatch.setattr(
        followers, "page_hashes", lambda request, ids, size, weights: bound.append(weights) or []
    )
    versions = iter([3, 0])
    engine = SimpleNamespace(weights_version=lambda: next(versions))
    serving = SimpleNamespace(engine=engine, limits=SimpleNamespace(page_size=16))
    told = followers.Followers(serving, lambda: "ok", "both")
    keys = prompt_keys(read_fields(msgspec.json.encode({"prompt": [1] * 70})))
    for _ in range(2):
        told._bind(keys, SimpleNamespace(request=None), [])
    assert bound == [identity_of(3), identity_of(0)]


def test_routers_that_come_at_once_follow_the_pages_that_are_told():
    """An engine tells its pages to the record that was asked for last, whichever call returns last."""
    records = []

    def follow_pages():
        records.append(PageEvents([]))
        own, many = records[-1], len(records)
        time.sleep(0.05 if many == 1 else 0.0)
        return own

    serving = SimpleNamespace(
        engine=SimpleNamespace(follow_pages=follow_pages), limits=SimpleNamespace(page_size=16)
    )
    told = followers.Followers(serving, lambda: "ok", "both")

    async def come() -> None:
        await asyncio.gather(told.join(), told.join())

    asyncio.run(come())
    assert told._pages is records[-1]


def test_the_keys_of_a_stream_are_told_as_soon_as_its_prompt_is_computed(monkeypatch):
    """And not again at its end, unless a page was dropped meanwhile."""
    digests, calls = [b"p0", b"p1", b"p2", b"p3"], []
    monkeypatch.setattr(followers, "page_hashes", lambda *given: calls.append(given) or digests)
    events = [PageEvent(True, digest) for digest in digests]
    engine = SimpleNamespace(weights_version=lambda: 0)
    serving = SimpleNamespace(engine=engine, limits=SimpleNamespace(page_size=16))
    told = followers.Followers(serving, lambda: "ok", "both")
    told._pages = SimpleNamespace(take=lambda: [events.pop(0) for _ in list(events)])
    follower = SimpleNamespace(outbox=Outbox())
    told._followers.append(follower)
    request, answer = SimpleNamespace(known=True, prompt=[1] * 70), SimpleNamespace(token_ids=[])
    jobs = [SimpleNamespace(request=request, answer=SimpleNamespace(whole=answer))]
    body = msgspec.json.encode({"prompt": [1] * 70})
    (key,) = prompt_keys(read_fields(body)).keys
    told.begun(body, jobs)
    assert follower.outbox.take().stored == [(key, 64)]
    told.bind(body, jobs)
    assert (follower.outbox.take(), len(calls)) == (None, 1)
    events += [PageEvent(False, b"p3"), PageEvent(True, b"p3")]
    told.bind(body, jobs)
    assert follower.outbox.take().stored == [(key, 64)]
