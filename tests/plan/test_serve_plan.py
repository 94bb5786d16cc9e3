"""Planning a server: predictions beside our measurements, the engine's own rules, and sensible answers."""

import json
import math
from pathlib import Path

import msgspec
import pytest
from shared_data import packaged_chat_model

from cairn.core.errors import ConfigError
from cairn.models.cache import cache_bytes_per_token, cache_groups, most_pages
from cairn.models.presets import preset
from cairn.plan.device import device
from cairn.plan.measured import RECORDS, WORKLOADS, arrivals, median_error, serving
from cairn.plan.serve_cost import Served
from cairn.plan.serve_load import Traced, Workload, limits, requests, room, run
from cairn.plan.serve_plan import Demand, plan

H200 = device("h200")
QUANTIZED = Path(__file__).parent.parent / "quantized_checkpoints"
SMALL = Served(spec=preset("qwen3-0.6b"), device=H200)
ASKED = Demand(rate=10.0, input_tokens=200, output_tokens=20, slo_ttft=0.5, slo_tpot=0.05)


def test_our_measurements_of_serving_are_predicted():
    if not (RECORDS / "throughput.json").exists():
        pytest.skip(f"needs the records in {RECORDS}, which a wheel does not have")
    rows = serving(only="qwen3-8b")
    assert len(rows) >= 5
    assert (median_error(rows) or 1) <= 0.12
    # A row with drafts, or with another form of the weights, is no measurement of what is predicted.
    assert len({row.what for row in rows}) == len(rows)


def test_the_arrivals_are_those_that_were_measured():
    from cairn.bench.load_client import Target
    from cairn.bench.load_setup import LoadLevel, LoadSetup, due_times

    sent = due_times(
        LoadSetup(target=Target(url="http://127.0.0.1:1"), duration_s=28.0), LoadLevel(rate=27.0)
    )
    assert sent is not None
    assert arrivals(27.0, len(sent)) == pytest.approx(sent)
    assert len(sent) == 729  # as in benchmarks/h200/serve.json


def test_a_damaged_record_is_refused(tmp_path):
    from cairn.core.errors import CairnError

    (tmp_path / "throughput.json").write_text('{"rows": [')
    with pytest.raises(CairnError, match="cannot read"):
        serving(tmp_path)
    assert serving(tmp_path / "nowhere") == []


def test_the_budget_of_a_mixed_step_is_the_engines():
    from cairn.serve.engine.step_budget import tokens_within

    served = Served(spec=preset("llama-3.1-70b"), device=H200, tp=4)
    space = room(served)
    expected = tokens_within(0.025, 4 * H200.flops_per_s, served.spec, space.rows, 16384)
    assert limits(served, space, 4096, 25.0).mixed_step_tokens == expected > 0
    assert limits(served, space, 4096).mixed_step_tokens == 0


def test_memory_adds_up_and_the_cache_fits():
    space = room(Served(spec=preset("qwen3-8b"), device=H200))
    assert sum(space.table().values()) == space.total
    assert space.cache_tokens * cache_bytes_per_token(preset("qwen3-8b")) == pytest.approx(
        space.cache, rel=1e-6
    )
    assert not room(Served(spec=preset("llama-3.1-70b"), device=H200)).fits
    assert room(Served(spec=preset("llama-3.1-70b"), device=H200, tp=4)).fits


def test_every_request_is_answered_in_full():
    workload = Workload(
        requests=40, input_least=50, input_most=200, output_least=5, output_most=30, rate=50.0
    )
    load = run(SMALL, workload)
    wanted = sum(arrival.request.params.max_tokens or 0 for arrival in requests(workload))
    assert load.output_tokens_per_s * load.seconds == pytest.approx(wanted)
    assert limits(SMALL, room(SMALL), 230).context == 230


def test_more_load_is_never_faster():
    shape = {
        "requests": 150,
        "input_least": 400,
        "input_most": 600,
        "output_least": 20,
        "output_most": 40,
    }
    loads = [run(SMALL, Workload(**shape, rate=rate)) for rate in (5.0, 100.0, 1e5)]
    assert [load.ttft_p99 for load in loads] == sorted(load.ttft_p99 for load in loads)
    assert loads[0].output_tokens_per_s < loads[1].output_tokens_per_s


def test_one_gpu_is_enough_for_a_small_model():
    found = plan(SMALL, ASKED, 8)
    assert found.best is not None
    assert (found.best.tp, found.best.gpus) == (1, 1)
    assert all(option.why for option in found.options if option.tp > 1)
    assert [load.rate for load in found.curve] == sorted(load.rate for load in found.curve)
    per_token = found.best.usd_per_hour / 3600 / (ASKED.rate * ASKED.output_tokens)
    assert found.best.usd_per_million == pytest.approx(per_token * 1e6)


