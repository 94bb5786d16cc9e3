"""Who goes next, who may use how much, and what a name stands for: the rules, and the router that follows them."""

import asyncio
import json
from hashlib import sha256

import msgspec
import pytest
from fake_servers import FakeServer, text_of
from hypothesis import given
from hypothesis import strategies as st
from test_router import ask, exchange, fleet

from cairn.core.errors import ConfigError
from cairn.fleet.aliases import Alias, Aliases, with_model
from cairn.fleet.config import FleetConfig, RouterConfig, ServerGroup
from cairn.fleet.fair_queue import WaitingQueue
from cairn.fleet.quota import ANYBODY, MOST_KEYS, Limits, Quotas, Used, digest_of
from cairn.fleet.router import NO_FIELDS, Router
from cairn.fleet.router_processes import RouterProcesses, SharedState, check_processes
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.keys import Keys

MOST = 50  # tokens of one request


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, MOST)), min_size=30, max_size=60))
def test_keys_that_wait_all_the_time_get_the_same_but_for_one_request_each(arrivals):
    queue, got = WaitingQueue[tuple[int, str, int]](), dict.fromkeys("abc", 0)
    for number, (key, tokens) in enumerate(arrivals):
        queue.add((number, key, tokens), "m", key, 0)
    while {key for _, key, _ in queue} == set("abc"):
        item = queue.take("m")
        assert item is not None
        queue.charge(item[1], item[2])
        got[item[1]] += item[2]
        assert max(got.values()) - min(got.values()) <= 2 * MOST


def test_priorities_go_first_and_who_comes_back_has_saved_nothing():
    queue = WaitingQueue[str]()
    queue.charge("busy", 1000)
    for name, key, priority in (
        ("b1", "busy", 0),
        ("b2", "busy", 0),
        ("n1", "new", 0),
        ("u", "busy", -1),
    ):
        queue.add(name, None, key, priority)
    assert queue.take(None) == "u"
    assert queue.take(None) == "b1"  # `new` was lifted to 1000: it has no claim on the past
    queue.charge("busy", 1)
    assert queue.take(None) == "n1"
    queue.remove("b2")
    assert (len(queue), queue.models, queue.take(None)) == (0, {}, None)


def test_nobody_pays_later_for_what_an_idle_fleet_gave():
    queue = WaitingQueue[str]()
    queue.charge("a", 1_000_000)  # nobody else was there
    queue.add("b1", None, "b", 0)
    queue.add("a1", None, "a", 0)
    assert queue.take(None) == "b1"
    queue.charge("b", 10)
    queue.add("b2", None, "b", 0)  # b has always one that waits
    assert queue.take(None) == "a1"
    queue.remove("b2")
    queue.charge("a", 1_000_000)
    queue.arrived("c")  # and did not have to wait
    queue.charge("c", 1)
    queue.add("d1", None, "d", 0)  # served last was c, which had been lifted
    queue.add("a2", None, "a", 0)
    queue.charge("d", 2)
    assert queue.take(None) == "a2"


def test_the_next_one_is_next_whichever_model_it_wants():
    queue = WaitingQueue[str]()
    for name, model, key, priority in (
        ("a1", "x", "a", 0),
        ("b1", "y", "b", 0),
        ("a2", "y", "a", -1),
    ):
        queue.add(name, model, key, priority)
    queue.charge("a", 100)
    taken = []
    while models := queue.models:
        taken.append(queue.take(queue.next_model(models)))
    assert taken == ["a2", "b1", "a1"]


def test_a_key_with_twice_the_weight_gets_twice_as_much():
    queue = WaitingQueue[tuple[str, int]]()
    queue.weigh({"heavy": 2.0})
    for number in range(60):
        for key in ("heavy", "light"):
            queue.add((key, number), None, key, 0)
    taken = []
    for _ in range(60):
        key, _number = queue.take(None) or ("", 0)
        queue.charge(key, 10)
        taken.append(key)
    assert 38 <= taken.count("heavy") <= 42


