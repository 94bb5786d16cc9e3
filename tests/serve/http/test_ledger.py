"""Where the time of a request went: for every way to ask, and every way to end, the parts make the whole."""

import json
import socket
import threading
import time

import httpx
import live_server
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.ledger.floor import Floors, KnownCeilings
from cairn.serve.http.ledger.recent_ledgers import RecentLedgers, percentiles
from cairn.serve.http.ledger.views import RequestView
from cairn.serve.http.server.keys import Keys
from cairn.serve.serving import GenerateRequest

SAID = [{"role": "user", "content": "the secret word is xylophone"}]
ASKS = {
    "/v1/chat/completions": {"model": "tiny", "messages": SAID, "max_tokens": 8},
    "/v1/completions": {"model": "tiny", "prompt": "the secret word is xylophone", "max_tokens": 8},
    "/v1/messages": {"model": "tiny", "messages": SAID, "max_tokens": 8},
    "/v1/responses": {
        "model": "tiny",
        "input": "the secret word is xylophone",
        "max_output_tokens": 8,
    },
}
LINE = ["tokenize", "queue", "schedule", "prefill", "decode", "respond"]
MICROSECOND = 1e-6  # what the numbers are rounded to


def check(view, phases=6):
    """The parts follow one another, and make the whole as exactly as they are written."""
    spans = view["spans"]
    line = [span for span in spans if not span["summed"]]
    assert [span["name"] for span in line] == LINE[:phases]
    at = 0.0
    for span in line:
        assert span["start_s"] == pytest.approx(at, abs=2 * len(line) * MICROSECOND)
        assert span["seconds"] >= 0
        at += span["seconds"]
    assert at == pytest.approx(view["e2e_s"], abs=2 * len(line) * MICROSECOND)
    for span in spans:
        if span["summed"]:
            assert span["name"] in ("kv_allocation", "detokenize", "stream")
            assert 0 < span["seconds"] <= view["e2e_s"]
    if view["ttft_s"] is not None:
        assert 0 < view["ttft_s"] <= view["e2e_s"]
    return view


def ledger_of(server, id):
    live_server.wait_until(
        lambda: server.http.get(f"/cairn/requests/{id}").json()["status"] != "running"
    )
    return server.http.get(f"/cairn/requests/{id}").json()


@pytest.mark.parametrize("path", ASKS)
def test_a_whole_answer_says_it_in_a_header_and_in_a_field(server, path):
    answer = server.http.post(path, json={**ASKS[path], "ledger": True})
    assert answer.status_code == 200
    told = json.loads(answer.headers["x-cairn-ledger"])
    assert answer.json()["cairn_ledger"] == told
    assert told["id"] == answer.headers["x-request-id"]
    assert told["endpoint"] == path
    assert told["status"] in ("length", "stop")
    assert 1 <= told["output_tokens"] <= 8
    assert not told["streamed"]
    check(told)
    later = check(ledger_of(server, told["id"]))
    assert later["e2e_s"] >= told["e2e_s"]  # the way out is in it by now
    plain = server.http.post(path, json=ASKS[path])
    assert "x-cairn-ledger" not in plain.headers
    assert "cairn_ledger" not in plain.json()
    only = server.http.post(path, json=ASKS[path], headers={"x-cairn-ledger": "1"})
    assert "cairn_ledger" not in only.json()
    assert check(json.loads(only.headers["x-cairn-ledger"]))["cached_tokens"] > 0


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("way", ["header", "field"])
def test_a_stream_says_it_in_a_comment(server, path, way):
    body = {**ASKS[path], "stream": True} | ({"ledger": True} if way == "field" else {})
    headers = {"x-cairn-ledger": "1"} if way == "header" else {}
    text = server.http.post(path, json=body, headers=headers).text
    comments = [line for line in text.split("\n") if line.startswith(":")]
    assert len(comments) == 1
    told = check(json.loads(comments[0].removeprefix(": cairn-ledger ")))
    assert told["streamed"]
    assert told["status"] in ("length", "stop")
    assert check(ledger_of(server, told["id"]))["output_tokens"] == told["output_tokens"]
    assert ":" not in {
        line[:1]
        for line in server.http.post(path, json={**ASKS[path], "stream": True}).text.split("\n")
    }


