"""Events in vLLM's encoding: a follower of them knows exactly what can be found, and asks for what it has missed."""

import asyncio

import live_server
import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st

from cairn.fleet.block_batches import BatchFollower
from cairn.fleet.prompt_tokens import prompt_tokens
from cairn.fleet.worker import Worker
from cairn.serve.engine.page_events import PageEvent
from cairn.serve.engine.prefix_cache import page_hashes
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.server.kv_events import END, KvEvents, KvPublisher
from cairn.serve.text_keys import prompt_keys, read_fields

SIZE = 2
PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [9, 9, 9, 9]]


def digests_of(ids: list[int]) -> list[bytes]:
    """A page is known by all tokens up to its end."""
    return [bytes(ids[:end]).rjust(16, b"\0") for end in range(SIZE, len(ids) + 1, SIZE)]


steps = st.lists(
    st.tuples(st.sampled_from(["end", "drop", "clear"]), st.integers(0, 2), st.integers(0, 2))
)


@given(steps)
def test_a_follower_knows_the_blocks_that_were_told_and_their_tokens(history):
    events, live = KvEvents(SIZE), set()
    blocks: dict[int, tuple[int | None, list[int]]] = {}  # of the follower
    for what, prompt, page in history:
        ids = PROMPTS[prompt]
        digests = digests_of(ids)
        if what == "end":
            pages = [PageEvent(True, one) for one in digests]
            live.update(digests)
            told = events.note(pages) + events.stored(digests, ids)
        elif what == "drop":
            dropped = digests[page % len(digests)]
            live.discard(dropped)
            told = events.note([PageEvent(False, dropped)])
        else:
            live.clear()
            told = events.note([PageEvent(False, b"")])
        for one in msgspec.msgpack.decode(msgspec.msgpack.encode(told)):
            if one["type"] == "BlockStored":
                parent = one["parent_block_hash"]
                for at, hash in enumerate(one["block_hashes"]):
                    blocks[hash] = parent, one["token_ids"][at * SIZE : (at + 1) * SIZE]
                    parent = hash
            elif one["type"] == "BlockRemoved":
                for hash in one["block_hashes"]:
                    del blocks[hash]
            else:
                blocks.clear()
    expected = {int.from_bytes(one[-8:], "big") for one in live}
    assert set(blocks) == expected
    for parent, tokens in blocks.values():
        before = blocks.get(parent, (None, []))[1] if parent is not None else []
        assert any(
            before + tokens == ids[at : at + len(before + tokens)]
            for ids in PROMPTS
            for at in (0, 2)
        )


def sent_again(context: zmq.Context, publisher: KvPublisher, start: int) -> dict[int, bytes]:
    """As a router asks that has missed something."""
    with context.socket(zmq.DEALER) as asking:
        asking.connect(publisher.endpoints[1])
        asking.send_multipart([b"", start.to_bytes(8, "big")])
        found: dict[int, bytes] = {}
        while asking.poll(60_000):
            _, number, batch = asking.recv_multipart()
            if number == END:
                return found
            found[int.from_bytes(number, "big")] = batch
    raise AssertionError("no end")


def test_batches_are_numbered_and_sent_again():
    publisher = KvPublisher(SIZE, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@a@m")
    context = zmq.Context()
    try:
        follower = context.socket(zmq.SUB)
        follower.subscribe(b"kv@")
        follower.connect(publisher.endpoints[0])
        for _ in range(1000):  # until the subscription has arrived
            publisher.note([PageEvent(False, b"")])
            if follower.poll(10):
                break
        topic, number, batch = follower.recv_multipart()
        assert topic == b"kv@a@m"
        assert msgspec.msgpack.decode(batch)[1:] == [[{"type": "AllBlocksCleared"}], 0]
        again = sent_again(context, publisher, 0)
        assert list(again) == list(range(len(again)))
        assert again[int.from_bytes(number, "big")] == batch
        assert list(sent_again(context, publisher, len(again) - 1)) == [len(again) - 1]
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_a_server_tells_the_pages_of_its_answers(tiny_folder):
    endpoint = "tcp://127.0.0.1:*"
    with live_server.live(tiny_folder, kv_events=endpoint, kv_events_replay=endpoint) as made:
        publisher, context = made.service.pulse.publisher, zmq.Context()
        prompt = list(range(3, 3 + 40))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        assert made.http.post("/v1/completions", json=body).status_code == 200
        live_server.wait_until(lambda: publisher._sent)
        batches = sent_again(context, publisher, 0).values()
        context.destroy(linger=0)
        events = [one for batch in batches for one in msgspec.msgpack.decode(batch)[1]]
        (stored,) = [one for one in events if one["type"] == "BlockStored"]
        size = stored["block_size"]
        assert len(stored["block_hashes"]) == 40 // size
        assert stored["token_ids"] == prompt[: 40 // size * size]
        assert stored["parent_block_hash"] is None
        told_to_our_router(made, publisher)


def told_to_our_router(made, publisher: KvPublisher) -> None:
    """A conversation: its keys are stored as far as the blocks reach that the server tells and tokenizes itself."""
    texts = {"system": "Stones lie.", "user": "a stone on a path"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    body = msgspec.json.encode({"model": "tiny", "messages": messages, "max_tokens": 2})
    before = len(publisher._sent)
    answer = made.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 200, answer.text
    live_server.wait_until(lambda: len(publisher._sent) > before)
    keys, worker = prompt_keys(read_fields(body)), Worker(0, made.url)
    told = asyncio.run(prompt_tokens(worker, b"/v1/chat/completions", body, keys, 60))
    assert told is not None
    follower, context = BatchFollower(), zmq.Context()
    follower.catch_up(sent_again(context, publisher, 0))
    context.destroy(linger=0)
    follower.book.bind(keys.keys, told.counts, told.ids)
    size = follower.book.block_size
    assert told.counts[1] > told.counts[0] > size, (size, told)
    expected = [(key, n // size * size) for key, n in zip(keys.keys, told.counts, strict=True)]
    assert sorted(follower.book.snapshot()) == sorted(expected)


def test_pages_of_other_weights_have_other_names():
    """A request knows its weights inside the engine only; one that ran across a change has filled pages of neither."""
    ids, weights = list(range(8)), b"weights 1;"
    outside, inside, before = (Request(n, ids, SamplingParams()) for n in range(3))
    inside.identity = weights
    inside.hashes = page_hashes(inside, ids[:4], SIZE)
    before.hashes = page_hashes(before, ids, SIZE)
    expected = page_hashes(inside, ids, SIZE, weights)
    assert expected == page_hashes(outside, ids, SIZE, weights)
    assert expected == page_hashes(before, ids, SIZE, weights)
    assert not set(expected) & set(before.hashes)
