"""vLLM's KV-cache events: the index equals brute force over what the publisher has, whatever happens to batches."""

import asyncio
import json
import time

import msgspec
import pytest
from fake_servers import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_router import ask

from cairn.core.errors import ConfigError
from cairn.fleet.block_batches import BatchFollower, decode_batch
from cairn.fleet.config import FleetConfig, RouterConfig, ServerGroup
from cairn.fleet.index import EXPECTED_S, KeyIndex
from cairn.fleet.router import Router
from cairn.serve.engine.page_events import PageEvent
from cairn.serve.engine.prefix_cache import page_hashes
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.server.kv_events import KvEvents, KvPublisher
from cairn.serve.pulse import Events
from cairn.serve.text_keys import prompt_keys, read_fields

SIZE = 2
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9, 9], [9] * 7]
COUNTS = [1, 3, 4, 7]  # tokens before each key; none of the first makes a block
KEYS = [[hash((tuple(ids[:count]), count)) for count in COUNTS] for ids in PROMPTS]


class Server:
    """What a server has cached, and the batches that it has told."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.events, self.live = clock, KvEvents(SIZE), set[bytes]()
        self.sent: list[bytes] = []
        self.told([PageEvent(False, b"")])

    def pages(self, ids: list[int]) -> list[bytes]:
        return [bytes(ids[:end]).rjust(16, b"\0") for end in range(SIZE, len(ids) + 1, SIZE)]

    def told(self, pages: list[PageEvent], ids: list[int] | None = None) -> None:
        events = self.events.note(pages)
        events += self.events.stored(self.pages(ids), ids) if ids is not None else []
        self.clock[0] += 1
        self.sent.append(msgspec.msgpack.encode([self.clock[0], events, 0]))

    def change(self, what: str, prompt: int, page: int) -> None:
        pages = self.pages(PROMPTS[prompt])
        if what == "clear":
            self.live.clear()
            self.told([PageEvent(False, b"")])
        elif what == "drop":
            self.live.discard(pages[page])
            self.told([PageEvent(False, pages[page])])
        else:
            self.live.update(pages)
            self.told([PageEvent(True, one) for one in pages], PROMPTS[prompt])

    def cached(self, prompt: int) -> int:
        """By brute force: tokens up to the last key before the first page that is missing."""
        pages = self.pages(PROMPTS[prompt])
        live = next((at for at, one in enumerate(pages) if one not in self.live), len(pages))
        return max((count // SIZE * SIZE for count in COUNTS if count // SIZE <= live), default=0)


changes = st.tuples(
    st.sampled_from(["end", "end", "drop", "clear", "restart"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(["", "lose", "double", "swap"]),
)


def followed(history, replay: bool):
    """(what the index says, brute force) for each prompt, after each change whose batches have all come."""
    clock = [0.0]
    server, follower, index = Server(clock), BatchFollower(), KeyIndex()
    index.note(0, Events(0, follower.book.snapshot()))

    def deliver(number: int) -> None:
        missing = follower.take(number, server.sent[number])
        if missing is not None:
            again = range(missing, len(server.sent)) if replay else [number]
            follower.catch_up({at: server.sent[at] for at in again})

    deliver(0)
    for turn, (what, prompt, page, fate) in enumerate(history):
        if turn < len(PROMPTS):  # prompts are bound before, between and after their blocks are told
            follower.book.bind(KEYS[turn], COUNTS, PROMPTS[turn])
        first = len(server.sent)
        if what == "restart":
            server, first = Server(clock), 0
        else:
            server.change(what, prompt, page)
        if fate == "lose" and what != "restart":
            server.change("end", prompt, page)
            deliver(first + 1)
        elif fate == "swap":
            server.change("drop", prompt, page)
            for number in (first + 1, first):
                deliver(number)
        else:
            for number in [first, first, 0] if fate == "double" else [first]:
                deliver(number)
        if (events := follower.book.outbox.take()) is not None:
            assert index.note(0, events)
        for number in range(min(turn + 1, len(PROMPTS))):
            found = index.match(KEYS[number], COUNTS)
            yield found.get(0, 0), server.cached(number)


@settings(max_examples=200, deadline=None)
@given(st.lists(changes, max_size=25))
def test_the_index_equals_brute_force_where_lost_batches_are_sent_again(history):
    for found, expected in followed(history, replay=True):
        assert found == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, max_size=25))
def test_without_a_replay_nothing_is_claimed_that_is_not_there(history):
    for found, expected in followed(history, replay=False):
        assert found <= expected


# Written down byte by byte after vLLM's encoding: maps with hashes of bytes; arrays, as before its pull request 42892.
MAPS = bytes.fromhex(
    "93cb41d95553c7e0000091 88 a474797065 ab426c6f636b53746f726564 ac626c6f636b5f686173686573 92 c4020101 c4020202"
    "b1706172656e745f626c6f636b5f68617368 c0 a9746f6b656e5f696473 9401020304 aa626c6f636b5f73697a65 02"
    "a76c6f72615f6964 c0 a66d656469756d a3475055 a96c6f72615f6e616d65 c0 00"
)
ARRAYS = bytes.fromhex(
    "92cb41d95553c7e0000093 95 ab426c6f636b53746f726564 91 05 c0 920102 02"
    "92 ac426c6f636b52656d6f766564 91 05 91 b0416c6c426c6f636b73436c6561726564"
)


def test_batches_of_both_encodings_are_understood():
    follower = BatchFollower()
    follower.book.bind([7], [4], [1, 2, 3, 4])
    assert follower.take(0, MAPS) is None
    assert follower.book.snapshot() == [(7, 4)]
    assert decode_batch(MAPS)[0] == 1700089631.5
    kinds = [type(event).__name__ for event in decode_batch(ARRAYS)[1]]
    assert kinds == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert follower.take(1, ARRAYS) is None
    assert follower.book.snapshot() == []
    for wrong in (
        b"\x90",
        b"\x93\x01\x91\x05\x00",
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]),
    ):
        with pytest.raises(msgspec.MsgspecError):
            decode_batch(wrong)


def test_blocks_that_tokens_alone_do_not_find_are_left_out():
    follower = BatchFollower()
    follower.book.bind([7], [2], [1, 2])
    stored = {"type": "BlockStored", "block_hashes": [5], "token_ids": [1, 2], "block_size": 2}
    others = [{"lora_name": "a"}, {"lora_id": 1}, {"medium": "CPU"}, {"extra_keys": [["salt"]]},
              {"group_idx": 1}, {"parent_block_hash": 99}, {"block_size": 1}]  # fmt: skip
    for number, other in enumerate(others):
        follower.take(number, msgspec.msgpack.encode([0.0, [stored | other]]))
        assert follower.book.snapshot() == [], other
    more = [stored, {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU"}, {"type": "New"}]
    follower.take(len(others), msgspec.msgpack.encode([0.0, more, None]))
    assert follower.book.snapshot() == [(7, 2)]


class VllmLike(FakeServer):
    """Without a pulse; a token is a byte. It tells the pages of a prompt once it has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = KvPublisher(16, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self.tokenized = 0

    def cache(self, prompt: str) -> None:
        ids = list(prompt.encode())
        request = Request(0, ids, SamplingParams())
        digests = page_hashes(request, ids, 16)
        self.publisher.note([PageEvent(True, one) for one in digests])
        self.publisher.stored(request, ids)

    async def _one(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0] or 0)
        asked = json.loads(await reader.readexactly(length) or b"null")
        if " /cairn/pulse " in head:
            await self._whole(writer, 404, {})
        elif " /health " in head:
            await self._whole(writer, 200, {})
        elif " /tokenize " in head:
            self.tokenized += 1
            text = asked["prompt"]
            spelled = [{" ": "Ġ"}.get(char, char) for char in text]
            await self._whole(writer, 200, {"tokens": list(text.encode()), "token_strs": spelled})
            writer.close()
        else:
            self.served.append(0)
            await self._answer(writer, asked, [])
            self.cache(asked["prompt"])


