"""Event files become one timeline, and damage is named with its line."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core import events
from cairn.core.errors import DataError, UsageError
from cairn.core.records import Dropped, Instant, Process, Scalar, Span, Thread, encode, read
from cairn.core.trace import TraceWindow, align, find_files, write_trace

SECOND = 10**9


def process(**changes) -> Process:
    values = {
        "version": 1,
        "name": "serve",
        "pid": 41,
        "host": "node1",
        "boot": "boot1",
        "rank": None,
        "wall_ns": 1_000 * SECOND,
        "monotonic_ns": 5 * SECOND,
    }
    return Process(**(values | changes))


def write(path, *records):
    path.write_bytes(b"".join(encode(record) for record in records))
    return path


def trace_of(tmp_path, *files, window=None) -> list[dict]:
    write_trace(files, tmp_path / "trace.json", window)
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_each_record_becomes_the_event_that_perfetto_expects(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        process(rank=3),
        Thread(7, "worker"),
        Span("step", 6 * SECOND, 2_500, 7, {"tokens": 4}),
        Span("failed", 6 * SECOND, 1, 7, {}, "ValueError"),
        Instant("preempted", 7 * SECOND, 7, {"request": 1}),
        Scalar("loss", 8 * SECOND, 7, 2.5, {"step": 1}),
        Scalar("loss", 8 * SECOND, 7, None, {"step": 2}),
        Dropped(9 * SECOND, 12),
    )
    summary = write_trace([path], tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "ph": "M",
                "name": "process_name",
                "pid": 1,
                "tid": 0,
                "args": {"name": "serve rank 3"},
            },
            {
                "ph": "M",
                "name": "process_labels",
                "pid": 1,
                "tid": 0,
                "args": {"labels": "pid 41 on node1"},
            },
            {
                "ph": "M",
                "name": "process_sort_index",
                "pid": 1,
                "tid": 0,
                "args": {"sort_index": 1},
            },
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "worker"}},
            {
                "ph": "X",
                "name": "step",
                "pid": 1,
                "tid": 7,
                "ts": 1e6,
                "dur": 2.5,
                "args": {"tokens": 4},
            },
            {
                "ph": "X",
                "name": "failed",
                "pid": 1,
                "tid": 7,
                "ts": 1e6,
                "dur": 0.001,
                "args": {"error": "ValueError"},
            },
            {
                "ph": "i",
                "s": "t",
                "name": "preempted",
                "pid": 1,
                "tid": 7,
                "ts": 2e6,
                "args": {"request": 1},
            },
            {"ph": "C", "name": "loss", "pid": 1, "tid": 7, "ts": 3e6, "args": {"value": 2.5}},
            {
                "ph": "i",
                "s": "t",
                "name": "loss is not a number",
                "pid": 1,
                "tid": 7,
                "ts": 3e6,
                "args": {"step": 2},
            },
            {
                "ph": "i",
                "s": "p",
                "name": "12 events dropped",
                "pid": 1,
                "tid": 0,
                "ts": 4e6,
                "args": {"count": 12},
            },
        ],
    }
    assert (summary.processes, summary.events, summary.dropped) == (1, 5, 12)
    assert summary.seconds == 4


def offsets(*processes: Process, tmp_path) -> list[int]:
    paths = [write(tmp_path / f"{n}.jsonl", process) for n, process in enumerate(processes)]
    by_path = {source.path: source.offset_ns for source in align(paths)}
    return [by_path[path] for path in paths]


def test_processes_of_one_boot_are_aligned_by_their_common_clock(tmp_path):
    early = process(monotonic_ns=5 * SECOND, wall_ns=1_000 * SECOND)
    late = process(monotonic_ns=6 * SECOND, wall_ns=900 * SECOND)  # somebody set the clock back
    assert offsets(late, early, tmp_path=tmp_path) == [-5 * SECOND, -5 * SECOND]


def test_processes_of_two_machines_are_aligned_by_their_wall_clocks(tmp_path):
    here = process(boot="here", monotonic_ns=5 * SECOND, wall_ns=1_000 * SECOND)
    there = process(boot="there", monotonic_ns=700 * SECOND, wall_ns=1_002 * SECOND)
    assert offsets(here, there, tmp_path=tmp_path) == [-5 * SECOND, -698 * SECOND]


def test_processes_without_a_known_boot_are_aligned_by_their_wall_clocks(tmp_path):
    one = process(boot="", monotonic_ns=5 * SECOND, wall_ns=1_000 * SECOND)
    other = process(boot="", monotonic_ns=1 * SECOND, wall_ns=1_001 * SECOND)
    assert offsets(one, other, tmp_path=tmp_path) == [-5 * SECOND, 0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["boot1", "boot2", ""]),
            st.integers(0, 100 * SECOND),
            st.integers(0, 100 * SECOND),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_no_process_starts_before_time_zero_and_one_starts_there(tmp_path_factory, starts):
    folder = tmp_path_factory.mktemp("starts")
    processes = [
        process(boot=boot, monotonic_ns=monotonic, wall_ns=wall) for boot, monotonic, wall in starts
    ]
    begins = [
        p.monotonic_ns + offset
        for p, offset in zip(processes, offsets(*processes, tmp_path=folder), strict=True)
    ]
    assert min(begins) == 0


def test_processes_are_ordered_by_rank_then_by_start(tmp_path):
    paths = [
        write(tmp_path / "a.jsonl", process(rank=None, monotonic_ns=1)),
        write(tmp_path / "b.jsonl", process(rank=1)),
        write(tmp_path / "c.jsonl", process(rank=None, monotonic_ns=0)),
        write(tmp_path / "d.jsonl", process(rank=0)),
    ]
    assert [source.path.name[0] for source in align(paths)] == ["d", "b", "c", "a"]
    assert [source.number for source in align(paths)] == [1, 2, 3, 4]


def test_a_window_keeps_what_overlaps_it(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        process(monotonic_ns=0),
        Thread(7, "worker"),
        Span("before", 0, SECOND, 7),
        Span("into", 1 * SECOND, 2 * SECOND, 7),
        Instant("inside", 3 * SECOND, 7),
        Span("around", 0, 9 * SECOND, 7),
        Instant("after", 5 * SECOND, 7),
    )
    window = TraceWindow(start_s=2, end_s=4)
    found = [
        event["name"] for event in trace_of(tmp_path, path, window=window) if event["ph"] != "M"
    ]
    assert found == ["into", "inside", "around"]
    names = [event["name"] for event in trace_of(tmp_path, path, window=window)]
    assert "thread_name" in names


def test_only_a_last_line_that_was_cut_off_is_forgiven(tmp_path):
    whole = encode(process()) + encode(Instant("a", 1, 7)) + encode(Instant("b", 2, 7))
    ends = [position for position, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "cut.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        # A line that lacks nothing but its newline is whole.
        assert len(list(read(path))) == sum(length >= end for end in ends)


def test_damage_in_the_middle_is_named_with_its_line(tmp_path):
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(encode(process()) + b'{"kind":"span","na\n' + encode(Instant("a", 1, 7)))
    with pytest.raises(DataError, match=r"damaged.jsonl line 2 is not an event"):
        write_trace([path], tmp_path / "trace.json")
    assert [file.name for file in tmp_path.iterdir()] == ["damaged.jsonl"], "no half of a trace"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encode(Instant("a", 1, 7)), "line 1 is a 'instant' record"),
        (encode(process()) * 2, "line 2 is a 'process' record"),
        (b'{"loss": 1}\n', "line 1 is not an event"),
        (b"\xff\n", "line 1 is not an event"),
    ],
)
def test_a_file_that_is_no_event_file_is_refused(tmp_path, content, message):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        write_trace([path], tmp_path / "trace.json")


def test_files_of_processes_that_died_at_once_are_no_obstacle(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert trace_of(tmp_path, empty) == []
    assert len(trace_of(tmp_path, empty, write(tmp_path / "a.jsonl", process()))) == 3


def test_files_are_found_in_folders_and_by_name(tmp_path):
    (tmp_path / "folder").mkdir()
    one = write(tmp_path / "folder" / "1.jsonl", process())
    two = write(tmp_path / "2.events", process())
    (tmp_path / "folder" / "notes.txt").touch()
    assert find_files([tmp_path / "folder", two, one]) == [one, two]
    with pytest.raises(UsageError, match="no event files"):
        find_files([tmp_path])
    with pytest.raises(DataError, match=r"cannot read .*absent.jsonl: no such file"):
        write_trace([tmp_path / "absent.jsonl"], tmp_path / "trace.json")


def test_a_place_that_cannot_be_written_to(tmp_path):
    path = write(tmp_path / "a.jsonl", process())
    for out in (tmp_path / "absent" / "trace.json", path / "trace.json"):
        with pytest.raises(UsageError, match="cannot write"):
            write_trace([path], out)


def test_real_processes_meet_on_one_axis(tmp_path):
    """Two processes exchange a message; in the trace it is received after it was sent."""
    script = """
        import os, sys
        from cairn.core import events
        events.listen(sys.argv[1])
        sys.stdin.read(1)
        events.instant("received")
    """
    path = events.listen(tmp_path / "sender.jsonl")
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "receiver.jsonl"],
        stdin=subprocess.PIPE,
    )
    with events.span("sending", to=child.pid):
        child.communicate(b"x")
    events.close()
    assert child.returncode == 0
    found = {
        event["name"]: event
        for event in trace_of(tmp_path, path, tmp_path / "receiver.jsonl")
        if event["ph"] != "M"
    }
    sending = found["sending"]
    assert sending["ts"] <= found["received"]["ts"] <= sending["ts"] + sending["dur"]
    assert sending["tid"] == os.getpid()
    assert sending["pid"] != found["received"]["pid"]