def test_real_clients_do_not_mind(server):
    """Those that ask for it on every request, streamed and whole."""
    wants = {"x-cairn-ledger": "1"}
    chunks = list(
        server.client.chat.completions.create(
            model="tiny",
            messages=SAID,
            max_tokens=6,
            stream=True,
            extra_headers=wants,
            extra_body={"ledger": True},
        )
    )
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    whole = server.client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=6, extra_body={"ledger": True}
    )
    assert whole.model_extra["cairn_ledger"]["output_tokens"] == whole.usage.completion_tokens
    events = list(
        server.client.responses.create(model="tiny", input="hi", stream=True, extra_headers=wants)
    )
    assert events[-1].type in ("response.completed", "response.incomplete")
    import anthropic  # a second and a half, which only the worker that has this file spends

    claude = anthropic.Anthropic(
        base_url=server.url, api_key="none", default_headers=wants, max_retries=0
    )
    with claude, claude.messages.stream(model="tiny", messages=SAID, max_tokens=6) as stream:
        assert stream.get_final_message().usage.output_tokens >= 1


def test_several_answers_are_one_request(server):
    body = {
        "model": "tiny",
        "prompt": ["ab", "the other"],
        "n": 2,
        "max_tokens": 5,
        "ledger": True,
        "ignore_eos": True,
    }
    told = server.http.post("/v1/completions", json=body).json()["cairn_ledger"]
    assert (told["answers"], told["output_tokens"]) == (4, 20)
    usage = server.http.post("/v1/completions", json=body).json()["usage"]
    assert told["prompt_tokens"] == usage["prompt_tokens"]
    check(told)


def test_a_wrong_wish_is_refused_by_name(server):
    for path, body in ASKS.items():
        answer = server.http.post(path, json={**body, "ledger": "loudly"})
        assert answer.status_code == 400
        assert "ledger" in answer.text


# -- every way to end -----------------------------------------------------------------------------


def leave(server, id, body, read):
    """Ask, read some of the answer, and go away."""
    address = httpx.URL(server.url)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(head.encode() + raw)
        if read:
            while b"data:" not in connection.recv(4096):
                pass
        else:
            live_server.wait_until(lambda: server.service.open)
            time.sleep(0.7)  # waiting has to be what took longest, also on a busy machine


def test_a_client_that_leaves_while_it_waits(server):
    with server.held():
        leave(server, "left-early", {"model": "tiny", "prompt": "abc", "max_tokens": 9}, read=False)
        view = ledger_of(server, "left-early")
    assert view["status"] == "abort"
    assert view["ttft_s"] is view["tpot_s"] is None
    check(view, phases=2)
    assert view["reason"] == "queue"


def test_a_client_that_leaves_while_it_reads(server, monkeypatch):
    step, taken, looked, lock = server.engine.step, [], [], threading.Lock()

    def three_steps():
        taken.append(step())
        with lock:  # a third step that comes late must not shut the gate behind this test
            if len(taken) == 3 and not looked:
                server.gate.clear()
        return taken[-1]

    monkeypatch.setattr(server.engine, "step", three_steps)
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 100, "stream": True, "ignore_eos": True}
    leave(server, "left-late", body, read=True)
    view = ledger_of(server, "left-late")
    with lock:
        looked.append(view)
        server.gate.set()
    assert view["status"] == "abort"
    assert 1 <= view["output_tokens"] <= 3
    assert view["ttft_s"] is not None
    # It was decoding, until it was not; the engine's word that it has ended may come in time, or not.
    ended = any(span["name"] == "respond" for span in view["spans"])
    check(view, phases=5 + ended)


def test_a_request_that_fails(server, monkeypatch):
    def broken(step):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(server.engine.runner, "launch", broken)
    answer = server.http.post(
        "/v1/completions", json=ASKS["/v1/completions"], headers={"x-request-id": "burnt"}
    )
    assert answer.status_code == 503
    view = ledger_of(server, "burnt")
    assert (view["status"], view["output_tokens"]) == ("error", 0)
    names = [span["name"] for span in view["spans"] if not span["summed"]]
    check(view, phases=len(names))


