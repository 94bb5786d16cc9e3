"""The router in front of servers without a model: nothing is lost, whatever happens to them."""

import asyncio
import json
import random
import re
import socket
from math import inf
from types import SimpleNamespace

import msgspec
import pytest
from fake_servers import FakeServer, text_of

from cairn.fleet.aliases import Alias, Aliases
from cairn.fleet.config import RouterConfig
from cairn.fleet.exchange import Exchange
from cairn.fleet.refusals import broken_stream, unserved_aliases
from cairn.fleet.router import NO_KEYS, Router
from cairn.fleet.routing_policy import Ask
from cairn.fleet.upstream import Pool, Upstream
from cairn.fleet.wire import whole_request
from cairn.fleet.worker import Worker
from cairn.fleet.write_queue import WriteQueue
from cairn.serve.pulse import Events
from cairn.serve.text_keys import RequestFields


async def exchange(url: str, *requests: tuple[str, bytes], headers: bytes = b"") -> bytes:
    """Everything that comes back for requests of a connection, which ends after them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for number, (line, body) in enumerate(requests, start=1):
        head = b"%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (line.encode(), len(body))
        close = b"connection: close\r\n" if number == len(requests) else b""
        writer.write(head + headers + close + b"\r\n" + body)
    raw = await reader.read()
    writer.close()
    return raw


async def ask(url: str, prompt: str, count: int, stream: bool = True, **more: str):
    """(status, text of the answer, raw body)."""
    body = json.dumps({"prompt": prompt, "max_tokens": count, "stream": stream, **more}).encode()
    raw = await exchange(url, ("POST /v1/completions", body))
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if b"chunked" not in head:
        return status, json.loads(rest).get("text"), rest
    pieces = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")]
    return status, "".join(json.loads(piece).get("text", "") for piece in pieces), rest


def fleet(check, count: int = 2, up: bool = True, page: bytes | None = None, **settings) -> None:
    """Runs `check(router's url, servers, router)`."""

    async def run() -> None:
        servers = [FakeServer() for _ in range(count)]
        for server in servers:
            server.page = page
            await server.start()
        config = RouterConfig(**({"port": 0, "stall_s": 0.5} | settings))
        router = Router(config, [server.url for server in servers])
        url = await router.start()
        try:
            async with asyncio.timeout(30):
                while up and any(worker.state != "up" for worker in router.workers):
                    await asyncio.sleep(0.01)
                await check(url, servers, router)
            assert not router.open
            assert not router.waiting
            for worker in router.workers:
                assert (worker.waiting, worker.decoding, worker.queued_tokens) == (0, 0, 0)
        finally:
            await router.stop(0.1)
            for server in servers:
                server.kill()

    asyncio.run(run())


def test_marks_are_taken_out_and_every_token_arrives():
    async def check(url, servers, router):
        status, text, raw = await ask(url, "hello", 12)
        assert (status, text) == (200, text_of("hello", 12))
        assert [mark in raw for mark in (b":t", b":e", b"[DONE]")] == [False, False, True]
        assert raw.endswith(b"0\r\n\r\n")
        assert (await ask(url, "hello", 3, stream=False))[1] == text_of("hello", 3)

    fleet(check)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_stream_goes_on_elsewhere_where_its_server_died(after):
    async def one_dies(url, servers, router):
        victim = servers[0]
        victim.die_after = after
        answers = await asyncio.gather(*(ask(url, f"prompt {at}", 10) for at in range(6)))
        assert [text for _, text, _ in answers] == [text_of(f"prompt {at}", 10) for at in range(6)]
        assert victim.die_after is None, "nobody was sent to the victim"
        assert b"error" not in b"".join(raw for _, _, raw in answers)
        assert after in servers[1].served

    fleet(one_dies)


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_whole_answer_goes_on_elsewhere_where_its_server_died(after):
    """With the tokens that were told. It begins again where none were told, or where nobody can go on with them."""

    async def one_dies(url, servers, router):
        for marked, continues in ((True, True), (False, True), (True, False)):
            for server in servers:
                server.marked, server.continues = marked, continues
            servers[0].die_after, servers[1].served = after, []
            answers = await asyncio.gather(*(ask(url, f"p {at}", 10, False) for at in range(6)))
            assert [text for _, text, _ in answers] == [text_of(f"p {at}", 10) for at in range(6)]
            assert servers[0].die_after is None, "nobody was sent to the victim"
            assert (after if marked and continues else 0) in servers[1].served
            assert b":a 200" not in b"".join(raw for _, _, raw in answers)
            await servers[0].start()
            while any(worker.state != "up" for worker in router.workers):
                await asyncio.sleep(0.01)

    fleet(one_dies)


def test_a_request_whose_server_was_lost_waits_for_no_short_answers():
    """It is sent at once, so no server may look better for what waiting would save there."""

    async def check(url, servers, router):
        asks, policy = [], router.policy
        router.policy = lambda ask, seen: asks.append(ask) or policy(ask, seen)
        servers[0].die_after = servers[1].die_after = 2
        asked = asyncio.create_task(ask(url, "hello", 5))
        while not all(server.up for server in servers) or not asked.done():
            for server in servers:
                if not server.up:
                    await server.start()
            await asyncio.sleep(0.01)
        assert (await asked)[:2] == (200, text_of("hello", 5))
        assert [one.waited_s == inf for one in asks][:2] == [False, True]

    fleet(check)


def test_an_engine_that_fails_under_its_server_loses_no_stream_and_repeats_no_error():
    """A stream goes on elsewhere. What a server says of a whole answer that it began itself is what the client gets."""

    async def check(url, servers, router):
        for server in servers:
            server.fails_after = 3
        assert (await ask(url, "a stream", 10))[:2] == (200, text_of("a stream", 10))
        assert {0, 3} <= {begun for server in servers for begun in server.served}
        for server in servers:
            server.fails_after = 2
        status, text, _ = await ask(url, "whole", 10, stream=False)
        assert (status, text) == (500, text_of("whole", 10))

    fleet(check)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/v1/chat/completions", b'data: {"error":{"message":"gone",'),
        (b"/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error"'),
        (b"/v1/responses", b'event: error\ndata: {"type":"error","code":"server_lost"'),
        (b"/api/chat", b'{"error":"gone"}\n'),
    ],
)
def test_a_stream_that_breaks_off_says_so_in_its_own_protocol(path, expected):
    assert broken_stream(path, "gone").startswith(expected)


def test_only_attempts_without_a_token_count():
    async def check(url, servers, router):
        async def reviving(server) -> None:
            while True:
                if not server.up:
                    await server.start()
                    server.die_after = 2
                await asyncio.sleep(0.01)

        server = servers[0]
        for prompt, stream in (("a stream", True), ("whole", False)):
            server.die_after = 2  # tokens of each life
            keeper = asyncio.create_task(reviving(server))
            assert (await ask(url, prompt, 15, stream))[:2] == (200, text_of(prompt, 15))
            keeper.cancel()
            server.die_after = None
        assert router.workers[0].lost > 4

    fleet(check, count=1, attempts=2)


def test_attempts_that_reach_nobody_do_not_count():
    """Servers whose pulses go on, and who take no connection for a moment."""

    async def check(url, servers, router):
        for server in servers:
            server.deaf()
        asked = asyncio.create_task(ask(url, "hello", 5))
        while router.workers[0].lost + router.workers[1].lost < 4:
            await asyncio.sleep(0.01)
        for server in servers:
            await server.start()
        assert (await asked)[:2] == (200, text_of("hello", 5))

    fleet(check, attempts=1, stall_s=10.0)


def test_servers_killed_at_random_under_load_lose_nothing():
    async def check(url, servers, router):
        chance, killing = random.Random(5), True

        async def kill() -> None:
            while killing:
                await asyncio.sleep(0.15)
                victim = chance.choice(servers)
                victim.kill()
                await asyncio.sleep(0.05)
                await victim.start()

        killer = asyncio.create_task(kill())

        async def client(number: int) -> None:
            for turn in range(6):
                prompt, stream = f"{number} asks {turn}", turn % 3 != 2
                status, text, raw = await ask(url, prompt, 30, stream)
                assert (status, text) == (200, text_of(prompt, 30)), raw[-300:]

        await asyncio.gather(*(client(number) for number in range(8)))
        killing = False
        await killer
        assert router.views.moved > 0

    fleet(check, count=3)


def test_a_frozen_server_is_given_up_and_its_streams_go_on():
    async def check(url, servers, router):
        answers = [asyncio.create_task(ask(url, f"p{at}", 60)) for at in range(4)]
        while not servers[0].served:
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.03)
        servers[0].frozen = True
        done = await asyncio.gather(*answers)
        assert [text for _, text, _ in done] == [text_of(f"p{at}", 60) for at in range(4)]
        assert router.workers[0].state == "down"
        servers[0].frozen = False

    fleet(check)


def test_requests_wait_while_no_server_is_up_and_are_refused_with_reasons_after_that():
    async def check(url, servers, router):
        servers[0].kill()
        waiting = asyncio.create_task(ask(url, "patient", 5))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await servers[0].start()
        assert (await waiting)[1] == text_of("patient", 5)
        servers[0].kill()
        status, _, raw = await ask(url, "in vain", 5)
        assert status == 503
        assert b"server-0 is down" in raw

    fleet(check, count=1, hold_s=1.0)


def test_a_long_stream_that_loses_its_server_waits_as_long_as_a_new_request():
    """However long it has been answered: it begins to wait when its server is lost."""

    async def check(url, servers, router):
        servers[0].gap_s = 0.05
        asked = asyncio.create_task(ask(url, "long", 30))
        await asyncio.sleep(1.2)
        servers[0].kill()
        await asyncio.sleep(0.2)
        await servers[0].start()
        status, text, _ = await asked
        assert (status, text) == (200, text_of("long", 30))

    fleet(check, count=1, hold_s=1.0)


def test_busy_servers_are_passed_over_and_a_stream_of_another_kind_ends_with_an_error():
    async def check(url, servers, router):
        servers[0].refuse = 503
        for at in range(4):
            assert (await ask(url, f"x{at}", 3))[1] == text_of(f"x{at}", 3)
        servers[1].refuse = 429
        assert (await ask(url, "y", 3))[0] in (429, 503)
        for server in servers:
            server.refuse, server.code, server.refused = 429, "key_budget", 0
        assert (await ask(url, "y", 3))[0] == 429
        assert sum(server.refused for server in servers) == 1  # not from one to the next
        servers[0].refuse = servers[1].refuse = None
        for server in servers:
            server.marked, server.die_after = False, 2
        status, _, raw = await ask(url, "z", 9)
        assert status == 200
        assert b"server_lost" in raw

    fleet(check)


def test_a_server_that_sleeps_is_asked_where_nobody_is_awake_unless_its_host_decides():
    async def check(url, servers, router):
        first, second = router.workers
        servers[0].status = "asleep"
        while first.state != "asleep":
            await asyncio.sleep(0.01)
        assert (await ask(url, "x", 3))[0] == 200
        assert [len(one.served) for one in servers] == [0, 1]
        servers[1].status = "asleep"
        while second.state != "asleep":
            await asyncio.sleep(0.01)
        assert (await ask(url, "x", 3))[0] == 200  # the server wakes up for it
        first.managed = second.managed = True
        status, _, raw = await ask(url, "x", 3)
        assert (status, b"is asleep" in raw) == (503, True)
        first.woke_up()
        await asyncio.sleep(0.1)  # its pulse, which says what was before, changes nothing
        assert (await ask(url, "x", 3))[0] == 200
        assert second.hello is not None
        second.down("its connection was lost")
        second.up(second.hello)  # the same process, which its host has put to sleep
        assert second.state == "asleep"
        second.up(msgspec.structs.replace(second.hello, epoch=second.hello.epoch + 1))
        assert second.state == "up"  # started again

    fleet(check, hold_s=0.1)


def test_the_router_answers_for_itself_and_explains_its_decisions():
    async def check(url, servers, router):
        body = b'{"prompt": "why, and why there?", "max_tokens": 2}'
        # Four requests on one connection, sent before the first is answered.
        own = [("GET /cairn/fleet/requests/r-1", b""), ("GET /health", b""), ("GET /metrics", b"")]
        raw = await exchange(
            url, ("POST /v1/completions", body), *own, headers=b"x-request-id: r-1\r\n"
        )
        assert raw.count(b"HTTP/1.1 200") == 4
        assert b"cairn_router_requests_total 1" in raw
        assert b'"considered"' in raw
        raw = await exchange(url, ("GET /fleet", b""), ("GET /cairn/fleet/requests", b""))
        assert b"<title>Fleet</title>" in raw
        assert b'{"requests":[{"id":"r-1"' in raw
        status, _, raw = await ask(url, "x", 1, model="fkae")
        assert status == 404
        assert b"did you mean 'fake'" in raw
        router.aliases = Aliases([Alias(name="chat", model="fake"), Alias(name="chat", model="f")])
        (note,) = unserved_aliases(router)
        assert "alias 'chat'" in note
        raw = await exchange(url, ("GET /v1/models", b""))
        assert re.findall(rb'"id":"(\w+)"', raw) == [b"fake", b"chat"]
        (known,) = router.views._requests
        keys, events = router.index, Events(1, [(7, 4)])
        (choice,) = known.choices
        assert keys.note(choice.chosen.number, events)
        choice.candidates[choice.position].cached_tokens = known.prompt_tokens
        (served,) = [one for one in router.views.fleet()["servers"] if one["sent"]]
        assert (served["prefixes"], served["hit_share"]) == (1, 1.0)

    fleet(check)


def test_a_server_that_has_the_number_of_a_removed_one_gets_its_own_requests():
    async def check(url, servers, router):
        first, second = servers
        router.use([first.url])
        assert (await ask(url, "a", 2))[0] == 200
        router.use([])
        router.use([second.url])
        assert (await ask(url, "b", 2))[1] == text_of("b", 2)
        assert [len(one.served) for one in servers] == [1, 1]

    fleet(check)


def test_a_client_that_sends_nonsense_behind_its_request_ends_it():
    """Nobody is left who could read the answer: the server is told, and the router keeps nothing of it."""

    async def check(url, servers, router):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": "x", "max_tokens": 10**6, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await reader.readuntil(b"data: ")
        writer.write(b"nonsense\r\n\r\n")
        rest = await reader.read()
        assert b"HTTP/1.1 400" not in rest  # in the middle of an answer that is no answer
        assert not router.open
        writer.close()

    fleet(check, count=1)


def test_many_requests_sent_before_the_answer_to_the_first_are_answered_in_order():
    async def check(url, servers, router):
        first = ("POST /v1/completions", b'{"prompt": "p", "max_tokens": 20}')
        own = [("GET /health", b""), ("GET /cairn/fleet/requests/none", b"")]
        raw = await exchange(url, first, *(own * 2000), first)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", raw)
        assert statuses == [b"200", *([b"200", b"404"] * 2000), b"200"]

    fleet(check, count=1)


def test_it_is_not_healthy_while_models_are_loaded_for_the_first_time():
    async def check(url, servers, router):
        router.starting = True
        early = await exchange(url, ("GET /health", b""))
        router.starting = False
        ready = await exchange(url, ("GET /health", b""))
        assert (early[9:12], ready[9:12]) == (b"503", b"200")
        assert b'"status":"starting"' in early

    fleet(check, count=1)


def test_a_request_that_is_refused_goes_nowhere():
    async def check(url, servers, router):
        small, large = (b'{"prompt": "x", "max_tokens": 1}'.ljust(size) for size in (40, 90))
        await exchange(url, ("POST /v1/completions", small))  # leaves an open connection
        raw = await exchange(url, ("POST /v1/completions", large))
        assert raw.count(b"HTTP/1.1 413") == raw.count(b"HTTP/1.1") == 1
        await asyncio.sleep(0.05)
        assert servers[0].served == [0]

    fleet(check, count=1, max_body_bytes=64)


def test_a_connection_of_a_slow_client_is_read_on_by_the_next():
    """The end of an answer may come in one piece with the chunk that made its client too slow."""

    class Transport:
        paused = closing = False

        def is_closing(self):
            return self.closing

        def pause_reading(self):
            self.paused = True

        def resume_reading(self):
            self.paused = False

        def write(self, data):
            pass

    class SlowDownstream:
        def begin(self, *_):
            asker.pause(True)

        def finish(self):
            pass

    async def check() -> None:
        nonlocal asker
        worker, pool = Worker(0, "http://127.0.0.1:1"), Pool(WriteQueue())
        request = whole_request(b"GET /x HTTP/1.1\r\n\r\n")
        router = SimpleNamespace(done=lambda exchange: None, waiting=SimpleNamespace(models={}))
        asker = Exchange(
            router, SlowDownstream(), request, b"id", Ask(0, 1), NO_KEYS, None, RequestFields()
        )
        asker.assign(worker, 1)
        upstream = Upstream(worker, pool)
        upstream.connection_made(Transport())
        asker.send(upstream)
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        upstream.data_received(head + b"5\r\nhello\r\n0\r\n\r\n")
        assert pool.take(worker) is upstream
        assert not upstream.transport.paused

    asker = None
    asyncio.run(check())


def test_a_server_of_another_kind_that_answers_everything_is_followed_on():
    """With 200 and a page, as some do for paths that they do not know; then a server of ours comes in its place."""

    async def check(url, servers, router):
        (worker,) = router.workers
        while "something else" not in worker.reason:
            await asyncio.sleep(0.01)
        servers[0].page = None
        while worker.state != "up":
            await asyncio.sleep(0.01)

    fleet(check, count=1, up=False, page=b"<html>\r\n")


def test_a_head_request_gets_the_head_of_the_answer_alone():
    """On a connection that goes on: the next answer is not taken for its body."""

    async def check(url, servers, router):
        body = b'{"prompt": "p", "max_tokens": 2}'
        asked = [("HEAD /health", b""), ("HEAD /v1/models", b""), ("HEAD /stream", b"")]
        raw = await exchange(url, *asked, ("POST /v1/completions", body))
        heads = [answer.partition(b"\r\n\r\n") for answer in raw.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert [bool(rest) for _, _, rest in heads] == [False, False, False, True]
        assert b"content-length: 39" in heads[0][0]
        assert b"chunked" in heads[2][0]
        assert text_of("p", 2).encode() in heads[3][2]

    fleet(check, count=1)


@pytest.mark.parametrize("split", [False, True])
def test_a_client_that_offers_another_protocol_is_answered_in_this_one(split):
    """As Java's does with every request, whose body comes by itself."""

    async def check(url, servers, router):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        body = json.dumps({"prompt": "upgrade:", "max_tokens": 4}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
        for _ in range(2):
            writer.write(head % (offer, len(body)))
            if split:
                await asyncio.sleep(0.02)
            writer.write(body)
            answer = await reader.readuntil(b"}")
            assert text_of("upgrade:", 4).encode() in answer
        writer.write(b"CONNECT x:1 HTTP/1.1\r\n\r\n")
        assert b"400 Bad Request" in await reader.read()
        writer.close()

    fleet(check, count=1)


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks():
    async def check(url, servers, router):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "p", "max_tokens": 5, "stream": true}'
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        lines = [line for line in rest.split(b"\n") if line]
        assert all(line.startswith(b"data: ") for line in lines)
        assert "".join(json.loads(line[6:])["text"] for line in lines[:-1]) == text_of("p", 5)
        writer.close()

    fleet(check, count=1)


@pytest.mark.parametrize(
    "half", [b"POST /v1/comp", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"]
)
def test_a_client_that_sends_half_a_request_is_told_so_in_time(monkeypatch, half):
    monkeypatch.setattr("cairn.fleet.downstream.HEAD_S", 0.2)
    monkeypatch.setattr("cairn.fleet.downstream.BODY_S", 0.2)

    async def check(url, servers, router):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(half)
        assert b"408 Request Timeout" in await reader.read()
        writer.close()

    fleet(check, count=1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
def test_a_client_that_never_reads_is_left_and_its_server_with_it(monkeypatch):
    monkeypatch.setattr("cairn.fleet.listen.UNREAD_S", 0.5)

    async def check(url, servers, router):
        servers[0].filler, servers[0].gap_s = "x" * 100_000, 0.0
        host, port = url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        body = b'{"prompt": "p", "max_tokens": 100000, "stream": true}'
        client.send(
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        while not router.open:
            await asyncio.sleep(0.01)
        while router.open:
            await asyncio.sleep(0.01)
        assert router.workers[0].lost == 0
        client.close()

    fleet(check, count=1)
