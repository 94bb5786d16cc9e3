"""Ceilings: the best seen is kept, a file that is of no use is measured anew, and two writers lose nothing."""

import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import ceilings, ceilings_here, measured

from cairn.hw.ceilings import load, save
from cairn.hw.probe import probe
from cairn.labs.calibration import learn, merge, ready

positive = st.floats(1e-9, 1e15)


@given(st.lists(positive, min_size=1, max_size=6))
def test_of_rates_the_highest_and_of_durations_the_shortest_stays(values):
    kept = ceilings()
    for value in values:
        found = {
            "copy": measured(value, how=f"copy at {value}"),
            "launch": measured(value, "s"),
            "matmul.fp32": measured(value, "FLOP/s"),
            "matmul.fp8": measured(value, "FLOP/s"),
        }
        kept = merge(kept, found).ceilings
    assert kept.copy.value == max(1e10, *values)
    assert kept.launch.value == min(3e-6, *values)
    assert kept.matmul["fp32"].value == max(2e10, *values)
    assert kept.matmul["fp8"].value == max(values)
    assert kept.host_copy == kept.copy  # on a CPU it is the same memory
    assert kept.absent == {}  # what was measured is not absent any more
    if kept.copy.value > 1e10:
        assert kept.copy.how == f"copy at {kept.copy.value}"


def test_the_rest_is_untouched():
    merged = merge(ceilings(), {"copy": measured(2e10), "launch": measured(4e-6, "s")})
    assert merged.better == ["copy"]
    before, after = (msgspec.to_builtins(one) for one in (ceilings(), merged.ceilings))
    assert {name for name in before if before[name] != after[name]} == {"copy", "host_copy"}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"copi": measured(1.0)}, "no ceiling 'copi'"),
        ({"identity": measured(1.0)}, "no ceiling 'identity'"),
        ({"copy": measured(float("nan"))}, "nan"),
        ({"copy": measured(0.0)}, "0.0"),
        ({"copy": measured(1.0, "s")}, "B/s, not in s"),
    ],
)
def test_nonsense_is_refused(found, message):
    with pytest.raises(ValueError, match=message):
        merge(ceilings(), found)


@pytest.fixture(autouse=True)
def busy(monkeypatch):
    """Whether other programs hold the cores; nobody does unless a test says so."""
    state = {"now": False}
    monkeypatch.setattr("cairn.labs.calibration.is_busy", lambda before=None: state["now"])
    return state


def rebuilt(path):
    said, times = [], []

    def measure(machine):
        times.append(machine)
        return ceilings_here()

    ready(probe(), measure, said.append, path)
    return len(times) == 1, said


def test_ceilings_of_a_busy_machine_are_measured_again_when_it_is_idle(tmp_path, busy):
    path = tmp_path / "machine.json"
    busy["now"] = True
    assert rebuilt(path)[0]
    assert load(path).busy
    assert rebuilt(path) == (False, [])  # still busy: what there is has to do
    busy["now"] = False
    again, said = rebuilt(path)
    assert again
    assert "while other programs held the cores" in said[0]
    assert not load(path).busy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "does not exist"),
        (b"", "is damaged"),
        (b'{"schema": 1, "measured_at": ', "is damaged"),
        (b'{"schema": "one"}', "is damaged"),
        (msgspec.json.encode(msgspec.structs.replace(ceilings(), schema=99)), "has schema 99"),
        (msgspec.json.encode(ceilings()), "another machine (CPU: a CPU when measured"),
    ],
)
def test_a_file_of_no_use_is_measured_anew_and_said(tmp_path, text, reason):
    path = tmp_path / "cache" / "machine.json"
    if text is not None:
        path.parent.mkdir()
        path.write_bytes(text)
    was_rebuilt, said = rebuilt(path)
    assert was_rebuilt
    assert len(said) == 1
    assert reason in said[0]
    assert load(path) == ceilings_here()
    assert rebuilt(path) == (False, [])


def test_a_file_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path):
    path = tmp_path / "file" / "machine.json"
    path.parent.write_text("not a folder")
    was_rebuilt, said = rebuilt(path)
    assert was_rebuilt
    assert "for this run only" in said[-1]


def test_what_a_lab_measured_is_kept(tmp_path):
    path = tmp_path / "machine.json"
    save(ceilings(), path)
    assert learn(ceilings(), {"copy": measured(9e9)}, print, path).better == []
    assert learn(ceilings(), {"copy": measured(3e10)}, print, path).better == ["copy"]
    assert load(path).copy.value == 3e10


def test_many_at_once_lose_nothing(tmp_path):
    path = tmp_path / "machine.json"
    save(ceilings(), path)
    names = ["copy", "disk_write", "loopback_throughput", "disk_read_warm"]
    threads = [
        threading.Thread(
            target=learn, args=(ceilings(), {name: measured(1e12 + step)}, print, path)
        )
        for name in names
        for step in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {getattr(load(path), name).value for name in names} == {1e12 + 7}
