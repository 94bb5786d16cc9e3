"""Tokens, device-seconds and joules by key; why the prefix cache missed; budgets; `cairn top`."""

import asyncio
import importlib.util
import os
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import live_server
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudo_terminal import CTRL_C, Typed

from cairn.cli.main import main
from cairn.cli.top import HOME_AND_CLEAR, ORDINARY
from cairn.cli.top_screen import screen
from cairn.hw.energy import EnergyCounter
from cairn.hw.nvml import Nvml
from cairn.serve.http.ledger.meter import DAY_S, Advanced, Meter
from cairn.serve.http.ledger.prefix_history import CHUNK, PrefixHistory, sentence
from cairn.serve.http.server.keys import Keys
from cairn.serve.http.server.loop_lag import LoopLag

ENERGY = Path(__file__).parents[3] / "benchmarks" / "energy.py"
PAGE = 16
KEYS = Keys([("alice", "sk-test"), ("bob", "sk-bob")])


def tokens(seed, count):
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(count)]


# -- why the prefix cache missed --------------------------------------------------------------------


def test_two_hundred_scripted_misses_are_explained():
    """Each cause forty times, in a history of prompts that have nothing to do with it."""
    for case in range(200):
        history, prompt = PrefixHistory(PAGE), tokens(case, 150 + case)
        for other in range(5):
            history.add(tokens(1000 + 7 * case + other, 200), b"", 0.0)
        history.add(prompt, b"", 10.0)
        kind = case % 5
        at = PAGE + case % 100
        changed = [*prompt[:at], *[token + 1 for token in prompt[at:]]]
        script = {
            0: ("never seen", tokens(-1 - case, 180), b"", 0, None),
            1: ("evicted", prompt, b"", 0, None),
            2: ("changed", changed, b"", at // PAGE * PAGE, at),
            3: (
                "new text",
                [*prompt, *tokens(5000 + case, 90)],
                b"",
                len(prompt) // PAGE * PAGE,
                len(prompt),
            ),
            4: ("salt", prompt, b"other", 0, len(prompt)),
        }
        cause, asked, owner, cached, known = script[kind]
        miss = history.explain(asked, owner, cached, 42.0)
        assert miss.cause == cause, (case, cause, miss)
        if known is not None:
            assert miss.known == known
        if cause == "changed":
            assert miss.before[6] == prompt[at]
            assert miss.now[6] == changed[at]
            assert f"token {at}" in sentence(miss)
        if cause == "evicted":
            assert miss.age_s == 32.0


def test_an_explanation_is_quick_and_the_history_is_bounded():
    history = PrefixHistory(PAGE, prompts=64, tokens=40_000)
    prompts = [tokens(seed, 1000) for seed in range(100)]
    began = time.thread_time()
    for prompt in prompts:
        history.explain(prompt, b"", 0, 1.0)
        history.add(prompt, b"", 1.0)
    assert (time.thread_time() - began) / len(
        prompts
    ) < 2e-3  # 20 us when idle; slow machines are busy
    assert len(history._seen) == 40
    assert len(history._by_hash) == 40 * (1000 // CHUNK)


def test_a_hit_needs_no_reason():
    history = PrefixHistory(PAGE)
    assert history.explain(tokens(1, 33), b"", 32, 0.0).cause == "hit"


def test_short_prompts_and_those_of_the_same_moment_are_no_evictions():
    history = PrefixHistory(PAGE)
    assert history.explain(tokens(1, PAGE), b"", 0, 0.0).cause == "short"
    history.add(tokens(1, 40), b"", 10.0)
    twin = history.explain(tokens(1, 40), b"", 0, 11.0, arrived=9.0)
    assert twin.cause == "at once"
    assert "at the same time" in sentence(twin)
    assert history.explain(tokens(1, 40), b"", 0, 12.0, arrived=11.0).cause == "evicted"


# -- the meter --------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.floats(0, 1000),
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500)), max_size=5),
        ),
        max_size=30,
    )
)
def test_shares_add_up_to_what_was_measured(ticks):
    meter, billed = Meter(), [0.0, 0.0]

    def bill(seconds, joules):
        billed[0] += seconds
        billed[1] += joules

    for device_s, joules, advanced in ticks:
        meter.tick(device_s, joules, [Advanced(key, count, bill) for key, count in advanced])
    meter.tick(0.0, 0.0, [])
    device = sum(one.device_s for one in meter.keys.values())
    energy = sum(one.joules for one in meter.keys.values())
    assert device + meter.idle_s == pytest.approx(sum(tick[0] for tick in ticks))
    assert energy + meter.idle_joules == pytest.approx(sum(tick[1] for tick in ticks))
    assert billed == [pytest.approx(device), pytest.approx(energy)]


