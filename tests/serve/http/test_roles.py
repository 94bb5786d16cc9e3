"""A prefill server and a decode server on loopback give the tokens of one server, also when the first one fails."""

import os
import re
import subprocess
import sys
import threading

import httpx
import live_server
import msgspec
import pytest

from cairn.core.errors import ConfigError
from cairn.serve.http.server.settings import ServerConfig
from cairn.serve.serving import ServedModel

LONG = "Once upon a time there was a small stone on a long path. " * 3
SETTINGS = {"num_gpu_blocks_override": 256}
CHUNKS = {"max_num_batched_tokens": 32}  # a long prompt takes several steps
ASKS = {"prefill_min_tokens": 24, "prefill_when": "always"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return live_server.make_folder(tmp_path_factory.mktemp("models") / "roles", context=400)


@pytest.fixture(scope="module")
def both(folder):
    with live_server.live(folder, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def prefill(folder):
    with live_server.live(folder, role="prefill", **CHUNKS, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def decode(folder, prefill):
    urls = [prefill.url]
    with live_server.live(folder, role="decode", prefill_urls=urls, **ASKS, **SETTINGS) as made:
        yield made


def counted(server):
    stats = server.service.serving.engine.stats()
    return stats.remote_prefills, stats.prefill_fallbacks


def asked(server, prompt=LONG, **more):
    body = {
        "prompt": prompt,
        "max_tokens": 20,
        "temperature": 0,
        "return_token_ids": True,
        "seed": 5,
    } | more
    found = server.http.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return [choice["token_ids"] for choice in found.json()["choices"]]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.0, "n": 3},
        {"stop": ["e"], "max_tokens": 60},
        {"max_tokens": 1},
        {"logprobs": 2},
        {"presence_penalty": 1.5, "temperature": 0.7},
    ],
)
def test_tokens_are_those_of_one_server(both, decode, more):
    before = counted(decode)
    assert asked(decode, **more) == asked(both, **more)
    remote, fallbacks = counted(decode)
    ends_at_once = more.get("max_tokens") == 1
    assert fallbacks == before[1]
    assert remote - before[0] == (0 if ends_at_once else more.get("n", 1))


def test_short_and_constrained_prompts_stay(both, decode, prefill):
    steps = prefill.service.serving.engine.stats().steps
    shape = {"guided_choice": ["yes", "no"]}
    for prompt, more in (("Once", {}), (LONG, shape), (LONG, {"echo": True, "logprobs": 1})):
        assert asked(decode, prompt, **more) == asked(both, prompt, **more)
    assert prefill.service.serving.engine.stats().steps == steps


def test_many_streams_at_once(both, decode, prefill):
    prompts = [LONG[n:] for n in range(12)]
    expected = [asked(both, prompt) for prompt in prompts]
    found = [None] * len(prompts)

    def ask(n):
        found[n] = asked(decode, prompts[n])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected
    live_server.wait_until(lambda: not decode.engine.has_work)
    assert any(arrival.streamed for arrival in decode.engine.side.arrivals)
    # What was read is freed on the other side, within a beat of the lease.
    live_server.wait_until(lambda: prefill.engine.scheduler.blocks.usage().used == 0)


