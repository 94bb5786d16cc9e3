"""The same ledger when the engine runs in a process of its own: its stamps and its steps cross the border."""

import json
import threading

import live_server
import pytest
from test_ledger import LINE, SAID, check, ledger_of

from cairn.serve.engine.step_times import NOTHING


@pytest.fixture(scope="module")
def apart(tiny_folder):
    with live_server.live(tiny_folder, engine_in="process") as made:
        yield made


def ask(server, id, **more):
    body = {
        "model": "tiny",
        "messages": SAID,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    } | more
    return server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": id})


def test_the_stamps_of_the_engine_arrive(apart):
    answer = ask(apart, "one", ledger=True)
    told = check(answer.json()["cairn_ledger"])
    assert (told["status"], told["output_tokens"], told["steps"]) == ("length", 24, 24)
    check(ledger_of(apart, "one"))
    ledger = apart.service.book.find("one").ledger
    assert ledger.decode.steps == 23
    assert ledger.prefill.device > 0
    assert ask(apart, "again", ledger=True).json()["cairn_ledger"]["cached_tokens"] > 0


def test_a_stop_string_leaves_a_whole_ledger(apart):
    """The end of such a request is decided here, and nobody waits for the engine's own words about it."""
    text = ask(apart, "long").json()["choices"][0]["message"]["content"]
    answer = ask(apart, "stopped", stop=[text[6:8]], ledger=True).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    view = check(answer["cairn_ledger"])
    assert view["status"] == "stop"
    assert view["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert apart.service.book.find("stopped").ledger.prefill != NOTHING


def test_the_engine_shows_itself_while_somebody_looks(apart):
    ask(apart, "shown")
    seen = {}

    def fresh():
        seen.update(apart.http.get("/cairn/engine").json())
        return seen["pages"]["map"] and seen["recent"] and not seen["running"]

    live_server.wait_until(fresh)
    assert len(seen["pages"]["map"]) == seen["pages"]["total"] == 256
    assert seen["steps"] >= len(seen["recent"]) > 0
    numbers = [step["number"] for step in seen["recent"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert seen["pages"]["map"].count("c") == seen["pages"]["cached"]
    events = apart.http.get("/cairn/requests/shown/trace").json()["traceEvents"]
    assert any(event["name"].startswith("step ") for event in events)


def test_the_model_card_comes_from_the_process(apart):
    card = apart.http.get("/cairn/model").json()
    assert card["device"].startswith("cpu")
    assert card["dtype"] == "float32"
    assert card["weights_bytes"] >= 4 * card["parameters"]


def test_a_request_whose_engine_dies(apart):
    """Last, because the engine has to start again behind it."""
    answers = []

    def long():
        answers.append(ask(apart, "orphan", max_tokens=120))

    thread = threading.Thread(target=long)
    thread.start()
    entry = None

    def begun():
        nonlocal entry
        entry = apart.service.book.find("orphan")
        return entry is not None and entry.first

    live_server.wait_until(begun)
    apart.service.serving.engine.client._group.processes[0].kill()
    thread.join()
    assert answers[0].status_code == 503
    view = ledger_of(apart, "orphan")
    assert view["status"] == "error"
    names = [span["name"] for span in view["spans"] if not span["summed"]]
    assert names[:4] == LINE[:4]  # it had begun, and that much was known
    check(json.loads(json.dumps(view)), phases=len(names))