def test_a_request_that_misses_its_deadline(tiny_folder):
    with live_server.live(tiny_folder, first_token_deadline=0.2) as server:
        with server.held():
            answer = server.http.post(
                "/v1/completions", json=ASKS["/v1/completions"], headers={"x-request-id": "late"}
            )
            assert answer.status_code == 503
        view = check(ledger_of(server, "late"), phases=2)
        assert (view["status"], view["reason"]) == ("deadline", "queue")


def test_requests_that_are_preempted(tiny_folder):
    """Four that fit alone and not together."""
    with live_server.live(
        tiny_folder, num_gpu_blocks_override=10, enable_prefix_caching=False
    ) as server:

        def ask(at):
            body = {"model": "tiny", "prompt": [at + 5] * 20, "max_tokens": 70, "ignore_eos": True}
            assert server.http.post("/v1/completions", json=body).status_code == 200

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
        with server.held():
            [thread.start() for thread in threads]
            live_server.wait_until(lambda: len(server.service.open) == 4)
        [thread.join() for thread in threads]
        views = server.http.get("/cairn/requests").json()["requests"]
        assert len(views) == 4
        assert sum(view["preemptions"] for view in views) > 0
        assert {view["output_tokens"] for view in views} == {70}
        for view in views:
            check(view)
        seen = server.http.get("/cairn/engine").json()
        assert seen["preempted"] == sum(view["preemptions"] for view in views)
        assert (
            f'cairn_preempted_requests_total{{model="tiny"}} {seen["preempted"]}'
            in server.http.get("/metrics").text
        )


# -- what is kept ---------------------------------------------------------------------------------


class Kept(RecentLedgers):
    def __init__(self, most, server):
        super().__init__(
            Floors(
                server.service.serving.opened.spec, server.service.serving.facts, KnownCeilings()
            ),
            most,
        )


def some_jobs(server):
    request = GenerateRequest([5, 6], live_params())
    return server.service.serving.jobs([request], lambda job: None, streamed=True)


def test_the_oldest_are_forgotten_and_an_id_may_come_twice(server):
    book = Kept(3, server)
    jobs = some_jobs(server)
    entries = []
    for at, id in enumerate("abcab"):
        entries.append(book.begin(id, "/v1/completions", float(at + 1), jobs))
        assert book.find(id) is entries[-1]
        entries[-1].close("stop", at + 2.0)
        book.settle(entries[-1])
        book.settle(entries[-1])  # twice is fine
    assert len(book) == 3
    assert book.entries() == entries[:1:-1]
    assert [book.find(id) for id in "abc"] == [entries[3], entries[4], entries[2]]
    later = book.begin("c", "/v1/completions", 9.0, jobs)
    later.close("stop", 19.0)
    book.settle(later)
    assert book.entries("slowest", 1) == [later]
    assert book.find("c") is later


def live_params():
    from cairn.serve.engine.sampling_params import SamplingParams

    return SamplingParams(max_tokens=1)


def texts(thing, depth=0):
    """All strings that can be reached from an entry."""
    if isinstance(thing, str):
        return {thing}
    if depth > 4 or thing is None or isinstance(thing, int | float):
        return set()
    if isinstance(thing, dict):
        inside = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set):
        inside = list(thing)
    else:
        names = (
            getattr(thing, "__slots__", None)
            or getattr(thing, "__struct_fields__", None)
            or vars(thing)
        )
        inside = [getattr(thing, name) for name in names]
    return set().union(*(texts(one, depth + 1) for one in inside))


def test_an_entry_that_ended_holds_no_text_and_no_tokens(server):
    for path, body in ASKS.items():
        id = f"quiet{path.replace('/', '-')}"
        server.http.post(path, json=body, headers={"x-request-id": id})
        ledger_of(server, id)
        entry = server.service.book.find(id)
        said = {
            entry.key,
            entry.miss,
            entry.miss_text,
        }  # a key's name, a cause and its sentence: no words of a prompt
        assert texts(entry) == {id, path, entry.status} | said
        assert len(entry.jobs) == 0


def test_percentiles_are_values_that_were_there():
    found = percentiles([None, *range(100, 0, -1)])
    assert (found.p50, found.p90, found.p99, found.count) == (50, 90, 99, 100)
    assert percentiles([None]).p50 is None
    assert percentiles([7.0]).p99 == 7.0