def test_quotas_are_reserved_settled_and_end_with_the_day():
    quotas = Quotas(Limits(requests_per_day=3, tokens_per_day=100, at_once=2))
    assert quotas.admit("a", 60, 0.0) is None
    refused = quotas.admit("a", 60, 0.0)  # might need more than there is
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == ("key_budget", 86_400)
    assert "on another day" not in refused.message
    assert "on another day" in quotas.refusal(Used(), "a", 10**9, 0.0).message
    assert quotas.admit("b", 60, 0.0) is None
    quotas.settle("a", 60, 30, 1.0)
    assert quotas.admit("a", 70, 2.0) is None
    assert quotas.admit("a", 0, 2.0) is None
    assert (quotas.admit("a", 0, 2.0) or refused).code == "key_concurrency"
    quotas.settle("a", 70, 70, 3.0)
    assert (quotas.admit("a", 0, 3.0) or refused).code == "key_requests"
    assert quotas.admit("a", 100, 86_400.0) is None
    quotas.change(Limits(), {})
    assert not quotas.limited


def test_keys_are_known_by_their_digests():
    expected = sha256(b"sk-1").hexdigest()
    assert digest_of(b"host: x\r\nAuthorization: Bearer sk-1\r\n") == expected
    assert digest_of(b"X-Api-Key: sk-1\r\nhost: x\r\n") == expected
    assert digest_of(b"host: x\r\nnot-authorization: Bearer sk-1\r\n") == ANYBODY


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Authorization", "x-api-key", "X-Other"]),
            st.sampled_from(["", " ", "Bearer", "Bearer ", "bearer sk-1", "Bearerjunk", "sk-2"]),
        ),
        max_size=4,
    )
)
def test_router_and_server_read_the_same_key(headers):
    names = {sha256(key.encode()).hexdigest(): key for key in ("sk-1", "sk-2", "Bearer")}
    for key in ("bearer sk-1", "Bearerjunk"):
        names[sha256(key.encode()).hexdigest()] = key
    server = Keys([(key, key) for key in names.values()])
    scope = {"headers": [(n.lower().encode(), v.strip().encode()) for n, v in headers]}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
    if (digest := digest_of(lines)) == ANYBODY:
        with pytest.raises(Refusal, match="needs an API key"):
            server.holder(scope)
    else:
        assert names[digest] == server.holder(scope)


def test_invented_keys_cost_no_memory_and_push_nobody_out():
    quotas = Quotas(Limits(tokens_per_day=100))
    assert quotas.admit("real", 90, 0.0) is None
    quotas.settle("real", 90, 90, 0.0)
    for number in range(MOST_KEYS + 10):
        assert quotas.admit(f"invented {number}", 1, 0.0) is None
        quotas.settle(f"invented {number}", 1, 0, 0.0)
    assert len(quotas.used) <= MOST_KEYS
    assert quotas.admit("real", 90, 0.0) is not None


def test_a_canary_gets_its_share_and_a_user_keeps_a_model():
    aliases = Aliases([Alias(name="chat", model="old", weight=9), Alias(name="chat", model="new")])
    got = [aliases.target("chat", number, b"") for number in range(1000)]
    assert abs(got.count("new") - 100) <= 2
    assert len({aliases.target("chat", number, b'"alice"') for number in range(50)}) == 1
    assert aliases.target("old", 1, b"") is None
    body = b'{"model": "chat", "n": 1.50, "messages": [{"content": "\\u00e9 \\"model\\""}]}'
    changed = json.loads(with_model(body, "new"))
    assert changed == json.loads(body) | {"model": "new"}
    with pytest.raises(ConfigError, match="weights"):
        Aliases([Alias(name="x", model="y", weight=0)])


def configured(router, **settings) -> None:
    group = ServerGroup(urls=["http://127.0.0.1:1"])
    parts = {key: settings.pop(key) for key in ("aliases", "keys") if key in settings}
    router.configure(FleetConfig(servers=[group], router=RouterConfig(**settings), **parts))