def test_a_model_that_does_not_fit_says_so():
    found = plan(Served(spec=preset("llama-3.1-70b"), device=H200), ASKED, 1)
    assert found.best is None
    assert "does not fit" in found.options[0].why


def test_a_slo_that_nothing_meets_says_what_would_be():
    from msgspec.structs import replace

    found = plan(SMALL, replace(ASKED, slo_tpot=1e-5), 2)
    assert found.best is None
    assert all("misses the SLO" in option.why for option in found.options)


def test_nonsense_is_refused():
    from msgspec.structs import replace

    for field in ("rate", "input_tokens", "slo_ttft"):
        with pytest.raises(ConfigError, match="is 0"):
            plan(SMALL, replace(ASKED, **{field: 0}), 8)
    with pytest.raises(ConfigError, match="0 GPUs"):
        plan(SMALL, ASKED, 0)


def test_the_workloads_are_those_that_were_measured():
    from cairn.bench import workload

    for name, shape in WORKLOADS.items():
        chosen = workload.requests(name)
        lengths = [len(one.prompt) for one in chosen]
        answers = [one.output for one in chosen]
        assert len(chosen) == shape.requests
        assert shape.input_least <= min(lengths) <= max(lengths) <= shape.input_most
        assert shape.output_least <= min(answers) <= max(answers) <= shape.output_most
        assert chosen[0].shared == shape.shared
        assert math.isinf(shape.rate)


def traced(count=40, gap=0.02, shared=0):
    """Requests of 400 to 600 tokens; the first `shared` of them are everybody's."""
    return tuple(
        Traced(
            gap * number,
            [*range(shared), *([number + 1] * (400 + 5 * number - shared))],
            8 + number % 9,
        )
        for number in range(count)
    )


def test_a_trace_keeps_its_pattern_at_any_rate():
    trace = traced()
    shape = {
        "requests": 40,
        "input_least": 1,
        "input_most": 600,
        "output_least": 1,
        "output_most": 16,
    }
    own, slow = (
        requests(Workload(**shape, rate=rate, trace=trace)) for rate in (39 / (39 * 0.02), 10.0)
    )
    assert [arrival.seconds for arrival in own] == pytest.approx([one.at_s for one in trace])
    assert slow[-1].seconds == pytest.approx(39 / 10.0)
    assert {arrival.seconds for arrival in requests(Workload(**shape, trace=trace))} == {0.0}
    load = run(SMALL, Workload(**shape, rate=50.0, trace=trace))
    wanted = sum(one.output_tokens for one in trace)
    assert load.output_tokens_per_s * load.seconds == pytest.approx(wanted)


def test_a_plan_of_a_trace():
    trace = traced(shared=128)
    asked = Demand(
        rate=50.0, input_tokens=500, output_tokens=12, slo_ttft=0.5, slo_tpot=0.05, trace=trace
    )
    found = plan(SMALL, asked, 2)
    assert found.best is not None
    assert found.best.load is not None
    assert found.best.load.requests == len(trace)
    assert found.best.load.cached_tokens >= 64 * (len(trace) - 5)  # whole pages of what is shared


def test_requests_that_are_too_long_are_counted_not_lost():
    tiny = Served(spec=preset("gpt2"), device=H200)  # 1,024 tokens
    trace = (*traced(10), Traced(0.3, [1] * 1100, 5))
    asked = Demand(
        rate=20.0, input_tokens=500, output_tokens=12, slo_ttft=0.5, slo_tpot=0.05, trace=trace
    )
    found = plan(tiny, asked, 1)
    assert found.best is not None
    assert found.best.load is not None
    assert found.best.load.refused == 1
    from msgspec.structs import replace

    with pytest.raises(ConfigError, match="none of the 1 requests fits into the 1024 tokens"):
        plan(tiny, replace(asked, trace=trace[-1:]), 1)


def test_no_fewer_replicas_would_do():
    from msgspec.structs import replace

    served = Served(spec=preset("qwen3-8b"), device=H200)
    asked = Demand(
        rate=60.0, input_tokens=800, output_tokens=8, slo_ttft=0.2, slo_tpot=0.02, requests=40
    )
    option = plan(served, asked, 3).options[0]
    assert option.holds
    assert option.replicas > 1
    assert not plan(served, asked, option.replicas - 1).options[0].holds
    crowd = plan(served, replace(asked, rate=1e7), 1)
    assert crowd.best is None
    assert "more than 1" in crowd.options[0].why