# -- the documents of /cairn ----------------------------------------------------------------------


def test_lists_are_ordered_and_cut(server):
    for at in range(3):
        server.http.post(
            "/v1/completions", json=ASKS["/v1/completions"], headers={"x-request-id": f"order-{at}"}
        )
    newest = server.http.get("/cairn/requests?limit=2").json()["requests"]
    assert [view["id"] for view in newest] == ["order-2", "order-1"]
    slowest = server.http.get("/cairn/requests?order=slowest&limit=1000").json()["requests"]
    took = [view["e2e_s"] for view in slowest]
    assert took == sorted(took, reverse=True)


@pytest.mark.parametrize("path", [
    "/cairn/requests?order=odd", "/cairn/requests?limit=0", "/cairn/requests?limit=1001", "/cairn/requests?limit=1.5",
    "/cairn/requests?limit=", "/cairn/trace?seconds=nan", "/cairn/trace?seconds=-1", "/cairn/trace?seconds=1e9",
])  # fmt: skip
def test_wrong_questions_are_refused_by_name(server, path):
    answer = server.http.get(path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == path.partition("?")[2].partition("=")[0]
    assert error["param"] in error["message"]


def test_a_request_that_nobody_remembers(server):
    for path in ("/cairn/requests/none", "/cairn/requests/none/trace"):
        answer = server.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "request_not_found"


def test_a_running_request_is_shown_as_far_as_it_is(server):
    def ask():
        server.http.post(
            "/v1/completions", json=ASKS["/v1/completions"], headers={"x-request-id": "now"}
        )

    thread = threading.Thread(target=ask)
    with server.held():
        thread.start()
        live_server.wait_until(lambda: server.service.book.find("now"))
        view = server.http.get("/cairn/requests/now").json()
        assert (view["status"], view["e2e_s"], view["ttft_s"]) == ("running", None, None)
        assert [span["name"] for span in view["spans"]][-1] == "queue"
        assert server.http.get("/cairn/requests?limit=1").json()["requests"][0]["id"] == "now"
        assert server.http.get("/cairn/engine").json()["open_requests"] == 1
    thread.join()
    assert ledger_of(server, "now")["status"] in ("length", "stop")


def test_the_engine_as_it_is(server):
    server.http.post(
        "/v1/completions", json={**ASKS["/v1/completions"], "max_tokens": 40, "ignore_eos": True}
    )
    engine = server.service.serving.engine
    # What the page is told is a little old: on a busy machine it may be from before the request.
    live_server.wait_until(
        lambda: (
            server.http.get("/cairn/engine").json()["steps"] == engine.stats().steps
            and not engine.stats().running
        )
    )
    seen, stats = server.http.get("/cairn/engine").json(), engine.stats()
    assert seen["steps"] == stats.steps > 0
    pages = seen["pages"]
    assert pages["total"] == pages["used"] + pages["cached"] + pages["free"] == 256
    assert len(pages["map"]) == 256
    assert pages["map"].count("c") == pages["cached"]
    assert set(pages["map"]) <= set("c.")
    assert seen["drafts"] == {"runs": 0, "tokens": 0, "accepted": 0, "accepted_at": []}
    assert seen["prefix"] == {
        "looked_up_tokens": stats.prefix_tokens,
        "hit_tokens": stats.prefix_hits,
    }
    numbers = [step["number"] for step in seen["recent"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert 0 < len(numbers) <= 120
    for step in seen["recent"]:
        parts = step["schedule_s"] + step["launch_s"] + step["wait_s"] + step["update_s"]
        assert step["total_s"] == pytest.approx(parts, abs=1e-6)
        assert step["floor_s"] is None or (
            step["floor_s"] > 0 and step["limited_by"] in ("memory", "compute")
        )
    assert seen["latency"]["e2e_s"]["count"] == len(server.service.book)


def test_events_come_until_the_client_leaves(server):
    with server.http.stream("GET", "/cairn/engine/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = []
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 2:
                break
    assert events[1]["time"] > events[0]["time"]
    assert set(events[0]) == set(server.http.get("/cairn/engine").json())


def test_watching_does_not_keep_a_server_from_stopping(tiny_folder):
    seen = []

    def watch(url):
        with httpx.stream(
            "GET", f"{url}/cairn/engine/events", timeout=live_server.PATIENCE_S
        ) as answer:
            for line in answer.iter_lines():
                seen.append(line)
        seen.append("the end")

    with live_server.live(tiny_folder) as server:
        thread = threading.Thread(target=watch, args=(server.url,))
        thread.start()
        live_server.wait_until(lambda: seen)
    thread.join(live_server.PATIENCE_S)
    assert seen[-1] == "the end"  # and `close` has seen the server end


def test_the_model_card(server, tiny_folder):
    card = server.http.get("/cairn/model").json()
    spec = server.service.serving.opened.spec
    assert card["names"] == ["tiny"]
    assert (card["family"], card["layers"], card["heads"], card["kv_heads"]) == ("llama", 2, 4, 2)
    assert card["parameters"] == spec.parameters()
    assert card["weights_bytes"] >= 4 * spec.parameters()
    assert (card["pages"], card["page_size"]) == (256, 16)
    assert card["notes"]
    assert str(tiny_folder) not in json.dumps(card)  # where it lies is nobody's business


def test_all_of_it_needs_the_key(tiny_folder):
    with live_server.live(tiny_folder, Keys([("me", "secret")])) as server:
        for path in (
            "engine",
            "engine/events",
            "requests",
            "requests/x",
            "requests/x/trace",
            "trace",
            "model",
        ):
            assert server.http.get(f"/cairn/{path}").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert server.http.get("/cairn/requests", headers=key).json() == {"requests": []}


# -- for other tools ------------------------------------------------------------------------------


def test_a_trace_has_the_request_its_phases_and_the_steps_around_it(server):
    body = {**ASKS["/v1/completions"], "max_tokens": 5, "ignore_eos": True}
    server.http.post("/v1/completions", json=body, headers={"x-request-id": "drawn"})
    view = ledger_of(server, "drawn")
    answer = server.http.get("/cairn/requests/drawn/trace")
    assert "cairn-drawn.json" in answer.headers["content-disposition"]
    events = answer.json()["traceEvents"]
    names = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    assert set(names) == {"engine", "request drawn"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    mine = {event["name"]: event for event in spans if event["pid"] == names["request drawn"]}
    for span in view["spans"]:
        assert mine[span["name"]]["dur"] == pytest.approx(span["seconds"] * 1e6, abs=2)
    steps = [event for event in spans if event["name"].startswith("step ")]
    assert len(steps) == 5
    whole = next(event for name, event in mine.items() if name.startswith("/v1/completions"))
    for step in steps:
        assert whole["ts"] <= step["ts"] + 1000
        assert step["ts"] + step["dur"] <= whole["ts"] + whole["dur"] + 1000
    recent = server.http.get("/cairn/trace?seconds=600").json()["traceEvents"]
    assert "request drawn" in {event["args"].get("name") for event in recent}


def test_metrics_have_a_histogram_of_each_phase(tiny_folder):
    with live_server.live(tiny_folder) as server:
        for path, body in ASKS.items():
            server.http.post(path, json=body)
            server.http.post(path, json={**body, "stream": True})
        live_server.wait_until(lambda: len(server.service.book) == 8)
        text = server.http.get("/metrics").text
        families = {family.name for family in text_string_to_metric_families(text)}
        assert "cairn_request_phase_seconds" in families
        for phase in (*LINE, "kv_allocation", "detokenize", "stream"):
            assert f'cairn_request_phase_seconds_count{{model="tiny",phase="{phase}"}} 8' in text
        assert "cairn_prefix_found_tokens_total" in text
        device = 'cairn_engine_seconds_total{model="tiny",part="device"} '
        assert float(text.partition(device)[2].partition("\n")[0]) > 0


def test_a_view_is_what_the_document_says(server):
    entry = Entry(
        "x",
        "/v1/completions",
        1.0,
        some_jobs(server),
    )
    view = server.service.book.view(entry)
    assert isinstance(view, RequestView)
    assert (view.prompt_tokens, view.status, view.steps) == (2, "running", 0)