def test_the_router_follows_servers_that_tell_blocks():
    prompt = "a stone on a " * 100
    keys = prompt_keys(read_fields(json.dumps({"prompt": prompt}).encode()))

    async def run() -> None:
        servers = [VllmLike(), VllmLike()]
        servers[1].cache(prompt)  # before anybody listens
        groups = []
        for server in servers:
            await server.start()
            events, replay = server.publisher.endpoints
            groups.append(ServerGroup(urls=[server.url], kv_events=events, kv_events_replay=replay))
        config = FleetConfig(servers=groups, router=RouterConfig(port=0))
        router = Router(config.router, [server.url for server in servers])
        router.configure(config)

        async def settled(expected: dict[int, int]) -> None:
            while True:  # decisions that were just made do not count here
                later = time.monotonic() + EXPECTED_S + 1
                if router.index.match(keys.keys, keys.tokens, later) == expected:
                    return
                await asyncio.sleep(0.01)

        url = await router.start()
        try:
            async with asyncio.timeout(60):
                while not all(router.index.knows(number) for number in (0, 1)):
                    await asyncio.sleep(0.01)
                assert (await ask(url, prompt, 2))[0] == 200
                whole = len(prompt) // 16 * 16
                first = 0 if servers[0].served else 1
                await settled({first: whole, 1: whole})
                servers[1].publisher.note([PageEvent(False, b"")])
                await settled({0: whole} if first == 0 else {})
                assert (await ask(url, prompt, 2))[0] == 200
                assert sum(server.tokenized for server in servers) == 1
        finally:
            await router.stop(0.1)
            for server in servers:
                server.kill()
                server.publisher.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [
        {"urls": ["http://a:1"], "kv_events": "zmq://a:1"},
        {"urls": ["http://a:1"], "kv_events_replay": "tcp://*:1"},
        {"model": "m", "kv_events": "tcp://*:1"},
    ],
)
def test_wrong_endpoints_are_refused(fields):
    with pytest.raises(ConfigError, match="kv_events"):
        ServerGroup(**fields)


def test_a_star_is_the_host_of_each_server():
    group = ServerGroup(urls=["http://10.0.0.5:8000"], kv_events="tcp://*:5557")
    source = group.block_sources["http://10.0.0.5:8000"]
    assert (source.events, source.replay) == ("tcp://10.0.0.5:5557", "")
