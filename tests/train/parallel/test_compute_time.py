"""How long a rank computes in a step: by the host's clock, or by events of a GPU that are read later."""

import time

import pytest
import torch

from cairn.train.parallel.compute_time import ComputeTime
from cairn.train.recovery.status_board import Board


def test_the_first_forward_and_backward_of_each_step_count(monkeypatch):
    clock = iter(range(100, 1000, 100))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    compute = ComputeTime("cpu")
    compute.begin()
    compute.end()
    compute.begin()
    compute.end()
    assert compute.step_ended(1) == [(1, 100)]
    assert compute.step_ended(2) == [(2, 0)]  # a step without batches
    compute.begin()
    compute.end()
    assert compute.step_ended(3) == [(3, 100)]


class Event:
    """Of a device that has come as far as `passed`; milliseconds apart."""

    made, passed = 0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.made += 1
        self.number = Event.made

    def query(self):
        return self.number <= Event.passed

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return float(other.number - self.number)


def test_events_are_read_once_the_device_has_passed_them_and_in_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    compute, board = ComputeTime("cuda"), Board(1, 1)
    seen, done = [], []
    for step in range(1, 7):
        if step != 4:  # a step without batches
            compute.begin()
            compute.end()
        Event.passed = {1: 1, 2: 2, 3: 3, 5: 7, 6: 10}.get(step, Event.passed)
        board.step_done(0, step)
        for number, nanoseconds in compute.step_ended(step):
            board.computed(0, number, nanoseconds)
            done.append((number, nanoseconds))
        seen.append([number for number, _, _ in board.spent(0, -1)])
    ms = 10**6
    assert done == [(1, ms), (2, ms), (3, ms), (4, 0), (5, ms), (6, ms)][: len(done)]
    assert seen == [[], [], [], [], [2, 3, 4], [2, 3, 4, 5, 6]]


@pytest.mark.gpu
def test_on_a_gpu_the_work_is_measured_and_not_its_launch():
    compute = ComputeTime("cuda")
    work = torch.randn(8192, 8192, device="cuda")
    (work @ work).sum().item()
    compute.begin()
    began = time.monotonic_ns()
    for _ in range(20):
        work @ work
    launched = time.monotonic_ns() - began
    compute.end()
    assert compute.step_ended(1) == []  # and nothing has waited
    torch.cuda.synchronize()
    whole = time.monotonic_ns() - began
    (first, second) = compute.step_ended(2)
    assert first[0] == 1
    assert launched < first[1] <= whole * 1.05
    assert second == (2, 0)