def test_a_long_prompt_is_billed_for_all_of_its_time():
    meter = Meter()
    for tokens in (0, 0, 900, 1):
        meter.tick(1.0, 10.0, [Advanced("a", tokens, lambda seconds, joules: None)])
    assert (meter.of("a").device_s, meter.of("a").joules, meter.idle_s) == (4.0, 40.0, 0.0)
    meter.tick(1.0, 10.0, [Advanced("b", 0, lambda seconds, joules: None)])  # it leaves without one
    meter.tick(1.0, 10.0, [])
    assert (meter.idle_s, meter.idle_joules) == (2.0, 20.0)


def test_a_budget_ends_with_the_day():
    meter = Meter(tokens_per_day=100)
    meter.count("a", 60, 0, 30, DAY_S * 5 + 10)
    assert meter.budget_left("a", DAY_S * 5 + 20) == 10
    meter.count("a", 60, 0, 30, DAY_S * 5 + 30)
    assert meter.budget_left("a", DAY_S * 5 + 40) == 0
    assert meter.budget_left("b", DAY_S * 5 + 40) == 100
    assert meter.budget_left("a", DAY_S * 6) == 100
    assert Meter().budget_left("a", 0.0) is None


def test_energy_is_the_counter_of_the_card_or_its_power_over_time():
    clock = iter([0.0, 2.0, 5.0])
    nvml = cards(lambda handle: 1_500 if handle == "card 1" else None)
    counter = EnergyCounter(nvml, ["GPU-1", "GPU-2"], lambda: next(clock))
    assert counter.joules() == 1.5 + 200.0
    assert counter.joules() == 1.5 + 500.0
    assert counter.watts() == 200.0


def test_energy_is_that_of_the_cards_that_were_named_whatever_their_place():
    """A process that sees one card of several calls it 0."""
    nvml = cards(lambda handle: 1_000 * int(handle[-1]))
    assert EnergyCounter(nvml, ["GPU-2"]).joules() == 2.0
    assert EnergyCounter(nvml, ["GPU-7"]).joules() is None


def cards(millijoules):
    """NVML of a machine with three cards of 100 W."""
    module = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle[-1]}",
        nvmlDeviceGetTotalEnergyConsumption=millijoules,
        nvmlDeviceGetPowerUsage=lambda handle: 100_000,
    )
    return Nvml(module)


def test_a_blocked_event_loop_shows_as_lag():
    async def block():
        lag = LoopLag(0.01)
        task = asyncio.create_task(lag.watch())
        await asyncio.sleep(0.03)
        time.sleep(0.15)
        await asyncio.sleep(0.03)
        task.cancel()
        return lag.worst_s

    assert asyncio.run(block()) > 0.1


# -- a server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metered(tiny_folder):
    with live_server.live(tiny_folder, KEYS, key_tokens_per_day=400, ledger_text=True) as made:
        yield made


def ask(server, key, prompt, **more):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        return client.completions.create(model="tiny", prompt=prompt, temperature=0, **more)


def test_tokens_of_keys_add_up_to_the_engines_totals(metered, capsys, monkeypatch):
    service = metered.service
    text = "Once upon a time there was a little engine that could read. " * 2
    for number in range(6):
        ask(
            metered,
            "sk-bob" if number % 2 else "sk-test",
            text[number % 3 :],
            max_tokens=4 + number,
        )
    wait = {"authorization": "Bearer sk-test"}
    live_server.wait_until(lambda: not service.book.running())
    live_server.wait_until(lambda: service.accounts._settled == [])
    usage = metered.http.get("/cairn/usage", headers=wait).json()
    keys = {one["key"]: one for one in usage["keys"]}
    assert set(keys) == {"alice", "bob"}
    computed = sum(one["prompt_tokens"] - one["cached_tokens"] for one in keys.values())
    assert computed == usage["engine_prompt_tokens"]
    assert sum(one["output_tokens"] for one in keys.values()) == usage["engine_output_tokens"]
    spent = sum(one["device_s"] for one in keys.values()) + usage["idle_device_s"]
    assert spent == pytest.approx(usage["engine_device_s"], rel=1e-3)
    views = metered.http.get("/cairn/requests", headers=wait).json()["requests"]
    assert {view["cache_miss"] for view in views} >= {"never seen", "new text"} - {"new text"}
    assert all(view["key"] in keys and view["text_of_miss"] for view in views)
    metrics = metered.http.get("/metrics", headers=wait).text
    assert re.search(r'cairn_key_tokens_total\{.*key="alice".*kind="output".*\}', metrics)
    assert "cairn_event_loop_lag_seconds" in metrics
    monkeypatch.setenv("CAIRN_API_KEY", "sk-test")
    assert main(["top", metered.url, "--once"]) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert len(drawn) <= 24
    assert max(map(len, drawn)) <= 80
    assert any(line.startswith("alice") for line in drawn)
    assert any("never seen" in line for line in drawn)