def test_windows_leave_room_for_more_requests_of_long_contexts():
    """Gemma 3 27B at 32k on one H200: several times as many as if every layer kept every token."""
    spec = preset("gemma-3-27b")
    served = Served(spec=spec, device=H200)
    space = room(served)
    with_windows = space.pages // most_pages(cache_groups(spec), 32_768, 64)
    without = space.cache // int(cache_bytes_per_token(spec) * 32_768)
    assert with_windows >= 4 * without > 0
    whole = limits(served, space, 32_768)
    assert whole.groups == cache_groups(spec)
    assert whole.capacity >= 32_768


@pytest.mark.parametrize("name", ["fp8", "w4a16", "mxfp4"])
def test_a_form_of_the_weights_is_its_bytes(name):
    """Fewer bytes in memory and in a decode step; only 8-bit activations make products faster."""
    from cairn.plan.weight_forms import weight_form

    form, spec = weight_form(name, None), preset("qwen3-8b")
    served = Served(spec=spec, device=H200, weight_bytes=form.bytes, eight_bit=form.eight_bit)
    outside = 2 * spec.vocab * spec.hidden
    expected = (spec.parameters() - outside) * form.bytes + 2 * outside
    assert room(served).weights == pytest.approx(expected, rel=1e-6)
    workload = Workload(
        requests=1, input_least=128, input_most=128, output_least=64, output_most=64
    )
    plain = run(Served(spec=spec, device=H200), workload)
    assert run(served, workload).output_tokens_per_s > 1.4 * plain.output_tokens_per_s


def test_a_checkpoint_says_its_own_bits():
    from cairn.plan.model_shape import model_shape
    from cairn.plan.weight_forms import weight_form

    folder = QUANTIZED
    bits = {n: weight_form("", model_shape(str(folder / n)).stored) for n in ("w4a16", "w8a8")}
    assert (bits["w4a16"].bits, bits["w4a16"].eight_bit) == (4.5, False)
    assert (bits["w8a8"].bits, bits["w8a8"].eight_bit) == (8, True)
    assert weight_form("", None).bits == 16
    assert weight_form("gptq_marlin", None) == weight_form("w4a16", None)  # a name of vLLM's
    with pytest.raises(ConfigError, match="no form of weights is called 'int5'"):
        weight_form("int5", None)


def test_packaged_models_have_the_shape_that_is_served(tmp_path, monkeypatch):
    """Against the loader of `cairn serve`: folders, a GGUF file, and a model in a folder of a packaged name."""
    from cairn.models.checkpoint import open_checkpoint
    from cairn.models.hub import resolve
    from cairn.plan.model_shape import model_shape

    file = packaged_chat_model()
    for name in ("cairn-tiny", "cairn-tiny-vl", "smollm2-135m-instruct"):
        expected = open_checkpoint(resolve(name))
        found = model_shape(name)
        assert (found.spec, found.vision) == (expected.spec, expected.vision)
    assert found.stored.name == "q4_1"
    assert found.stored.bits == 5
    assert model_shape(str(file)).spec == found.spec
    monkeypatch.chdir(tmp_path)
    Path("cairn-tiny").symlink_to(QUANTIZED / "w8a8")
    assert model_shape("cairn-tiny").stored.bits == 8
    with pytest.raises(ConfigError, match="cairn-tinny") as error:
        model_shape("cairn-tinny")
    assert "cairn-tiny" in error.value.hint


def test_a_tower_takes_memory_and_time():
    """Its counted weights are those of the built tower but for some biases; its FLOPs are added to prefills."""
    import tiny_vision as tiny

    from cairn.models.vision.cost import picture_rows, tower_flops, tower_parameters
    from cairn.models.vision.families import split_config
    from cairn.models.vision.tower import Tower

    for name in ("llava", "gemma3", "mistral3", "qwen3-vl", "idefics3"):
        config = json.loads(json.dumps(tiny._config(name).to_dict()))
        vision = split_config(config)[1]
        built = sum(parameter.numel() for parameter in Tower(vision).parameters())
        assert tower_parameters(vision) == pytest.approx(built, rel=0.05), name
    assert picture_rows(vision, 28, 28) == 4
    assert picture_rows(vision, 40, 61) == 4 * 7  # two by three tiles, and the whole
    assert tower_flops(vision, 32) > 2 * tower_flops(vision, 16)
    seeing = msgspec.structs.replace(SMALL, tower_bytes=2**30, tower_flops=1e10)
    assert room(seeing).weights == room(SMALL).weights + 2**30
    asked = Workload(
        requests=20, rate=2.0, input_least=200, input_most=200, output_least=5, output_most=5
    )
    assert (
        run(seeing, asked).ttft_p50
        > run(SMALL, asked).ttft_p50 + 0.5 * 200 * 1e10 / H200.flops_per_s
    )
