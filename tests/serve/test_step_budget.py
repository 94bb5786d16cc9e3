"""How large a step may be that others wait for."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch

from cairn.models.presets import preset
from cairn.serve.engine.adapters import Adapters
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.runner import Landed
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step_budget import (
    FIRST_TOKENS,
    Pace,
    matmul_rate,
    mixed_step_tokens,
    tokens_within,
)

H200 = 676e12


def test_the_budget_follows_the_size_of_the_model():
    within = {
        name: tokens_within(0.025, H200, preset(name), rows=256, step_tokens=4096)
        for name in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b")
    }
    # A step of 1,024 tokens of the 8B model takes 25 ms; the smallest computes 4,096 in less.
    assert within == {"qwen3-0.6b": 0, "qwen3-1.7b": 0, "qwen3-8b": 1024, "qwen3-32b": 384}


def test_all_rows_decode_and_a_prompt_still_comes_on():
    tokens = tokens_within(0.001, H200, preset("qwen3-32b"), rows=300, step_tokens=4096)
    assert tokens == 384 + 128


def test_a_rate_is_measured_or_the_vendors_or_not_known(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))  # nothing was measured
    assert matmul_rate("NVIDIA H200", "bf16") == 0.7 * 989.4e12
    assert matmul_rate("NVIDIA H200", "fp128") is None
    assert matmul_rate("a GPU of tomorrow", "bf16") is None


def test_there_is_no_limit_on_a_cpu_or_where_none_is_asked_for():
    spec, weight = preset("tiny"), torch.empty(1)
    assert mixed_step_tokens(spec, weight, 1, 25.0, 8, 64) == 0


def test_a_cpu_s_pace_is_what_its_steps_took():
    pace = Pace(0.25)
    assert pace.tokens() == FIRST_TOKENS
    pace.note(8, 5.0)  # decoding tells nothing about prompts
    assert pace.tokens() == FIRST_TOKENS
    for _ in range(20):
        pace.note(200, 1.0)
    assert pace.tokens() == 64  # 50 would fit, and be no faster
    for _ in range(20):
        pace.note(500, 0.5)
    assert 240 <= pace.tokens() <= 250


def test_a_long_prompt_does_not_keep_the_others_waiting():
    """On a device of 500 tokens/s: those that decode get a token every quarter of a second, and the prompt ends."""
    now = [0.0]

    class Slow:
        device = torch.device("cpu")
        adapters = Adapters(cast(Any, None))

        def launch(self, step):
            now[0] += step.tokens / 500
            return SimpleNamespace(step=step, land=lambda: Landed([5] * len(step.sampling), {}, {}))

    limits = Limits(rows=8, step_tokens=2048, context=4096, pages=999, page_size=16, vocabulary=9)
    gaps = {}
    for pace in (None, Pace(0.25)):
        now[0] = 0.0
        engine = Engine(
            Scheduler(limits), cast(Any, Slow()), overlap=False, pace=pace, clock=lambda: now[0]
        )
        engine.add(Request("short", [1] * 10, SamplingParams(max_tokens=40)))
        for _ in range(3):
            engine.step()
        long = Request("long", [2] * 2000, SamplingParams(max_tokens=2))
        engine.add(long)
        heard = [now[0]]
        while engine.has_work:
            heard += [now[0] for output in engine.step() if output.request.id == "short"]
        gaps[pace] = max(later - earlier for earlier, later in pairwise(heard))
        assert long.finish == "length"
        assert now[0] < 4.3  # as long as without the limit
    without, limited = gaps.values()
    assert without > 3.9
    assert limited < 0.6  # the first is a guess: 256 tokens
