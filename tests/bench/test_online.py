"""The rate search without a server: what it measures of each request, and which rates it tries."""

import argparse
import importlib.util
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn.bench.load_search import Tried
from cairn.plan.slo import Lengths, Slo
from cairn.serve.engine.loop import Output

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "online.py"


@pytest.fixture(scope="module")
def online():
    made = importlib.util.spec_from_file_location("online", PROGRAM)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


class OneAtATime:
    """An engine that gives the oldest request one token in each step."""

    def __init__(self):
        self.queue, self.left, self.added = deque(), {}, []
        self.scheduler = SimpleNamespace(blocks=SimpleNamespace(reset=lambda: None))

    @property
    def has_work(self):
        return bool(self.queue)

    def add(self, request):
        self.queue.append(request)
        self.added.append(request)
        self.left[request.id] = request.params.max_tokens

    def step(self):
        request = self.queue[0]
        self.left[request.id] -= 1
        ends = not self.left[request.id]
        if ends:
            self.queue.popleft()
        return [Output(request, [1], ends)]


def test_every_request_has_a_first_and_a_last_token_in_order(online):
    engine = OneAtATime()
    seen = online.offered(engine, 200.0, 0.1, Lengths(5, 3), 40)
    assert len(seen) == len(engine.added) > 5
    assert all(len(r.prompt) == 5 and max(r.prompt) < 40 for r in engine.added)
    assert all(one.arrived <= one.first <= one.last for one in seen)
    firsts = [one.first for one in seen]
    assert firsts == sorted(firsts)  # it serves them one after the other


def test_a_rate_holds_if_both_percentiles_do(online):
    slo = Slo(0.5, 0.025)
    quick = [online.Seen(0.0, 0.1, 0.1 + 127 * 0.02, 128)] * 99
    late = online.Seen(0.0, 0.6, 0.6 + 127 * 0.02, 128)
    slow = online.Seen(0.0, 0.1, 0.1 + 127 * 0.03, 128)
    assert online.summary("x", 9.0, quick, slo)["holds"]
    row = online.summary("x", 9.0, [*quick, late], slo)
    assert (row["ttft_p99_ms"], row["tpot_p99_ms"], row["holds"]) == (600.0, 20.0, False)
    row = online.summary("x", 9.0, [*quick, slow], slo)
    assert (row["ttft_p50_ms"], row["tpot_p99_ms"], row["holds"]) == (100.0, 30.0, False)


def test_a_promise_is_tried_with_five_percent_more_and_nothing_else(online):
    options = argparse.Namespace(rate=[24.0, 34.0], resolution=0.03)
    chosen = SimpleNamespace(rate=28.0)
    tried = []
    while (rate := online.next_rate(options, tried, chosen)) is not None:
        tried.append(Tried(rate, True))
    assert [one.rate for one in tried] == [28.0, 29.4]
    assert online.next_rate(options, [], None) == 24.0
    assert online.next_rate(options, [Tried(24.0, True)], None) == 34.0
