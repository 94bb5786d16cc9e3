"""Clients that leave at any moment leave nothing behind, and one that does not read costs nobody but itself.

With CAIRN_LONG=1 the first tests take 10,000 clients instead of some hundreds.
"""

import asyncio
import gc
import json
import os
import socket

import httpx
import leaving_clients
import live_server
import paced_tiny
import pytest
from live_server import wait_until

LONG = os.environ.get("CAIRN_LONG") == "1"
MANY = 10_000 if LONG else 400
pytestmark = pytest.mark.timeout(1800 if LONG else 120)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def tasks(loop):
    async def count():
        return len(asyncio.all_tasks()) - 1  # this one

    return asyncio.run_coroutine_threadsafe(count(), loop).result(30)


class Start:
    """What there was before, to be found again."""

    def __init__(self, service, loop):
        gc.collect()
        self.service, self.loop = service, loop
        self.tasks, self.files = tasks(loop), open_files()

    def found_again(self):
        service = self.service
        wait_until(lambda: not service.open)
        assert service.admission.inside == service.admission.waiting == 0
        assert not service.admission._at_once
        wait_until(lambda: tasks(self.loop) == self.tasks)
        wait_until(lambda: open_files() <= self.files)


def check_statuses(seen):
    said = {status for status in seen if status.startswith("HTTP/1.1")}
    assert "HTTP/1.1 200 OK" in said
    assert not any(" 500 " in status for status in said), seen
    assert seen["end"] > 0
    assert seen["middle"] > 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to count open files")
def test_nothing_is_left_of_clients_that_leave(tiny_folder):
    with paced_tiny.paced(tiny_folder, rows=16, step_s=0.0005) as server:
        engine = server.engine
        asyncio.run(leaving_clients.come_and_go(server.port, 20, seed=1))
        wait_until(lambda: not server.service.open and not engine.has_work)
        start = Start(server.service, server.loop)
        check_statuses(asyncio.run(leaving_clients.come_and_go(server.port, MANY, seed=2)))
        start.found_again()
        wait_until(lambda: not engine.has_work)
        engine.scheduler.queues.check_integrity()
        assert engine.scheduler.blocks.usage().used == 0
        assert sorted(engine.scheduler.queues.free_rows) == list(range(16))
        wait_until(lambda: not server.service.serving.engine._jobs)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to count open files")
def test_nothing_is_left_of_them_in_the_engines_process_either(tiny_folder):
    with live_server.live(tiny_folder, engine_in="process", max_num_seqs=16) as server:
        port = int(server.url.rpartition(":")[2])
        processes = server.service.serving.engine
        asyncio.run(leaving_clients.come_and_go(port, 20, seed=1))
        wait_until(lambda: not server.service.open and not processes.client._receivers)
        start = Start(server.service, server.server._loop)
        count = MANY if LONG else 100
        check_statuses(asyncio.run(leaving_clients.come_and_go(port, count, seed=3)))
        start.found_again()
        wait_until(lambda: not processes._open and not processes.client._receivers)
        wait_until(lambda: _at_rest(processes.stats()))


def _at_rest(stats):
    """As the last beat of the worker says."""
    return stats.running == stats.waiting == stats.pages_used == 0


@pytest.fixture
def deaf(request):
    """A server with a client that never reads, and the server's end of its connection, whose own buffers are small."""
    tokens, settings = 8_000, getattr(request, "param", {})  # many times what all buffers hold
    folder = request.getfixturevalue("tiny_folder")
    with paced_tiny.paced(folder, rows=4, step_s=0.0001, context=tokens + 64, **settings) as server:
        client = leaving_clients.deaf(server.port, tokens)
        wait_until(lambda: server.service.open)
        (exchange,) = server.service.open
        transport = exchange._call.send.__self__.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server, client, exchange, transport
        client.close()
        wait_until(lambda: not server.service.open and not server.engine.has_work)


def test_a_client_that_never_reads_costs_no_memory_and_slows_nobody_down(deaf):
    server, _, exchange, transport = deaf
    most, job = 0, exchange.jobs[0]
    while not job.answer.finished:
        most = max(most, transport.get_write_buffer_size())
        answer = httpx.post(
            f"{server.url}/v1/completions",
            timeout=30,
            json={"prompt": "Hi", "max_tokens": 4, "ignore_eos": True},
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
    most = max(most, transport.get_write_buffer_size())
    assert (
        len(job.answer.whole.token_ids) == job.max_tokens
    )  # it was made to its end, for whom it is
    assert 0 < most < 128 * 1024  # and waits there, not in buffers in front of the socket
    assert exchange in server.service.open


@pytest.mark.parametrize("deaf", [{"stall_timeout": 0.5}], indirect=True)
def test_a_client_that_reads_nothing_for_too_long_is_disconnected(deaf):
    server, _, _, _ = deaf
    wait_until(lambda: not server.service.open)


def test_a_slow_reader_gets_everything(deaf):
    _, client, exchange, _ = deaf
    wait_until(lambda: exchange.jobs[0].answer.finished)
    answer = b""
    while b"[DONE]" not in answer[-64:]:
        answer += client.recv(1 << 16)
    said = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in said)
    assert text == exchange.jobs[0].answer.result().text
    assert said[-1]["choices"][0]["finish_reason"] == "length"