def test_the_benchmark_of_energy_finds_every_joule_again(tiny_folder, monkeypatch):
    """The card is simulated: it takes 100 W all the time."""
    spec = importlib.util.spec_from_file_location("energy", ENERGY)
    energy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(energy)
    monkeypatch.setattr(energy, "SIZES", ((8, 4), (40, 16)))
    monkeypatch.setattr(energy, "VOCABULARY", 200)
    monkeypatch.setattr("cairn.serve.http.server.service.TICK_S", 0.1)
    nvml = cards(lambda handle: time.monotonic() * 100_000)
    with live_server.live(tiny_folder) as server:
        accounts = server.service.accounts
        accounts._energy = EnergyCounter(nvml, ["GPU-0"])
        accounts._joules = accounts._energy.joules()
        found = energy.measured(server.url, 30, EnergyCounter(nvml, ["GPU-0"]), 1)
    assert found["joules_of_requests"] == pytest.approx(found["joules_of_keys"], rel=1e-3)
    assert found["keys_and_nobody_of_card"] == pytest.approx(1, abs=0.1)
    assert found["power_of_card"] == pytest.approx(1, abs=0.1)


def test_a_live_screen_fits_its_terminal_and_q_leaves_it_as_it_was(metered):
    environment = {**os.environ, "CAIRN_API_KEY": "sk-test", "TERM": "xterm"}
    command = [sys.executable, "-m", "cairn", "top", metered.url, "--every", "0.2"]
    for keys, status in (("xq", 0), (CTRL_C, 0)):
        with Typed(command, environment, (80, 24)) as shell:
            shell.expect(HOME_AND_CLEAR)
            drawn = shell.expect(HOME_AND_CLEAR).removesuffix(HOME_AND_CLEAR)
            shell.type(keys)
            assert shell.leave() == status
            assert shell.seen.endswith(ORDINARY)
        assert len(drawn.split("\r\n")) <= 24
        assert max(map(len, drawn.split("\r\n"))) <= 80
    with Typed([*command[:-1], "0.2"], environment, (100, 30)) as shell:
        shell.expect(HOME_AND_CLEAR)
        shell.process.terminate()
        assert shell.leave() == 143
        assert ORDINARY in shell.seen


def test_a_key_that_has_used_its_day_is_refused_and_others_are_not(metered):
    meter = metered.service.accounts.meter
    meter.budget_left("alice", time.time())  # the day has begun
    usage = meter.of("alice")
    usage.today_tokens = max(usage.today_tokens, 400)  # as if it had asked for more
    with pytest.raises(openai.RateLimitError, match="400 tokens in a day"):
        ask(metered, "sk-test", "Once upon a time there was a girl", max_tokens=32)
    ask(metered, "sk-bob", "Once", max_tokens=1)


def test_a_screen_fits_a_small_terminal():
    step = {"total_s": 0.02, "floor_s": 0.01, "limited_by": "memory"}
    percentiles = {"p50": 0.1234, "p99": 0.5678, "count": 3}
    engine = {
        "model": "m" * 50,
        "status": "ok",
        "running": 3,
        "waiting": 1,
        "preempted": 0,
        "rate": {"output_tokens_per_s": 12345.6, "prompt_tokens_per_s": 99999.0},
        "pages": {"used": 40, "cached": 30, "total": 100},
        "prefix": {"looked_up_tokens": 1000, "hit_tokens": 250},
        "batch": {"sequences": 3, "decode_tokens": 3, "prefill_tokens": 61, "budget_tokens": 512},
        "latency": {"ttft_s": percentiles, "itl_s": percentiles, "e2e_s": percentiles},
        "recent": [step] * 4,
    }
    key = {"key": "k", "requests": 1, "prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 7, "device_s": 0.5,
           "joules": 12.0, "today_left": 3}  # fmt: skip
    usage = {"keys": [key] * 30, "event_loop_lag_s": 0.004, "idle_joules": 1.0}
    request = {"id": "r" * 40, "status": "running", "prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 1,
               "ttft_s": None, "e2e_s": None, "reason": "queue"}  # fmt: skip
    lines = screen(engine, usage, [request] * 50, 80, 24)
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("mmm")
    assert lines[0].endswith("...  ok  3 running  1 waiting  0 preempted")
    assert lines[1].endswith("energy 0.4 kJ")
    assert "[############:::::::::.........]" in lines[2]
    assert any(
        line.endswith("a step takes 20ms, the hardware needs 10ms (bound by memory)")
        for line in lines
    )
    assert any(line.endswith("total 123ms/568ms") for line in lines)  # whole
    assert sum(line.startswith("r" * 24) for line in lines) >= 5
