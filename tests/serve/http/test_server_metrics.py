"""What /metrics counts, read by Prometheus' own parser: prompts once, answers each, times of each answer alone."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "Once upon a time there was a stone that wanted to be a mountain, and so on and on"


class Counted:
    """How much each sample has grown since this was made."""

    def __init__(self, server):
        self._server = server
        self._before = self._read()

    def _read(self):
        families = text_string_to_metric_families(self._server.http.get("/metrics").text)
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name, **labels):
        key = (name, *sorted((labels | {"model": "tiny"}).items()))
        return self._read()[key] - self._before.get(key, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_several_prompts(server, stream):
    asked = dict(prompt=[f"{stream}: {PROMPT}", "Twice"], n=3, max_tokens=5, stream=stream)
    sizes = [len(server.service.tokenizer.encode(prompt)) for prompt in asked["prompt"]]
    for cached in (0, 1):
        counted = Counted(server)
        body = {**asked, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        server.at_rest()
        assert counted("cairn_prompt_tokens_total") == sum(sizes)
        assert counted("cairn_generated_tokens_total") == 2 * 3 * 5
        assert counted("cairn_finished_requests_total", reason="length") == 6
        assert counted("cairn_request_seconds_count") == 6
        assert counted("cairn_time_to_first_token_seconds_count") == 1
        assert counted("cairn_time_per_output_token_seconds_count") == 6
        found = counted("cairn_cached_prompt_tokens_total")
        assert (0 < found < sum(sizes)) if cached else found == 0
        if not stream:
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == sum(sizes)
            assert usage["prompt_tokens_details"]["cached_tokens"] == found


def test_an_answer_that_nobody_waits_for_is_counted_as_far_as_it_came(server):
    counted, before = Counted(server), server.service.serving.engine.stats()
    body = {"prompt": f"Left: {PROMPT}", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    server.at_rest()
    prompt = len(server.service.tokenizer.encode(body["prompt"]))
    assert counted("cairn_prompt_tokens_total") == prompt
    made = server.service.serving.engine.stats().output_tokens - before.output_tokens
    assert 0 < counted("cairn_generated_tokens_total") <= made
    assert counted("cairn_finished_requests_total", reason="abort" if made < 60 else "length") == 1


def test_time_per_token_counts_from_the_first_token_of_each_answer(server, monkeypatch):
    """The engine pauses between the answers: the second begins late, and none is slow."""
    step, pause, took = server.engine.step, threading.Event(), 1.0

    ended = [False]

    def paused():
        if ended[0]:
            pause.wait(took)
        outputs = step()
        ended[0] = any(output.finished for output in outputs)
        return outputs

    monkeypatch.setattr(server.engine, "step", paused)
    counted = Counted(server)
    body = dict(
        prompt=PROMPT, max_tokens=4, n=12, ignore_eos=True, stream=True
    )  # 8 rows: four come later
    assert server.http.post("/v1/completions", json=body).status_code == 200
    server.at_rest()
    assert counted("cairn_time_per_output_token_seconds_count") == 12
    assert counted("cairn_time_per_output_token_seconds_sum") < took


def test_routers_of_vllm_find_the_metrics_that_they_read(server):
    body = {"prompt": "Once upon a time", "max_tokens": 2}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    server.at_rest()
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    found = {one.name: one for one in families if one.name.startswith("vllm:")}
    model = server.service.model
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        (sample,) = found[f"vllm:{name}"].samples
        assert (sample.labels["model_name"], sample.value) == (model, 0)
    (sample,) = found["vllm:cache_config_info"].samples
    assert int(sample.labels["block_size"]) == server.service.serving.limits.page_size
    (asked,) = found["vllm:prefix_cache_queries"].samples
    assert asked.value >= found["vllm:prefix_cache_hits"].samples[0].value
    assert asked.value > 0