def test_a_client_that_leaves_frees_both_sides(decode, prefill):
    body = {"prompt": LONG, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with prefill.held(), pytest.raises(httpx.ReadTimeout):
        decode.http.post("/v1/completions", json=body, timeout=live_server.reads_for(1))
    with decode.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    live_server.wait_until(lambda: not decode.engine.has_work and not decode.service.open)
    live_server.wait_until(lambda: prefill.engine.scheduler.blocks.usage().used == 0)
    assert decode.engine.scheduler.blocks.usage().used == 0


def test_a_prefill_server_that_is_gone_costs_time_and_no_answers(folder, both):
    with live_server.live(folder, role="prefill", **SETTINGS) as gone:
        url = gone.url
    with live_server.live(folder, role="decode", prefill_urls=[url], **ASKS, **SETTINGS) as alone:
        assert asked(alone) == asked(both)
        assert asked(alone, n=2, temperature=1.0) == asked(both, n=2, temperature=1.0)
        assert counted(alone) == (0, 3)
        text = alone.http.get("/metrics").text
        assert 'cairn_fallback_prompts_total{model="tiny"} 3' in text


def test_engines_in_processes_and_the_death_of_one(folder, both):
    """`cairn serve --role prefill` as a process of its own, killed while the decode server goes on.

    Both have their engines in worker processes, as on a GPU.
    """
    command = [
        sys.executable, "-m", "cairn", "serve", str(folder), "--role", "prefill", "--port", "0", "--dtype", "float32",
        "--device", "cpu", "--num-gpu-blocks-override", "64", "--served-model-name", "tiny",
        "--engine-in", "process", "--max-num-batched-tokens", "32",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = (re.search(r"tiny at (http://\S+)", line) for line in process.stderr)
            url = next(match[1] for match in said if match)
            roles = {"role": "decode", "prefill_urls": [url], "admin_endpoints": True, **ASKS}
            with live_server.live(folder, engine_in="process", **roles, **SETTINGS) as alone:
                assert asked(alone) == asked(both)
                assert asked(alone, LONG[1:]) == asked(both, LONG[1:])
                live_server.wait_until(lambda: counted(alone) == (2, 0))
                process.kill()
                process.wait()
                assert asked(alone, LONG[2:]) == asked(both, LONG[2:])
                live_server.wait_until(lambda: counted(alone) == (2, 1))
                assert alone.http.post("/cairn/role", json={"role": "prefill"}).status_code == 200
                assert alone.http.post("/cairn/role", json={"role": "both"}).status_code == 200
                assert asked(alone, LONG[3:]) == asked(both, LONG[3:])
        finally:
            process.kill()


def test_pages_that_never_arrive_are_computed_here(both, decode, monkeypatch):
    """The prefill server answers, and its pages cannot be read."""
    offer = msgspec.structs.replace
    post = decode.engine._client._post

    def elsewhere(url, body):
        found = post(url, body)
        lost = offer(found.offer, addresses=["tcp:127.0.0.1:1"])
        return offer(found, offer=lost)

    monkeypatch.setattr(decode.engine._client, "_post", elsewhere)
    before = counted(decode)
    assert asked(decode) == asked(both)
    assert counted(decode) == (before[0] + 1, before[1] + 1)


def test_each_role_says_what_it_is_for(decode, prefill, both):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    refused = prefill.http.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "wrong_role")
    for server in (decode, both):
        assert server.http.post("/cairn/prefill", content=b"").status_code == 404
    assert prefill.http.post("/cairn/prefill", content=b"\x01").status_code == 400
    assert prefill.http.get("/health").status_code == 200


def test_roles_change_while_the_servers_run(folder, both):
    """Two servers that do both become a pair, change places and part again; nobody gets another token."""
    with (
        live_server.live(folder, admin_endpoints=True, **ASKS, **SETTINGS) as one,
        live_server.live(
            folder, admin_endpoints=True, prefill_urls=[one.url], **ASKS, **SETTINGS
        ) as other,
    ):
        one.service.prefill_urls = (other.url,)  # not known before it was started
        expected = asked(both)

        def become(server, role, *urls, **more):
            body = {"role": role, "prefill_urls": urls, **more}
            return server.http.post("/cairn/role", json=body)

        for prefill, decode in ((one, other), (other, one)):
            assert asked(prefill) == asked(decode) == expected
            assert become(prefill, "prefill").json()["role"] == "prefill"
            assert become(decode, "decode", prefill.url).status_code == 200
            before = counted(decode)
            assert asked(decode, LONG[1:]) == asked(both, LONG[1:])
            assert counted(decode) == (before[0] + 1, before[1])
            wrong = prefill.http.post("/v1/completions", json={"prompt": "a"})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "wrong_role")
            assert decode.http.post("/sleep").status_code == 409
            assert become(decode, "both").status_code == 200
            assert become(prefill, "both").status_code == 200
        body = {"prompt": LONG, "max_tokens": 200, "stream": True, "ignore_eos": True}
        with one.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            with one.held():  # it cannot end in time
                late = become(one, "prefill", timeout_s=0.05)
            assert (late.status_code, late.json()["error"]["code"]) == (409, "role_not_changed")
            assert "data: [DONE]" in list(lines)
        assert become(one, "decode").status_code == 409
        elsewhere = become(one, "decode", "http://127.0.0.1:1")
        assert elsewhere.json()["error"]["code"] == "unknown_prefill_url"
        one.service.serving.models["more"] = ServedModel("more", b"adapter 1;", 1)
        loaded = become(one, "prefill")
        assert (loaded.status_code, "more" in loaded.json()["error"]["message"]) == (409, True)
        assert asked(one) == expected
        assert one.http.post("/sleep").status_code == 200


def test_a_role_has_one_rank_and_only_who_may_ask_has_addresses(folder):
    urls = {"model": str(folder), "prefill_urls": ["http://127.0.0.1:1"]}
    with pytest.raises(ConfigError, match="prefill_urls has 1"):
        ServerConfig(**urls)
    assert ServerConfig(admin_endpoints=True, **urls).separation is None
    with pytest.raises(ConfigError, match="role is prefill, and tensor_parallel_size is 2"):
        ServerConfig(model=str(folder), role="prefill", tensor_parallel_size=2)
