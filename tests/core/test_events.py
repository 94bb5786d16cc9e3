"""Events reach the file from every kind of process, and never get in the way of the program."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core import events
from cairn.core.errors import ConfigError
from cairn.core.records import Dropped, Instant, Process, Scalar, Span, Thread, read


@pytest.fixture(autouse=True)
def _closed():
    yield
    events.close()


def names(path, kind=Span | Instant | Scalar):
    return [record.name for record in read(path) if isinstance(record, kind)]


def run_script(text: str, *args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *args],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_spans_instants_and_scalars_are_written_with_their_fields(tmp_path):
    before = time.monotonic_ns()
    path = events.listen(tmp_path / "run.jsonl", name="test")
    with events.span("outer", step=1, name="a field may have any name") as outer:
        events.instant("moment", request="r7")
        events.scalar("loss", 2.5, step=1)
        outer.note(tokens=3)
    events.close()
    after = time.monotonic_ns()

    process, thread, moment, loss, span = read(path)
    assert process.pid == os.getpid()
    assert process.name == "test"
    assert abs(process.wall_ns - time.time_ns()) < 60e9
    assert before <= process.monotonic_ns <= moment.at_ns <= loss.at_ns <= after
    assert thread == Thread(threading.get_native_id(), threading.current_thread().name)
    assert moment == Instant("moment", moment.at_ns, thread.thread, {"request": "r7"})
    assert loss == Scalar("loss", loss.at_ns, thread.thread, 2.5, {"step": 1})
    assert span.start_ns <= moment.at_ns <= span.start_ns + span.duration_ns
    assert span.fields == {"step": 1, "name": "a field may have any name", "tokens": 3}
    assert span.error is None


def test_a_span_that_ends_with_an_exception_says_so_and_lets_it_pass(tmp_path):
    path = events.listen(tmp_path / "run.jsonl")
    with pytest.raises(ZeroDivisionError), events.span("divide"):
        _ = 1 / 0
    events.close()
    assert [record.error for record in read(path) if isinstance(record, Span)] == [
        "ZeroDivisionError"
    ]


def test_while_nobody_listens_nothing_is_kept():
    assert not events.listening()
    assert events.span("a", x=1) is events.span("b")

    def record():
        for step in range(1000):
            with events.span("span", step=step) as span:
                span.note(more=step)
            events.instant("instant", step=step)
            events.scalar("scalar", step)

    record()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        record()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000  # bytes, for three thousand events


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


class Unprintable2(Unprintable):
    def __float__(self):
        raise RuntimeError("no")


def cycle():
    items = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (object, "<class 'object'>"),
        (1 + 2j, "(1+2j)"),
        ([1, 1 + 2j], [1, "(1+2j)"]),
        (Unprintable(), "<Unprintable whose repr raises RuntimeError>"),
        (cycle(), "[[...]]"),
        ("half \ud800", "half \\ud800"),
        ({(1, object): 2}, {"(1, <class 'object'>)": 2}),
        (float("nan"), None),
        (b"ab", "YWI="),
    ],
)
def test_any_value_can_be_a_field(tmp_path, value, written):
    path = events.listen(tmp_path / "run.jsonl")
    events.instant("strange", value=value)
    with events.span("name \udfff", **{"key \ud800": value}):
        pass
    events.close()
    *_, instant, span = read(path)
    assert instant.fields == {"value": written}
    assert span.name == "name \\udfff"


@pytest.mark.parametrize("value", ["text", None, Unprintable2(), 10**400, float("nan")])
def test_a_scalar_that_is_no_number_is_written_as_one_that_is_missing(tmp_path, value):
    path = events.listen(tmp_path / "run.jsonl")
    events.scalar("loss", value)
    events.close()
    assert list(read(path))[-1].value is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(), item, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_no_field_makes_the_file_unreadable(tmp_path_factory, fields):
    path = events.listen(tmp_path_factory.mktemp("fields") / "run.jsonl")
    events.instant("event", **fields)
    events.close()
    assert names(path) == ["event"]
    for line in path.read_bytes().splitlines():
        json.loads(line)


def test_a_full_queue_drops_and_counts_without_blocking(tmp_path, monkeypatch):
    monkeypatch.setattr("cairn.core.sink.PAUSE_S", 3600)  # the writer sleeps until it is closed
    path = events.listen(tmp_path / "run.jsonl", limit=10)
    threads = [
        threading.Thread(target=lambda: [events.instant("event") for _ in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    records = list(read(path))[1:]
    dropped = sum(record.count for record in records if isinstance(record, Dropped))
    kept = [record for record in records if isinstance(record, Instant | Thread)]
    assert 10 <= len(kept) <= 10 + len(threads)
    assert len(kept) + dropped == 4 * (100 + 1)  # each thread also says its name


def test_several_threads_write_whole_lines_under_their_own_names(tmp_path):
    path = events.listen(tmp_path / "run.jsonl")

    def work(number: int) -> None:
        for step in range(200):
            with events.span(f"work {number}", step=step):
                pass

    threads = [
        threading.Thread(target=work, args=[number], name=f"worker {number}") for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    records = list(read(path))
    assert {record.name for record in records if isinstance(record, Thread)} == {
        f"worker {number}" for number in range(4)
    }
    for number in range(4):
        steps = [
            r.fields["step"] for r in records if isinstance(r, Span) and r.name[-1] == f"{number}"
        ]
        assert steps == list(range(200))


def test_a_file_that_exists_is_never_written_into(tmp_path):
    paths = []
    for _ in range(3):
        paths.append(events.listen(tmp_path / "new" / "run.jsonl"))
        events.instant("event")
    events.close()
    assert [path.name for path in paths] == ["run.jsonl", "run.1.jsonl", "run.2.jsonl"]
    assert all(names(path) == ["event"] for path in paths)


def test_after_close_nothing_is_recorded(tmp_path):
    path = events.listen(tmp_path / "run.jsonl")
    span = events.span("too late")
    with span:
        events.close()
        events.close()
    events.instant("too late")
    assert names(path) == []
    assert not events.listening()


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"cannot write events to .*run.jsonl: (not a dir|file ex)"
    ):
        events.listen(tmp_path / "file" / "run.jsonl")
    assert not events.listening()


def test_the_environment_can_ask_for_events(tmp_path):
    assert events.listen_if_asked("serve", {}) is None
    path = events.listen_if_asked("serve", {"CAIRN_EVENTS": str(tmp_path / "events")})
    assert path == tmp_path / "events" / f"serve-{os.getpid()}.jsonl"
    assert next(read(path)).name == "cairn serve"


def test_the_rank_of_a_distributed_process_is_written(tmp_path, monkeypatch):
    ranks = {"3": 3, "": None, "three": None}
    for text, rank in ranks.items():
        monkeypatch.setenv("RANK", text)
        assert next(read(events.listen(tmp_path / f"rank{text}.jsonl"))).rank == rank


def test_events_are_written_when_the_program_ends(tmp_path):
    script = """
        import sys
        from cairn.core import events
        events.listen(sys.argv[1])
        events.instant("last words")
        sys.exit(3)
    """
    done = run_script(script, str(tmp_path / "run.jsonl"))
    assert (done.returncode, done.stderr) == (3, "")
    assert names(tmp_path / "run.jsonl") == ["last words"]


def test_a_forked_child_has_its_own_file_and_nothing_of_its_parents(tmp_path):
    script = """
        import os, sys
        from cairn.core import events, sink
        sink.PAUSE_S = 3600  # everything is still in the parent's queue when it forks
        events.listen(sys.argv[1], name="family")
        events.instant("before")
        with events.span("across"):
            pids = []
            for number in range(2):
                pid = os.fork()
                if pid == 0:
                    events.instant(f"child {number}")
                    grandchild = os.fork()
                    if grandchild == 0:
                        events.instant(f"grandchild {number}")
                        sys.exit(0)
                    os.waitpid(grandchild, 0)
                    sys.exit(0)
                pids.append(pid)
            silent = os.fork()
            if silent == 0:
                sys.exit(0)
            for pid in [*pids, silent]:
                assert os.waitpid(pid, 0)[1] == 0
        events.instant("after")
    """
    done = run_script(script, str(tmp_path / "run.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    files = {path: list(read(path)) for path in tmp_path.iterdir()}
    assert sorted(tuple(names(path)) for path in files) == [
        ("before", "across", "after"),
        ("child 0",),
        ("child 1",),
        ("grandchild 0",),
        ("grandchild 1",),
    ]
    for path, records in files.items():
        pid = records[0].pid
        assert path.name in ("run.jsonl", f"run.{pid}.jsonl")
        assert records[0].name == "family"
        assert [record.thread for record in records if isinstance(record, Thread)] == [pid]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_of_multiprocessing_loses_nothing_when_it_ends(tmp_path, method):
    path = events.listen(tmp_path / "run.jsonl")
    worker = multiprocessing.get_context(method).Process(target=_work, args=[tmp_path, method])
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    events.close()
    assert names(path) == []
    own = tmp_path / ("worker.jsonl" if method == "spawn" else f"run.{worker.pid}.jsonl")
    assert names(own) == ["work"] * 100


def _work(folder, method) -> None:
    if method == "spawn":
        events.listen(folder / "worker.jsonl")
    for _ in range(100):
        with events.span("work"):
            pass


def test_a_killed_process_leaves_a_file_that_can_be_read(tmp_path):
    script = """
        import sys
        from cairn.core import events
        events.listen(sys.argv[1])
        step = 0
        while True:
            with events.span("step", step=step):
                step += 1
    """
    path = tmp_path / "run.jsonl"
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), path])
    try:
        while not path.exists() or path.stat().st_size < 500_000:
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    spans = [record for record in read(path) if isinstance(record, Span)]
    assert len(spans) > 1000
    steps = [span.fields["step"] for span in spans]
    assert steps == sorted(steps)


FULL_DISK = """
    import resource, sys, time
    from cairn.core import events
    path = events.listen(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    while events.listening():
        events.instant("event")
        time.sleep(0.001)
    with events.span("ignored"):
        print("the program goes on")
"""
REMOVED_FOLDER = """
    import shutil, sys, time
    from cairn.core import events
    path = events.listen(sys.argv[1])
    shutil.rmtree(path.parent)
    while events.listening():
        events.instant("event")
        time.sleep(0.001)
    print("the program goes on")
"""
CHILD_OF_A_REMOVED_FOLDER = """
    import os, shutil, sys
    from cairn.core import events
    path = events.listen(sys.argv[1])
    if os.fork() == 0:
        shutil.rmtree(path.parent)
        path.parent.touch()  # a file where the folder was
        events.instant("event")
        print("the program goes on")
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (FULL_DISK, "file too large"),
        (REMOVED_FOLDER, "the file was removed"),
        (CHILD_OF_A_REMOVED_FOLDER, "file exists"),
    ],
    ids=["full disk", "removed folder", "child of a removed folder"],
)
def test_a_disk_that_fails_is_one_warning(tmp_path, script, reason):
    path = tmp_path / "events" / "run.jsonl"
    done = run_script(script, str(path))
    assert done.returncode == 0
    assert done.stdout == "the program goes on\n"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("warning: no more events are recorded in ")
    assert reason in done.stderr
    if script == FULL_DISK:
        assert isinstance(next(read(path)), Process)


def test_fork_while_events_are_written_never_hangs(tmp_path):
    script = """
        import os, sys, threading
        from cairn.core import events, sink
        sink.PAUSE_S = 0  # the writer is always at work, and holds its locks as often as it can
        events.listen(sys.argv[1])
        done = threading.Event()
        def work():
            while not done.is_set():
                events.instant("busy")
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for _ in range(30):
            pid = os.fork()
            if pid == 0:
                events.instant("child")
                events.close()
                os._exit(0)
            os.waitpid(pid, 0)
        done.set()
        for thread in threads: thread.join()
    """
    done = run_script(script, str(tmp_path / "run.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    children = [path for path in tmp_path.iterdir() if path.name != "run.jsonl"]
    assert len(children) == 30
    assert all(names(path) == ["child"] for path in children)
    assert set(names(tmp_path / "run.jsonl")) == {"busy"}
