"""A timeline that is made from memory has the form of one that is made from event files."""

import json

from cairn.core.events import close, listen, span
from cairn.core.records import Span
from cairn.core.trace import Track, timeline, write_trace


def test_rows_of_one_process_stand_together_and_time_begins_with_the_first_span():
    tracks = [
        Track(
            "request",
            "phases",
            [Span("queue", 5_000, 2_000, 0), Span("decode", 7_000, 4_000, 0, {"n": 3})],
        ),
        Track("engine", "steps", [Span("step", 4_000, 1_000, 0)]),
        Track("request", "sums", []),
    ]
    made = timeline(tracks, "cairn tiny")
    spans = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"]) for s in spans] == [
        ("queue", 1, 2),
        ("decode", 3, 4),
        ("step", 0, 1),
    ]
    assert spans[1]["args"] == {"n": 3}
    rows = {
        e["args"]["name"]: (e["pid"], e["tid"])
        for e in made["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert rows == {"phases": (1, 1), "steps": (2, 2), "sums": (1, 3)}
    assert timeline([], "nothing")["traceEvents"] == []


def test_it_has_the_form_of_a_trace_of_files(tmp_path):
    path = listen(tmp_path / "run.jsonl")
    with span("step", number=1):
        pass
    close()
    write_trace([path], tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    made = timeline([Track("p", "t", [Span("step", 1, 2, 0, {"number": 1})])], "x")
    assert set(made) == set(written)
    forms = [
        {frozenset(e) for e in one["traceEvents"] if e["ph"] == "X"} for one in (made, written)
    ]
    assert forms[0] == forms[1]
