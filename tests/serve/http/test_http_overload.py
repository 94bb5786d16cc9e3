"""Under load: refused at once with a time to come again, or answered; a client that leaves takes its requests along."""

import concurrent.futures
import contextlib
import random
import threading

import httpx
import live_server
import openai
import pytest
from live_server import wait_until

from cairn.serve.http.server import settings
from cairn.serve.http.server.keys import Keys

ASKED = dict(model="tiny", prompt="Once upon", max_tokens=6, temperature=0)
ASKED["extra_body"] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def small(tiny_folder):
    """Two at a time, and two more in line."""
    with live_server.live(
        tiny_folder, max_num_seqs=2, max_waiting=2, first_token_deadline=20.0
    ) as made:
        yield made
        made.at_rest()


def test_a_full_line_is_said_at_once_and_nobody_inside_is_lost(small):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        with small.held():
            inside = [pool.submit(small.client.completions.create, **ASKED) for _ in range(4)]
            wait_until(lambda: small.service.admission.inside == 4)
            for _ in range(20):
                with pytest.raises(openai.RateLimitError) as full:
                    small.client.completions.create(**ASKED)
                assert full.value.code == "queue_full"
                assert int(full.value.response.headers["retry-after"]) >= 1
            health = small.http.get("/health").json()
            assert health["status"] == "ok"
        texts = {future.result().choices[0].text for future in inside}
    assert len(texts) == 1
    small.at_rest()
    assert small.client.completions.create(**ASKED).choices[0].text in texts


def test_more_answers_than_ever_fit_is_a_mistake_and_not_a_wait(small):
    with pytest.raises(openai.BadRequestError, match="takes at most 4 at a time"):
        small.client.completions.create(**ASKED, n=5)


def test_many_clients_against_a_small_server(small):
    """Five times what fits: each is answered or told when to come again, and everything is given back."""

    def ask(_):
        with contextlib.suppress(openai.RateLimitError):
            return small.client.completions.create(**ASKED).choices[0].finish_reason
        return "refused"

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        ends = list(pool.map(ask, range(60)))
    assert set(ends) <= {"length", "refused"}
    assert "length" in ends
    small.at_rest()


def test_a_deadline_that_passes_is_a_503(tiny_folder):
    with live_server.live(tiny_folder, first_token_deadline=0.2) as server:
        with server.held(), pytest.raises(openai.APIStatusError) as late:
            server.client.completions.create(**ASKED)
        assert late.value.status_code == 503
        assert late.value.code == "deadline"
        assert "retry-after" in late.value.response.headers
        server.at_rest()


def test_the_deadline_counts_from_the_last_step_of_the_engine(tiny_folder):
    """A long answer before it takes longer than the deadline, and every step of it is progress."""
    with live_server.live(tiny_folder, first_token_deadline=2.0, max_num_seqs=1) as server:
        step, pause = server.engine.step, threading.Event()

        def slow():
            pause.wait(0.025)  # 120 of them take longer than the deadline
            return step()

        server.engine.step = slow
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            asked = [ASKED | {"max_tokens": 120}, ASKED]
            answers = [pool.submit(server.client.completions.create, **one) for one in asked]
            ends = [answer.result().choices[0].finish_reason for answer in answers]
        assert ends == ["length", "length"]
        server.at_rest()


def test_a_client_that_leaves_ends_its_request(server):
    body = dict(model="tiny", prompt="Once", max_tokens=150, ignore_eos=True, stream=True)
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.gate.clear()  # the rest of the answer is not made before the client has left
    with server.held():
        wait_until(lambda: not server.service.open)
    server.at_rest()
    assert server.engine.scheduler.running == 0


def test_a_client_that_leaves_before_the_answer_begins(server):
    with server.held():
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(
                "/v1/completions",
                json={"prompt": "Hi", "max_tokens": 100},
                timeout=live_server.reads_for(0.3),
            )
        wait_until(lambda: not server.service.open)
    server.at_rest()


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server):
    draw = random.Random(5)

    def come_and_go(lines):
        body = dict(prompt="Once", max_tokens=60, ignore_eos=True, stream=True, n=2)
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            for _ in zip(range(lines), response.iter_lines(), strict=False):
                pass

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(come_and_go, [draw.randrange(0, 100) for _ in range(48)]))
    server.at_rest()
    server.engine.scheduler.queues.check_integrity()
    assert not server.service.serving.engine._jobs