def test_the_router_follows_quotas_and_aliases():
    async def check(url, servers, router):
        configured(router, key_requests_per_day=1, aliases=[Alias(name="chat", model="fake")])
        assert (await ask(url, "x", 3, model="chat"))[0] == 200
        assert sum(len(one.served) for one in servers) == 1
        status, _, raw = await ask(url, "x", 3)
        assert (status, b"key_requests" in raw) == (429, True)
        body = b'{"prompt": "x", "max_tokens": 2}'
        raw = await exchange(url, ("POST /v1/completions", body), headers=b"x-api-key: other\r\n")
        assert raw.startswith(b"HTTP/1.1 200")
        used = router.quotas.used[ANYBODY]
        assert (used.at_once, used.reserved) == (0, 0)
        configured(router, key_requests_per_day=None)
        assert (await ask(url, "x", 3, model="chta"))[0] == 404
        raw = await exchange(url, ("GET /metrics", b""))
        for code in (b"key_requests", b"model_not_found"):
            assert b'cairn_router_refused_requests_total{code="%b"} 1' % code in raw
        configured(router, aliases=[Alias(name="chat", model="fake")])
        router.default_model = "chat"  # of a body that says nothing, and stays as it is
        for body in (b"no JSON", b'{"model": "\xff"}', b'{"messages": ' + b"[" * 10_000):
            raw = await exchange(url, ("POST /v1/completions", body))
            assert (raw[:9], NO_FIELDS.model) == (b"HTTP/1.1 ", None)

    fleet(check)


