"""Prefill elsewhere only where it pays is as good as the better of always and never."""

import json

import pytest

from cairn.cli.main import main
from cairn.fleet.simulate_separation import (
    ARRANGEMENTS,
    SHORTEST,
    Machines,
    Point,
    Separation,
    requests_of,
    simulate_separation,
)
from cairn.plan.slo import Slo
from cairn.serve.config import RoleConfig
from cairn.serve.engine.request import Limits

MACHINES = Machines(
    limits=Limits(rows=32, step_tokens=2048, context=8192, pages=1600, page_size=64, vocabulary=999,
                  mixed_step_tokens=512),
    step_seconds=lambda step: 5e-3 + 2e-5 * step.tokens + 1e-4 * len(step.chunks),
    token_bytes=1e5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("input_tokens", "hits", "load"),
    [(256, 0.0, 0.6), (4096, 0.0, 0.6), (4096, 0.9, 0.6), (4096, 0.0, 0.9)],
)
def test_conditional_is_within_3_percent_of_the_better_arrangement(input_tokens, hits, load):
    point = Point(input_tokens=input_tokens, output_tokens=48, hits=hits, load=load)
    found = {
        one: simulate_separation(one, point, 60, MACHINES, Slo(1.0, 0.03)) for one in ARRANGEMENTS
    }
    better = max(found["aggregated"].goodput, found["separated"].goodput)
    assert found["conditional"].goodput >= 0.97 * better, found
    assert found["aggregated"].remote_share == 0
    assert found["separated"].remote_share == 1


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_token_is_computed_and_every_page_given_back(arrangement):
    """Also where the decode server has room for the pages of a few prompts only."""
    tight = Limits(rows=8, step_tokens=512, context=2048, pages=80, page_size=64, vocabulary=999)
    machines = Machines(limits=tight, step_seconds=MACHINES.step_seconds, token_bytes=1e5)
    point = Point(input_tokens=1000, output_tokens=20, hits=0.5, load=2.0)
    arrivals = requests_of(point, 30, machines)
    run = Separation(machines, arrangement)
    run.run(arrivals)
    assert [len(request.outputs) for _, request in arrivals] == [20] * 30
    for server in (*run.decode, *run.prefill):
        assert not server.scheduler.has_work
        assert server.blocks.usage().used == 0
        assert not server.line
        assert not server.asked


def test_the_verb_prints_json_and_names_mistakes(capsys):
    words = ["simulate", "separation", "--requests", "8", "--lengths", "256:8", "--hits", "0"]
    assert main([*words, "--load", "0.5", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert [one["arrangement"] for one in point] == list(ARRANGEMENTS)
    assert RoleConfig(role="decode").prefill_min_tokens == SHORTEST
    assert main([*words, "--load", "0"]) == 2
    assert "such as --lengths" in capsys.readouterr().err
