"""`cairn serve` as a process: it says where it is, answers, finishes what runs on SIGTERM, and leaves with 0."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

COMMAND = [sys.executable, "-m", "cairn", "serve"]
SETTINGS = [
    "--port",
    "0",
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--num-gpu-blocks-override",
    "64",
]


@pytest.fixture
def process(tiny_folder):
    command = [*COMMAND, str(tiny_folder), *SETTINGS, "--served-model-name", "tiny"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as made:
        yield made
        made.kill()


def address(process):
    for line in process.stderr:
        if found := re.search(r"tiny at (http://127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("it never said where it is")


def test_sigterm_lets_running_requests_finish(process):
    url = address(process)
    body = dict(model="tiny", prompt="Once", max_tokens=150, ignore_eos=True, stream=True)
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").json()["status"] == "ok"
        assert "<title>Cairn</title>" in client.get("/").text
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert process.wait(60) == 0
    assert "stopped" in process.stderr.read()


def test_requests_that_come_during_the_drain_are_told_so(process):
    """Those on connections that nobody has accepted yet when SIGTERM comes, and those on new ones."""
    url = address(process)
    host, port = httpx.URL(url).host, httpx.URL(url).port
    body = dict(prompt="Once", max_tokens=150, n=20, ignore_eos=True, stream=True)
    with (
        ExitStack() as connections,
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGSTOP)
        queued = [
            connections.enter_context(socket.create_connection((host, port), timeout=60))
            for _ in range(20)
        ]
        for one in queued:
            one.sendall(b"GET /v1/models HTTP/1.1\r\nhost: it\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert any("1 open requests have 30 s to finish" in line for line in process.stderr)
        health = httpx.get(f"{url}/health", timeout=60)
        for _ in range(100):  # uvicorn looks ten times a second whether it is to end
            refused = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) > 0
            if refused.headers.get("connection") == "close":
                break
        rest = [line for line in lines if line]
        first = [one.makefile("rb").readline() for one in queued]
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert refused.headers["connection"] == "close"
    assert all(line.startswith(b"HTTP/1.1 200") for line in first)
    assert rest[-1] == "data: [DONE]"
    assert process.wait(60) == 0


def test_an_idle_server_answers_what_has_come_when_it_is_stopped(process):
    url = address(process)
    host, port = httpx.URL(url).host, httpx.URL(url).port
    process.send_signal(signal.SIGSTOP)
    with ExitStack() as connections:
        queued = [
            connections.enter_context(socket.create_connection((host, port), timeout=60))
            for _ in range(100)
        ]
        for one in queued:
            one.sendall(b"GET /health HTTP/1.1\r\nhost: it\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        first = [one.makefile("rb").readline() for one in queued]
    assert all(re.match(rb"HTTP/1.1 (200|503) ", line) for line in first)
    assert process.wait(60) == 0


def test_a_second_ctrl_c_ends_what_runs_without_a_traceback(process):
    url = address(process)
    body = dict(prompt="Once", max_tokens=150, n=60, ignore_eos=True, stream=True)
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()  # held, since its end would be the client's leave
        next(lines)
        process.send_signal(signal.SIGINT)
        assert any("1 open requests have 30 s to finish" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.wait(60) == 0
    assert "stopped" in rest
    assert "Traceback" not in rest


LOST = """
import sys
import torch
from cairn.cli.main import main
from cairn.serve.engine.loop import Engine

def lost(engine, step=Engine.step):
    if engine.steps == 3:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return step(engine)

Engine.step = lost
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_whose_device_is_lost_says_so_and_ends_with_status_1(tiny_folder):
    """In a thread, where no process of the engine can be replaced."""
    command = [sys.executable, "-c", LOST, "serve", str(tiny_folder), *SETTINGS]
    body = dict(prompt="Once", max_tokens=150, ignore_eos=True, stream=True)
    with subprocess.Popen(
        [*command, "--served-model-name", "tiny"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            with httpx.Client(base_url=address(process), timeout=60) as client:
                events = client.post("/v1/completions", json=body).text.split()
                health, live = client.get("/health"), client.get("/live")
                refused = client.post("/v1/completions", json=body)
            said = process.stderr.read()
            assert process.wait(60) == 1
        finally:
            process.kill()
    assert events[-1] == "[DONE]"
    assert sum("illegal" in event for event in events) == 1
    assert (health.status_code, live.status_code) == (503, 503)
    assert health.json()["status"] == "dead"
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert "the engine is gone" in said
    assert "Traceback" not in said


def test_mistakes_are_said_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = subprocess.run(
            [*COMMAND, "random:tiny", "--port", port], capture_output=True, text=True
        )
    assert found.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in found.stderr
    assert "--port" in found.stderr
