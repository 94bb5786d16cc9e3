"""The limit of a workload: held against a walk over all tokens, and against what is known of two published shapes."""

import pytest

from cairn.bench.limit import (
    Bytes,
    SequenceWork,
    decode_cost,
    limit,
    measure_ceiling,
    prefill_cost,
    step_cost,
    weights_read,
)
from cairn.bench.workload import WorkloadRequest, requests, totals
from cairn.kernels.tooling.measure import Ceiling
from cairn.models.cache import cache_bytes
from cairn.models.presets import preset

H200 = Ceiling(device="H200", bytes_per_s=4.3e12, flops_per_s={"bf16": 7.9e14})
CHOSEN = [WorkloadRequest([1] * 5, 4), WorkloadRequest([1] * 9, 1), WorkloadRequest([1] * 17, 7)]


SHAPES = ["tiny-qwen3", "tiny-gemma3", "tiny-gpt2", "tiny-qwen3-next", "tiny-deepseek"]


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_a_walk_over_all_tokens(shape):
    """Token by token, each with what the spec says that it costs; weights once a step."""
    spec = preset(shape)
    flops, kv, alive = 0, 0.0, [0] * 7
    for prompt, output, *_ in CHOSEN:
        for step in range(1, output):
            flops += spec.forward_flops(1, cached=len(prompt) + step - 1)
            kv += cache_bytes(spec, len(prompt) + step, 4)
            alive[step] += 1
    cost = decode_cost(spec, CHOSEN, Bytes(4, 4))
    assert cost.flops == flops
    weights = sum(weights_read(spec, rows) for rows in alive if rows)
    assert cost.bytes == pytest.approx(weights * 4 + kv)


def test_prefill_computes_every_prompt_and_the_logits_of_its_last_token():
    spec = preset("tiny-qwen3")
    cost = prefill_cost(spec, CHOSEN, Bytes(2, 2))
    assert cost.flops == sum(spec.forward_flops(len(p), logits=1) for p, *_ in CHOSEN)
    assert cost.bytes == spec.matmul_parameters() * 2 + sum(
        cache_bytes(spec, n, 2) for n in (5, 9, 17)
    )


def test_what_is_shared_is_computed_and_read_once():
    spec = preset("tiny-qwen3")
    head, tails = [1] * 32, [[2] * 8, [3] * 8, [4] * 8]
    shared = [WorkloadRequest(head + tail, 3, 32) for tail in tails]
    apart = [WorkloadRequest(head + tail, 3) for tail in tails]
    # What the two others save: the head's products and its own attention.
    saved = 2 * spec.forward_flops(32, logits=0)
    assert (
        prefill_cost(spec, apart, Bytes(2, 2)).flops - prefill_cost(spec, shared, Bytes(2, 2)).flops
        == saved
    )
    of_head = cache_bytes(spec, 32, 2)
    assert (
        prefill_cost(spec, apart, Bytes(2, 2)).bytes - prefill_cost(spec, shared, Bytes(2, 2)).bytes
        == 2 * of_head
    )
    assert (
        decode_cost(spec, apart, Bytes(2, 2)).bytes - decode_cost(spec, shared, Bytes(2, 2)).bytes
        == 2 * 2 * of_head
    )
    assert (
        decode_cost(spec, apart, Bytes(2, 2)).flops == decode_cost(spec, shared, Bytes(2, 2)).flops
    )


def test_experts_are_read_as_far_as_they_are_visited():
    spec = preset("tiny-moe")
    assert weights_read(spec, 1) == pytest.approx(spec.matmul_parameters())
    many = weights_read(spec, 1000)
    all_of_them = spec.parameters() - spec.active_parameters()
    assert many - weights_read(spec, 1) == pytest.approx(all_of_them)


def test_a_step_is_the_sum_of_its_sequences():
    spec = preset("tiny-llama")
    one, other = SequenceWork(1, 30), SequenceWork(12, 4, logits=0)
    both = step_cost(spec, [one, other], 2)
    apart = [step_cost(spec, [work], 2) for work in (one, other)]
    assert both.flops == sum(cost.flops for cost in apart)
    assert both.bytes == sum(cost.bytes for cost in apart) - spec.matmul_parameters() * 2


@pytest.mark.parametrize(
    ("shape", "name", "figure", "bound"),
    [
        ("qwen3-0.6b", "nano", 38_000, "memory"),
        ("qwen3-0.6b", "latency", 3_550, "memory"),
        ("qwen3-8b", "nano", 17_000, "memory"),
        ("qwen3-8b", "latency", 280, "memory"),
    ],
)
def test_known_limits_of_an_h200(shape, name, figure, bound):
    chosen = requests(name)
    found = limit(preset(shape), chosen, H200, "bf16", Bytes(2, 2))
    assert totals(chosen).output_tokens / found.seconds == pytest.approx(figure, rel=0.03)
    assert found.bound == bound


def test_prefill_is_bound_by_compute():
    chosen = requests("prefill")
    found = limit(preset("qwen3-0.6b"), chosen, H200, "bf16", Bytes(2, 2))
    assert totals(chosen).input_tokens / found.seconds == pytest.approx(708_000, rel=0.01)
    assert found.bound == "compute"


def test_the_ceiling_of_a_cpu():
    ceiling = measure_ceiling("cpu", "fp32", budget_ms=1)
    assert ceiling.device
    assert ceiling.bytes_per_s > 1e6
    assert ceiling.flops_per_s["fp32"] > 1e6


def test_without_a_rate_memory_is_the_limit():
    unknown = Ceiling(device="a CPU", bytes_per_s=1e10, flops_per_s={})
    found = limit(preset("tiny-qwen3"), CHOSEN, unknown, "fp16", Bytes(2, 2))
    assert (found.compute, found.bound, found.seconds) == (0, "memory", found.memory)


def test_quantised_weights_and_keys_are_counted_apart():
    spec = preset("qwen3-0.6b")
    both, weights = Bytes(2, 2), Bytes(1, 2)
    saved = decode_cost(spec, CHOSEN, both).bytes - decode_cost(spec, CHOSEN, weights).bytes
    steps = max(one.output for one in CHOSEN) - 1
    assert saved == steps * spec.matmul_parameters()
    keys = decode_cost(spec, CHOSEN, both).bytes - decode_cost(spec, CHOSEN, Bytes(2, 1)).bytes
    assert keys == decode_cost(spec, CHOSEN, Bytes(0, 1)).bytes
