"""Timing counts right; with a clock that the test turns, not with the machine's."""

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists

from cairn.core.errors import HardwareError
from cairn.hw import timing
from cairn.hw.timing import CallTiming, measure, measure_graph, repeats, summarize

seconds = floats(min_value=1e-9, max_value=1e3)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until somebody calls `pass_time`."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def pass_time(amount):
        now[0] += amount

    return pass_time


@given(lists(seconds, min_size=1, max_size=50))
def test_summary_is_ordered_and_within_the_samples(samples):
    result = summarize(samples)
    assert min(samples) <= result.p10_s <= result.median_s <= result.p90_s <= max(samples)
    assert result.runs == len(samples)
    assert result.spread >= 0


@given(lists(seconds, min_size=1, max_size=20))
def test_summary_does_not_depend_on_order(samples):
    assert summarize(samples) == summarize(samples[::-1])


def test_summary_by_hand():
    result = summarize([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (result.median_s, result.p10_s, result.p90_s) == (3.0, 1.4, 4.6)


def test_one_outlier_does_not_move_the_median():
    assert summarize([1.0] * 9 + [1000.0]).median_s == 1.0


@given(
    one_s=floats(min_value=0, max_value=10),
    budget_s=floats(min_value=0, max_value=10),
    at_least=integers(1, 10),
    more=integers(0, 1000),
)
def test_repeats_stay_in_bounds_and_in_budget(one_s, budget_s, at_least, more):
    at_most = at_least + more
    runs = repeats(one_s, budget_s, at_least, at_most)
    assert at_least <= runs <= at_most
    assert runs == at_least or runs * one_s <= budget_s * (1 + 1e-9)


def test_measure_reports_the_time_of_one_call(clock):
    result = measure(lambda: clock(0.25), budget_ms=2000)
    assert (result.median_s, result.p10_s, result.p90_s) == (0.25, 0.25, 0.25)
    assert result.runs == 8


def test_the_slow_first_call_is_warm_up(clock):
    durations = iter([100.0])
    result = measure(lambda: clock(next(durations, 0.5)), budget_ms=5000)
    assert result.p90_s == 0.5


def test_a_slow_call_still_gets_its_fewest_runs(clock):
    assert measure(lambda: clock(60.0), budget_ms=1, at_least=3).runs == 3


def test_an_instant_call_stops_at_the_most_runs(clock):
    assert measure(lambda: None, budget_ms=1, at_most=17).runs == 17


def test_inputs_take_turns(clock):
    seen = []

    def call(which):
        seen.append(which)
        clock(1.0)

    measure(call, inputs=[("a",), ("b",), ("c",)], budget_ms=0, at_least=6)
    assert seen[-6:] == ["a", "b", "c"] * 2


def test_parts_of_a_call():
    whole = CallTiming(median_s=4.0, p10_s=2.0, p90_s=8.0, runs=3)
    assert whole.per(4) == CallTiming(median_s=1.0, p10_s=0.5, p90_s=2.0, runs=3)
    assert whole.per(4).spread == whole.spread


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="sees no CUDA device") as caught:
        measure(lambda: None, device="cuda")
    assert "cairn doctor" in caught.value.hint
    with pytest.raises(HardwareError):
        measure_graph(lambda: None)


class FakeCuda:
    """The few parts of torch that timing touches, writing down in which order they are touched."""

    def __init__(self):
        self.log, self.milliseconds = [], 0.0
        props = SimpleNamespace(L2_cache_size=60 << 20)
        self.cuda = SimpleNamespace(
            device=lambda name: nullcontext(),
            synchronize=lambda: self.log.append("wait"),
            get_device_properties=lambda name: props,
            Event=lambda enable_timing: FakeEvent(self),
            Stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
            stream=lambda stream: nullcontext(),
            current_stream=lambda: SimpleNamespace(wait_stream=lambda other: None),
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: self.work("replay", 100.0)),
            graph=lambda graph: nullcontext(),
        )
        self.int8 = "int8"

    def empty(self, size, dtype, device):
        self.flushed_bytes = size
        return SimpleNamespace(zero_=lambda: self.work("flush", 70.0))

    def work(self, name, milliseconds):
        self.log.append(name)
        self.milliseconds += milliseconds


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.cuda.log.append("event")
        self.at = self.cuda.milliseconds

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(timing, "_torch_with_cuda", lambda: fake)
    return fake


def test_the_flush_lies_outside_the_events(cuda):
    def call(name):
        cuda.work(name, 2.0)

    result = measure(call, [("a",), ("b",)], device="cuda", budget_ms=8, at_least=2)
    assert result.median_s == result.p90_s == 0.002
    assert cuda.log[-9:] == ["flush", "event", "a", "event", "flush", "event", "b", "event", "wait"]
    assert cuda.flushed_bytes == 240 << 20


def test_without_a_flush_nothing_is_written_between(cuda):
    measure(lambda: cuda.work("a", 2.0), device="cuda:0", flush=False)
    assert "flush" not in cuda.log


def test_a_graph_is_captured_once_and_replayed(cuda):
    calls = []
    result = measure_graph(calls.append, [("x",), ("y",)], calls=5, budget_ms=1000)
    assert calls == ["x", "y", "x", "y", "x", "y", "x"]  # two to warm up, five into the graph
    assert result.median_s == pytest.approx(0.1 / 5)
    assert cuda.log.count("replay") == 1 + 3 + 2 + result.runs


@pytest.mark.gpu
def test_events_see_the_device_and_not_the_queue():
    import torch

    left = torch.randn(4096, 4096, device="cuda")
    once = measure(lambda: left @ left, device="cuda", budget_ms=50)
    twice = measure(lambda: left @ left @ left, device="cuda", budget_ms=50)
    assert once.median_s < twice.median_s
    assert once.runs >= 5


@pytest.mark.gpu
def test_a_graph_beats_launching_from_python():
    import torch

    small, result = torch.randn(16, device="cuda"), torch.empty(16, device="cuda")

    def add():
        torch.add(small, small, out=result)

    calls = count()
    in_graph = measure_graph(lambda: (next(calls), add()), calls=50)
    assert next(calls) == 51  # one call to warm up, fifty captured, none when replayed
    eager = measure(lambda: [add() for _ in range(50)], device="cuda").per(50)
    assert in_graph.median_s < eager.median_s
