"""Device failures at every point of a step: the documented status in the documented time, and never a wrong text.

Each case asks for four answers, lets the device fail meanwhile, and compares with the answers of an undisturbed engine:
a 200 has the same text, a stream that fails has a part of it, an error event and [DONE], anything else is a 503. The
default run takes a sample; HYPOTHESIS_PROFILE=thorough takes every point with every kind of failure.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_device import COLLECTIVES, KINDS, POINTS, Faults
from forked_workers import forked

from cairn.serve import engine_processes
from cairn.serve.http.server import service

sys.path.append(str(Path(__file__).parent / "http"))
import live_server

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
TIMES_S = 40.0  # in which every answer has come and the engine is back; seconds suffice on an idle machine
HANG_S = 1.0  # `progress_timeout`; the engine is given up after five times as long
PROMPT = "Once upon a time there was"
BASE = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 40}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "structured_outputs": {"regex": "[a-z]{60}"},
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/completions", {"prompt": PROMPT, "stream": True, "logprobs": 2}),
    "grammar": ("/v1/chat/completions", {**CHAT, "stream": True, "ignore_eos": False}),
    "whole": ("/v1/completions", {"prompt": f"{PROMPT} a", "prompt_logprobs": 1}),
    "drawn": ("/v1/completions", {"prompt": "Twice upon a time", "prompt_logprobs": 1, "temperature": 0.9, "seed": 7}),
}  # fmt: skip
CODES = ("engine_error", "engine_dead")


class Case(NamedTuple):
    """`ranks` 0: the engine runs in a thread of the server."""

    ranks: int
    point: str
    kind: str
    rank: int = 0  # on which the device fails


SAMPLE = [
    Case(0, "before sampling", "error"),
    Case(0, "landing", "memory"),
    Case(0, "after the copy", "hang"),
    Case(0, "mask of a grammar", "memory for ever"),
    Case(1, "landing", "error"),
    Case(1, "tokens kept", "memory"),
    Case(1, "before the layers", "hang"),
    Case(1, "launching", "error for ever"),
    Case(2, "after a sum", "error", 1),
    Case(2, "log-probabilities", "memory", 1),
    Case(2, "landed", "hang"),
]
EVERY = [
    *(Case(ranks, point, kind) for ranks in (0, 1) for point in POINTS for kind in KINDS),
    *(
        Case(2, point, kind, rank)
        for at, point in enumerate(POINTS | COLLECTIVES)
        for kind in KINDS
        for rank in ([0, 1] if point in COLLECTIVES else [at % 2])
    ),
]


class Answer(NamedTuple):
    status: int
    text: str
    code: str | None  # of an error
    done: bool


def ask(server: live_server.Live, name: str) -> Answer:
    path, more = REQUESTS[name]
    answer = server.http.post(path, json=BASE | more, timeout=TIMES_S)
    if answer.status_code != 200:
        return Answer(answer.status_code, "", answer.json()["error"]["code"], True)
    if not more.get("stream"):
        return Answer(200, answer.json()["choices"][0]["text"], None, True)
    text, code = "", None
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    for line in lines:
        event = {} if line == "[DONE]" else json.loads(line)
        if "error" in event:
            assert code is None
            code = event["error"]["code"]
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return Answer(200, text, code, lines[-1] == "[DONE]")


def ask_all(server: live_server.Live) -> dict[str, Answer]:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return dict(zip(REQUESTS, pool.map(lambda name: ask(server, name), REQUESTS), strict=True))


def check(answers: dict[str, Answer], texts: dict[str, str]) -> bool:
    """Whether one of them has failed; none may be wrong."""
    for name, answer in answers.items():
        assert answer.done, name
        if answer.code is None:
            assert answer.text == texts[name], name
        else:
            assert answer.code in CODES
            assert answer.status == 503 or texts[name].startswith(answer.text), name
    return any(answer.code is not None for answer in answers.values())


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMES_S
    while not true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def states(server: live_server.Live) -> tuple[str, int, int]:
    """What health says, with the statuses of both probes."""
    health, live = server.http.get("/health"), server.http.get("/live")
    return health.json()["status"], health.status_code, live.status_code


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return live_server.make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def texts(tiny_folder):
    """By name, from an engine that nothing happens to."""
    with live_server.live(tiny_folder) as server:
        answers = ask_all(server)
    assert all(answer.code is None and len(answer.text) > 10 for answer in answers.values())
    return {name: answer.text for name, answer in answers.items()}


def survives(case: Case) -> bool:
    """A step without room ends its own requests, unless other ranks wait for it."""
    return case.kind == "memory" and case.ranks < 2 and POINTS[case.point].on_device


@pytest.mark.parametrize("case", EVERY if THOROUGH else SAMPLE, ids=lambda c: "-".join(map(str, c)))
def test_failures_of_the_device(case, tiny_folder, texts, tmp_path, monkeypatch):
    faults = Faults(tmp_path, case.point, case.kind)
    monkeypatch.setattr(service, "DEATH_S", 0.5)
    settings: dict[str, Any] = {"progress_timeout": HANG_S} if case.kind == "hang" else {}
    if case.ranks:

        def prepare(boot):
            faults.hold_after_fault()
            if boot.rank == case.rank:
                faults.install()

        made = partial(engine_processes.EngineProcesses, spawn=forked(prepare))
        monkeypatch.setattr(engine_processes, "EngineProcesses", made)
        settings |= {"engine_in": "process", "tensor_parallel_size": case.ranks}
    else:
        faults.install(monkeypatch.setattr)
    with live_server.live(tiny_folder, **settings) as server:
        try:
            _fail_and_look(server, faults, case, texts)
        finally:
            faults.release()


def _fail_and_look(
    server: live_server.Live, faults: Faults, case: Case, texts: dict[str, str]
) -> None:
    assert not check(ask_all(server), texts)
    server.http.post("/reset_prefix_cache")
    faults.arm()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, server)
        if case.kind == "hang":
            wait_until(lambda: states(server)[0] != "ok")
        failed = check(asked.result(TIMES_S), texts)
    assert faults.fired
    assert failed
    if case.kind.endswith("for ever"):
        faults.release()
        _ask_until_dead(server, faults.point.asks, texts)
    elif survives(case):
        assert states(server) == ("ok", 200, 200)
        assert not check(ask_all(server), texts)
        return
    elif case.ranks:
        _ask_while_it_starts(server, faults, texts)
        return
    assert states(server) == ("dead", 503, 503)
    last = ask(server, "whole")
    assert (last.status, last.code) == (503, "engine_dead")
    server.thread.join(TIMES_S)
    assert not server.thread.is_alive()
    assert server.service.died is not None


def _ask_until_dead(server: live_server.Live, only: str | None, texts: dict[str, str]) -> None:
    deadline = time.monotonic() + TIMES_S
    while server.service.health().status != "dead":
        assert time.monotonic() < deadline, "it never ended"
        check({only: ask(server, only)} if only else ask_all(server), texts)


def _ask_while_it_starts(server: live_server.Live, faults: Faults, texts: dict[str, str]) -> None:
    """Requests wait for the next workers, and the event loop does not."""
    assert states(server) == ("starting", 503, 200)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, server)
        wait_until(lambda: len(server.service.open) == len(REQUESTS))
        assert states(server) == ("starting", 503, 200)
        faults.release()
        assert not check(asked.result(TIMES_S), texts)
    # Steps are reported with each beat of the workers, which may be as rare as `HANG_S`.
    wait_until(lambda: states(server) == ("ok", 200, 200))
