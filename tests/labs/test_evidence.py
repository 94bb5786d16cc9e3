"""The tables that a learner reads are sums of the events behind them; every record of a drill is shipped."""

import re

import pytest

from cairn.labs.evidence.profile_report import Event, events_of, merged, report, self_times
from cairn.labs.interview import RECORDS, rounds


def trace(*events):
    made = [
        {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": us, "args": {"bytes": moved}}
        for cat, name, start, us, moved in events
    ]
    return {"traceEvents": [*made, {"ph": "M", "name": "process_name"}]}


GPU = trace(
    ("cpu_op", "aten::mm", 0, 100, 0),
    ("cuda_runtime", "cudaLaunchKernel", 10, 5, 0),
    ("kernel", "gemm", 20, 30, 0),
    ("kernel", "gemm", 60, 30, 0),
    ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 95, 5, 50_000),
)


def test_a_profile_of_a_gpu_shows_kernels_copies_and_gaps():
    text = report(events_of(GPU), 1, "head")
    assert "GPU busy 65%" in text
    assert re.search(r"gemm +60\.0% +0\.060 +2\.0 +30\.0", text)
    assert re.search(r"Pageable.* 0\.05 +1\.0 +10\.0", text)  # 50 kB in 5 us
    assert re.search(r"0\.010 ms +aten::mm", text)


def test_a_profile_of_a_cpu_shows_own_times():
    events = [Event("cpu_op", "outer", 0, 100), Event("cpu_op", "inner", 10, 60)]
    assert {event.name: event.us for event in self_times(events)} == {"outer": 40, "inner": 60}
    assert re.search(r"inner +60\.0%", report(events, 1, "head"))


def test_stretches_are_joined():
    events = [Event("k", "", 0, 10), Event("k", "", 5, 10), Event("k", "", 30, 1)]
    assert merged(events) == [(0, 15), (30, 31)]


DRILLS = [q for q in rounds()["diagnose"].question if q.records]


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.topic)
def test_a_drill_shows_its_records(drill):
    for name in drill.records:
        assert (RECORDS / f"{name}.txt").read_text() in drill.evidence
    for number in re.findall(
        r"\b\d+\.\d\b", drill.answer.en
    ):  # what the answer quotes stands there
        assert number in drill.evidence


def test_every_record_belongs_to_a_drill():
    used = {name for drill in DRILLS for name in drill.records}
    assert used == {file.stem for file in RECORDS.glob("*.txt")}
