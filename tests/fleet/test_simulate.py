"""The fleet's simulator: the router's own policies over the engine's own schedulers."""

import json
import re

import pytest

from cairn.cli.main import main
from cairn.fleet.routing_policy import POLICIES
from cairn.fleet.simulate import Simulated, run_policy
from cairn.fleet.simulate_prompts import (
    conversation_blocks,
    conversations,
    fitting,
    prompts_of,
)
from cairn.fleet.simulate_replica import Replica, Speed
from cairn.plan.slo import Slo
from cairn.serve.engine.request import Limits

LIMITS = Limits(rows=32, step_tokens=2048, context=8192, pages=400, page_size=128, vocabulary=9)


def seconds(step) -> float:
    return 5e-3 + 2e-5 * step.tokens


@pytest.fixture(scope="module")
def outcomes():
    prompts = prompts_of(fitting(conversations(400), LIMITS.context), LIMITS.page_size)
    return {
        name: run_policy(name, prompts, 1.0, 4, LIMITS, seconds, Slo(1.0, 0.05))
        for name in POLICIES
    }


def test_every_policy_serves_everything_and_knowing_the_caches_pays(outcomes):
    ours, blind = outcomes["seconds"], outcomes["round_robin"]
    assert len({one.requests for one in outcomes.values()}) == 1
    assert ours.hit_share > 1.3 * blind.hit_share
    assert ours.ttft_p50_s < blind.ttft_p50_s
    others = [one for one in outcomes.values() if one is not ours]
    assert ours.goodput >= 1.1 * max(one.goodput for one in others)
    assert ours.goodput >= 1.8 * blind.goodput
    assert ours.ttft_p99_s < min(one.ttft_p99_s for one in others)


def test_the_router_sees_what_a_step_has_computed_at_its_end():
    (prompt,) = prompts_of(conversations(1), LIMITS.page_size)
    replica = Replica(0, LIMITS, lambda step: 1.0, Speed(1.0, 1e-3, 1e-3))
    simulated = Simulated("seconds", LIMITS)
    simulated.join(replica)
    simulated.place(prompt, 0.0, 0.0)
    simulated.advance(0.5)
    assert (replica.worker.waiting, replica.events()) == (1, None)
    simulated.advance(float("inf"))
    assert replica.worker.waiting == 0
    assert simulated.index.match(prompt.keys, prompt.tokens)[0] > 0


def test_the_same_trace_gives_the_same_outcome(outcomes):
    prompts = prompts_of(fitting(conversations(400), LIMITS.context), LIMITS.page_size)
    again = run_policy("seconds", prompts, 1.0, 4, LIMITS, seconds, Slo(1.0, 0.05))
    assert again == outcomes["seconds"]


def test_the_verb_prints_json_and_names_mistakes(capsys):
    words = ["simulate", "fleet", "--requests", "12", "--servers", "2"]
    assert main([*words, "--policy", "seconds,llmd", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in shown["outcomes"]] == ["seconds", "llmd"]
    assert main([*words, "--policy", "second"]) == 2
    assert "did you mean 'seconds'" in capsys.readouterr().err
    assert main([*words, "--load", "0"]) == 2
    capsys.readouterr()
    # A trace that is over before a server is up has no good request, and the reason is said.
    assert main([*words, "--scale", "0-2", "--load", "0.8", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["scaled"][1]["scaled"]["outcome"]["good_share"] == 0
    assert "before a server" in shown.err
    assert main([*words, "--scale", "0-2", "--load", "0.8", "--start-s", "0.1", "--json"]) == 0
    assert "before a server" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--policy all,llmd", "all, or names with commas"),
        ("--servers 1025", "1 to 1,024"),
        ("--scale 2-1", "LEAST-MOST"),
        ("--scale 0-1025", "no more than 1,024"),
        ("--scale 0-2 --policy llmd", "chosen by `seconds`"),
        ("--scale 0-2 --load 1e-9", "a larger --load"),
        ("--scale 0-2 --start-s inf", "expected a number >= 0 and <= 86400"),
    ],
)
def test_what_could_never_end_or_would_be_ignored_is_refused(capsys, options, said):
    assert main(["simulate", "fleet", "--requests", "5", *options.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_part_of_a_trace_is_what_a_file_with_that_part_alone_is(tmp_path, capsys):
    lines = [
        json.dumps({"timestamp": 500 * at, "input_length": 512 * (1 + at % 3), "output_length": 9})
        for at in range(20)
    ]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    whole.write_text("\n".join(lines))
    part.write_text("\n".join(lines[12:]))
    words = ["simulate", "fleet", "--servers", "2", "--policy", "seconds", "--json", "--trace"]

    def shown(*more):
        assert main([*words, *map(str, more)]) == 0
        return json.loads(capsys.readouterr().out)["outcomes"]

    assert shown(whole, "--skip", 12, "--requests", 8) == shown(part)
    (recorded,) = shown(whole, "--load", "recorded")
    assert 9.5 < recorded["seconds"] < 10.5  # as long as the trace
    assert shown(whole, "--load", recorded["load"]) == [recorded]
    assert main([*words, str(whole), "--skip", "20"]) == 2
    assert "no request after --skip 20" in capsys.readouterr().err
    assert main(["simulate", "fleet", "--skip", "1"]) == 2


def test_made_up_conversations_fit_a_model_of_any_context(capsys):
    """Of cairn-tiny's 1,024 tokens, and of any folder with a config.json; what is left out is said."""
    words = ["simulate", "fleet", "--requests", "30", "--policy", "seconds", "--json"]
    assert main([*words, "--model", "cairn-tiny"]) == 0
    out, err = capsys.readouterr()
    (outcome,) = json.loads(out)["outcomes"]
    left_out = int(re.search(r"note: (\d+) of 30 requests are left out", err)[1])
    assert outcome["requests"] == 30 - left_out > 10
    for context in (300, 1024, 5000, 10**6):
        tokens = conversation_blocks(context, 16)
        longest = max(one.input_tokens for one in conversations(500, block_tokens=tokens))
        assert longest + 300 <= context or tokens == 16