def test_a_request_that_takes_too_long_ends_with_what_it_has(tiny_folder):
    with live_server.live(tiny_folder, request_timeout=0.3) as server:
        step, pause = server.engine.step, threading.Event()

        def slow():
            pause.wait(0.01)  # 150 of them take longer than the request may
            return step()

        server.engine.step = slow
        answer = server.client.completions.create(**ASKED | {"max_tokens": 150}, stream=True)
        chunks = list(answer)
        assert chunks[-1].choices[0].finish_reason == "abort"
        assert 1 < len(chunks) < 150
        server.at_rest()


def test_an_engine_that_breaks_is_a_503_for_everybody(tiny_folder, caplog):
    with live_server.live(tiny_folder) as server:

        def broken():
            raise RuntimeError("the device fell off")

        server.engine.step = broken
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as dead:
                server.client.completions.create(**ASKED)
            assert dead.value.status_code == 503
        health = server.http.get("/health")
        assert (health.status_code, server.http.get("/live").status_code) == (503, 503)
        assert "fell off" in health.json()["reason"]
    said = [record for record in caplog.records if "fell off" in record.getMessage()]
    assert len(said) == 1


def test_an_engine_that_stands_still_is_not_healthy(tiny_folder):
    with live_server.live(tiny_folder, progress_timeout=1.0) as server:
        with server.held(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.client.completions.create, **ASKED)
            wait_until(lambda: server.http.get("/health").status_code == 503)
            assert server.http.get("/health").json()["status"] == "stalled"
            server.gate.set()
            assert waiting.result().choices[0].finish_reason == "length"
        assert server.http.get("/health").json()["status"] == "ok"


def test_an_engine_that_hangs_is_not_healthy_again_once_its_requests_are_refused(
    tiny_folder, monkeypatch
):
    monkeypatch.setattr(settings, "HANG", 1000)
    limits = dict(progress_timeout=0.2, first_token_deadline=0.5)
    body = dict(prompt="Once upon", max_tokens=6, ignore_eos=True)
    with live_server.live(tiny_folder, **limits) as server:
        with server.held():
            refused = server.http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline")
            wait_until(lambda: not server.service.open)
            for path in ("/health", "/live"):
                answer = server.http.get(path)
                assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
        wait_until(lambda: server.http.get("/health").status_code == 200)
        assert server.http.post("/v1/completions", json=body).status_code == 200


def test_keys_and_their_limits(tiny_folder):
    keys = Keys([("alice", "sk-test"), ("bob", "sk-other")])
    with live_server.live(
        tiny_folder, keys, key_requests_per_minute=3, max_body_bytes=2000
    ) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="sk-wrong").models.list()
        assert server.http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 401
        assert server.http.get("/health").status_code == 200
        for _ in range(3):
            server.client.completions.create(**ASKED)
        with pytest.raises(openai.RateLimitError, match="3 requests in a minute"):
            server.client.completions.create(**ASKED)
        server.client.with_options(api_key="sk-other").completions.create(**ASKED)
        other = {"x-api-key": "sk-other"}
        large = server.http.post("/v1/completions", json={"prompt": "x" * 3000}, headers=other)
        assert large.status_code == 413
        chunks = (b"x" * 500 for _ in range(8))
        assert server.http.post("/v1/completions", content=chunks, headers=other).status_code == 413
        assert server.http.get("/metrics").status_code == 401  # model names and traffic
        counts = server.http.get("/metrics", headers=other)
        assert counts.status_code == 200
        assert "sk-" not in counts.text
        server.at_rest()


def test_metrics_may_be_public_where_the_rest_needs_a_key(tiny_folder):
    keys = Keys([("alice", "sk-test")])
    with live_server.live(tiny_folder, keys, public_metrics=True) as server:
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/v1/models").status_code == 401