async def leave(url, count: int, stream: bool, **more) -> None:
    """A client that goes away after the first bytes, or before them."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {"prompt": "12345678", "max_tokens": count, "stream": stream, **more}
    body = json.dumps(fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(0.05)
    writer.transport.abort()


@pytest.mark.parametrize("marked", [True, False])
def test_an_answer_that_is_left_is_not_free(marked):
    async def check(url, servers, router):
        configured(router, key_tokens_per_day=10_000)
        servers[0].marked = marked

        async def left(*given, **more):
            before = router.quotas.used[ANYBODY].tokens if router.quotas.used else 0
            await leave(url, *given, **more)
            while router.open:
                await asyncio.sleep(0.005)
            used = router.quotas.used[ANYBODY]
            assert (used.at_once, used.reserved) == (0, 0)
            return used.tokens - before

        assert 3 <= await left(500, True) < 400  # two of the prompt, and some of the answer
        assert await left(500, False, n=2) == 2 + 2 * 500
        assert (await ask(url, "x", -5, False))[0] == 200  # ours would refuse it
        assert router.quotas.used[ANYBODY].reserved == 0

    fleet(check, count=1)


def test_what_computes_nothing_does_not_wait_and_too_many_do_not_either(monkeypatch):
    async def check(url, servers, router):
        (worker,) = router.workers
        worker.capacity = 0
        monkeypatch.setattr("cairn.fleet.placement.MOST_WAITING_REQUESTS", 1)
        held = asyncio.create_task(ask(url, "x", 2))
        while not router.waiting:
            await asyncio.sleep(0.005)
        assert (await ask(url, "x", 2))[0] == 429
        body = b'{"prompt": "x", "max_tokens": 1}'
        raw = await exchange(url, ("POST /tokenize", body))
        assert raw.startswith(b"HTTP/1.1 200")
        assert not held.done()
        worker.capacity = 9
        assert (await held)[0] == 200

    fleet(check, count=1)


def test_a_full_server_is_given_no_more_and_everybody_who_waits_is_served():
    async def check(url, servers, router):
        (worker,) = router.workers
        most = worker.hello.rows + 1
        answers = [asyncio.create_task(ask(url, f"p{at}", 8)) for at in range(4 * most)]
        seen = 0
        while not all(one.done() for one in answers):
            seen = max(seen, len(router.waiting))
            assert worker.waiting + worker.decoding <= most
            await asyncio.sleep(0.001)
        assert seen > 0
        assert [(await one)[0] for one in answers] == [200] * len(answers)

    fleet(check, count=1)


def test_a_slow_server_is_hedged_and_the_faster_answer_counts():
    async def check(url, servers, router):
        configured(router, hedge_s=0.05)
        servers[0].frozen_answers = True
        for at in range(3):
            status, text, raw = await ask(url, f"h{at}", 4)
            assert (status, raw.count(b"data: {")) == (200, 4)
            assert text
        assert router.views.hedged >= 1
        servers[0].frozen_answers = False
        assert msgspec.json.decode(msgspec.json.encode(router.views.fleet()))["hedged"] >= 1

    fleet(check)


def test_a_copy_takes_the_place_of_a_server_that_died_and_few_are_made():
    async def check(url, servers, router):
        configured(router, hedge_s=0.02)
        for server in servers:
            server.frozen_answers = True
        whole = asyncio.create_task(ask(url, "whole", 3, False))
        await asyncio.sleep(0.1)
        assert router.views.hedged == 0
        stream = asyncio.create_task(ask(url, "x", 3))
        while not router.views.hedged:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        (streamed,) = (one for one in router.open if one.streams)
        first, copy = streamed.worker, streamed.hedge.worker
        servers[first.number].kill()
        while streamed.worker is not copy:
            await asyncio.sleep(0.005)
        assert (streamed.attempts, streamed.hedge) == (2, None)
        for server in servers:
            server.frozen_answers = False
        assert (await stream)[1] == text_of("x", 3)
        assert (await whole)[1] == text_of("whole", 3)
        assert sum(len(one.served) for one in servers) <= 4
        router._hedging.budget = 0.0  # as after many copies
        configured(router, hedge_s=0.001)
        assert (await ask(url, "y", 3))[0] == 200
        assert router.views.hedged == 1

    fleet(check)


def test_a_process_that_does_not_start_is_told_and_the_shared_port_stays(monkeypatch):
    async def check() -> None:
        said = []
        router = Router(RouterConfig(port=0), [])
        config = FleetConfig(
            servers=[ServerGroup(urls=["http://127.0.0.1:1"])], router=RouterConfig(port=4321)
        )
        monkeypatch.setattr("cairn.fleet.router_processes.COMMAND", ("/nowhere/python",))
        copies = RouterProcesses(2, SharedState(config, []), router, said.append)
        changed = msgspec.structs.replace(config, router=RouterConfig(port=0, policy="lmetric"))
        copies.tell(changed)
        assert copies._state.config.router == RouterConfig(port=4321, policy="lmetric")
        async with asyncio.timeout(10):
            while not said:
                await asyncio.sleep(0.01)
            await copies.stop()
        assert "process 2 did not start" in said[0]

    asyncio.run(check())


def test_processes_share_a_port_and_know_of_each_other():
    async def check() -> None:
        server = FakeServer()
        await server.start()
        router = Router(RouterConfig(port=0), [])
        url = await router.start(shared=True)
        port = int(url.rpartition(":")[2])
        config = FleetConfig(
            servers=[ServerGroup(urls=[server.url])], router=RouterConfig(port=port)
        )
        copies = RouterProcesses(2, SharedState(config, []), router, print)
        router.use([server.url])
        copies.tell(urls=[server.url])
        try:
            async with asyncio.timeout(60):
                while len(router.processes) < 2:
                    await asyncio.sleep(0.01)
                asked = 0
                while asked - router.views.total < 3:  # the other process has had three
                    asked += 1
                    assert (await ask(url, f"p{asked}", 2))[1] == text_of(f"p{asked}", 2)
                raw = await exchange(router.processes[1], ("GET /cairn/fleet", b""))
                told = json.loads(raw.partition(b"\r\n\r\n")[2])
                assert (told["requests"], told["processes"]) == (3, router.processes)
        finally:
            await copies.stop()
            await router.stop(0.1)
            server.kill()

    asyncio.run(check())


def test_what_one_process_counts_is_refused_for_several():
    scaled = FleetConfig(servers=[ServerGroup(model="m", least=0, most=2)])
    limited = FleetConfig(
        servers=[ServerGroup(model="m")], router=RouterConfig(key_tokens_per_day=5)
    )
    for config, word in ((scaled, "scaled"), (limited, "limits")):
        check_processes(config, 1, False)
        with pytest.raises(ConfigError, match=word):
            check_processes(config, 2, False)
