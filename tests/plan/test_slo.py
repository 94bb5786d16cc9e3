"""A promise about latency becomes limits that hold it, in the simulator and beside the measured server."""

import math

import msgspec
import pytest

from cairn.cli.main import main
from cairn.cli.serve import Serve, with_slo
from cairn.core.config import load
from cairn.core.errors import ConfigError
from cairn.models.presets import preset
from cairn.plan import slo as planned
from cairn.plan.device import device
from cairn.plan.serve_cost import Served
from cairn.plan.slo import Lengths, Slo, choose, device_called, holds, parse_lengths, parse_slo
from cairn.serve.engine.choose_limits import longest_context
from cairn.serve.engine.request import Limits

H200 = "NVIDIA H200"
SERVED = Served(spec=preset("qwen3-8b"), device=device("h200"))
LENGTHS = Lengths(1024, 128)


@pytest.fixture(scope="module")
def chosen():
    return choose(SERVED, Slo(0.5, 0.025), LENGTHS)


def test_the_promised_rate_holds_for_other_requests_of_the_same_kind(chosen):
    """Drawn from other seeds, and at most 5% above what was promised."""
    for seed in (1, 2):
        workload = planned.Workload(
            requests=150,
            rate=chosen.rate,
            seed=seed,
            input_least=768,
            input_most=1280,
            output_least=96,
            output_most=160,
        )
        load = planned.run(SERVED, workload, chosen.max_num_seqs, chosen.step_ms)
        assert load.ttft_p99 <= 0.5 * 1.05
        assert load.tpot_p99 <= 0.025 * 1.05


def test_the_rate_is_near_the_measured_one(chosen):
    """8B on one H200, 1024 in and 128 out, Poisson: 27 requests/s were measured within these limits, 30 saturate."""
    assert 20 < chosen.rate < 30
    assert chosen.max_waiting == math.floor(chosen.rate * 0.5)
    assert chosen.step_ms <= 25
    assert any(f"--max-num-seqs {chosen.max_num_seqs}" in line for line in chosen.why)


def test_a_tighter_promise_holds_a_lower_rate_and_an_impossible_one_is_refused(chosen, monkeypatch):
    monkeypatch.setattr(planned, "REQUESTS", 60)
    tight = choose(SERVED, Slo(0.12, 0.012), LENGTHS)
    assert tight.rate < chosen.rate
    assert holds(tight.load, Slo(0.12, 0.012))
    with pytest.raises(ConfigError, match="one request alone takes"):
        choose(SERVED, Slo(0.5, 0.001), LENGTHS)


def test_the_planner_takes_a_promise_in_the_same_words(capsys):
    line = ["plan", "serve", "qwen3-0.6b", "--gpus", "1", "--requests", "20", "--json"]
    documents = []
    for given in (["--slo", "ttft=80ms,tpot=9ms"], ["--slo-ttft-ms", "80", "--slo-tpot-ms", "9"]):
        main([*line, *given])
        documents.append(capsys.readouterr().out)
    assert documents[0] == documents[1]
    assert main(["plan", "serve", "qwen3-0.6b", "--slo", "ttft=80ms"]) == 2


def test_promises_are_read_and_mistakes_are_named():
    assert parse_slo("tpot=25ms, ttft=0.5s") == Slo(0.5, 0.025)
    assert parse_lengths("30000/128") == Lengths(30000, 128)
    for text in (
        "ttft=500ms",
        "ttft=1s,tpot=1ms,ttft=2s",
        "speed=1s,tpot=1ms",
        "ttft 1s,tpot=1ms",
        "ttft=soon,tpot=1ms",
        "",
    ):
        with pytest.raises(ConfigError, match="--slo is"):
            parse_slo(text)
    for text in ("1024", "0/5", "a/b"):
        with pytest.raises(ConfigError, match="--slo-lengths"):
            parse_lengths(text)
    assert device_called(H200).name == "h200"
    with pytest.raises(ConfigError, match="cannot be simulated"):
        device_called("")


def test_the_verb_sets_the_limits_and_prints_why(monkeypatch, capsys, chosen):
    monkeypatch.setattr("cairn.cli.serve.gpu_name", lambda device: H200)
    monkeypatch.setattr(planned, "choose", lambda served, slo, lengths: chosen)
    made = with_slo(
        Serve(model="random:qwen3-8b", slo="ttft=500ms,tpot=25ms"), "ttft=500ms,tpot=25ms"
    )
    assert (made.max_num_seqs, made.step_ms, made.max_waiting) == (
        chosen.max_num_seqs,
        chosen.step_ms,
        chosen.max_waiting,
    )
    assert "holds up to" in capsys.readouterr().err
    assert msgspec.structs.asdict(made)["model"] == "random:qwen3-8b"
    monkeypatch.undo()
    assert main(["serve", "cairn-tiny", "--device", "cpu", "--slo", "ttft=1s,tpot=9ms"]) == 2
    assert "cannot be simulated" in capsys.readouterr().err


def test_max_model_len_auto_leaves_room_for_four_requests():
    limits = Limits(rows=8, step_tokens=512, context=4096, pages=129, page_size=16, vocabulary=100)
    assert longest_context(limits) == 32 * 16  # a quarter of 128 pages
    assert longest_context(msgspec.structs.replace(limits, pages=4 * 256 + 1)) == 4096
    for text, wanted in (("auto", "auto"), ("512", 512)):
        given = load(Serve, args=["m", "--max-model-len", text], env_prefix="CAIRN_TEST_").value
        assert given.max_model_len == wanted
