"""How large a step may be that others wait for."""

import torch

from cairn.models.presets import preset
from cairn.serve.engine.step_budget import matmul_rate, mixed_step_tokens, tokens_within

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
