"""`cairn lab`: what is printed, what is kept, and with which status it leaves."""

import json
from types import MappingProxyType

import msgspec
import pytest
from lab_samples import ceilings, ceilings_here, lab, outcome

from cairn.cli.learn.lab_progress import time_left
from cairn.cli.main import main
from cairn.hw.ceilings import identify, load, machine_file, save
from cairn.hw.probe import probe
from cairn.labs import catalogue, record


@pytest.fixture
def labs(tmp_path, monkeypatch):
    """A catalogue of three labs: one is fine, one raises, one needs what nobody has."""

    def broken(bench):
        raise RuntimeError("broken here")

    made = [lab("fine", outcome), lab("broken", broken), lab("distant", needs=("gpu", "root"))]
    known = MappingProxyType({one.name: one for one in made})
    monkeypatch.setattr(catalogue, "all_labs", lambda: known)
    monkeypatch.setattr("cairn.labs.needs.os.geteuid", lambda: 1000)
    # Whatever else runs here.
    monkeypatch.setattr("cairn.labs.busy.Watch.was_disturbed", lambda watch: False)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path / "data"))
    bare = msgspec.structs.replace(probe(), gpus=[])  # whatever this machine has
    monkeypatch.setattr("cairn.hw.probe.probe", lambda: bare)
    save(ceilings(identify(bare)), machine_file())
    return known


def status_and_output(capsys, *args):
    status = main(["lab", *args])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_one_lab_is_shown_whole_and_recorded(labs, capsys):
    status, out, err = status_and_output(capsys, "run", "fine")
    assert status == 0
    assert err == ""
    for part in ("Title of fine", "It is so.", "10 GB/s", "11 GB/s", "+10%", "±20%", "a & b",
                 "a note", "one cause", "cairn/hw/roofline.py:", "A Book (2001)", "Question 3?"):  # fmt: skip
        assert part in out
    assert "Answer 1." not in out
    assert [entry.lab for entry in record.read().entries] == ["fine"]
    assert "Answer 1." in status_and_output(capsys, "run", "fine", "--answers")[1]


def test_in_chinese(labs, capsys):
    _, out, _ = status_and_output(capsys, "run", "fine", "--lang", "zh")
    for part in ("中文 Title of fine", "假设", "预测", "实测", "中文 one cause", "思考题"):
        assert part in out
    assert "hypothesis" not in out


def test_a_lab_that_fails_does_not_stop_the_others(labs, capsys):
    status, out, err = status_and_output(capsys, "run", "--all", "--json")
    assert status == 1
    runs = {one["lab"]: one for one in json.loads(out)["runs"]}
    assert {name: one["status"] for name, one in runs.items()} == {
        "fine": "off",
        "broken": "failed",
        "distant": "skipped",
    }
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("RuntimeError: broken here")
    assert "needs gpu: this machine has no GPU" in runs["distant"]["verdict"]["en"]
    assert runs["fine"]["about"]["questions"][0]["answer"]["zh"] == "中文 Answer 1."
    assert [entry.lab for entry in record.read().entries] == ["fine", "broken"]


def test_labs_after_a_failure_still_run(labs, capsys):
    status, out, err = status_and_output(capsys, "run", "broken", "fine")
    assert status == 1
    assert "✗ broken: the lab failed: RuntimeError: broken here" in out
    assert "≠ fine" in out
    assert err.rstrip().endswith("RuntimeError: broken here")


def test_an_unmet_need_is_said_and_leaves_with_3(labs, capsys):
    status, out, err = status_and_output(capsys, "run", "distant")
    assert status == 3
    assert out == ""
    assert "lab 'distant' cannot run here: needs gpu: this machine has no GPU; needs root" in err
    assert record.read().entries == []
    status, out, err = status_and_output(capsys, "run", "distant", "fine")
    assert status == 3
    assert "distant" in out
    assert "needs gpu" in out
    assert [entry.lab for entry in record.read().entries] == ["fine"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "fin"], "did you mean 'fine'?"),
        (["run"], "give names, or --area AREA, or --all"),
        (["run", "fine", "--all"], "give names, or --area AREA, or --all"),
        (["run", "--area", "linx"], "did you mean 'linux'?"),
        (["run", "fine", "--html", "/nowhere/x.html"], "there is no folder /nowhere"),
        (["report", "--html", "/tmp"], "it is a folder"),
        (["lst"], "did you mean 'list'?"),
        (["list", "--lang", "fr"], "expected"),
    ],
)
def test_a_mistake_is_answered_with_a_way_out(labs, capsys, args, message):
    status, out, err = status_and_output(capsys, *args)
    assert (status, out) == (2, "")
    assert message in err


def test_the_list_marks_what_cannot_run(labs, capsys):
    status, out, _ = status_and_output(capsys, "list", "--area", "linux")
    assert status == 0
    assert "– distant" in out
    assert "3 labs; this machine can run 2" in out
    found = json.loads(status_and_output(capsys, "list", "--json")[1])
    assert [one["name"] for one in found] == ["fine", "broken", "distant"]
    assert [len(one["unmet"]) for one in found] == [0, 0, 2]


def test_the_report_reads_the_record(labs, capsys, tmp_path):
    assert "empty" in status_and_output(capsys, "report")[1]
    status_and_output(capsys, "run", "fine")
    with open(record.record_file(), "a") as file:
        file.write('{"schema": 1, "lab"')
    status, out, err = status_and_output(capsys, "report", "--html", str(tmp_path / "out.html"))
    assert status == 0
    assert "≠ fine" in out
    assert "line 2 is left out" in err
    assert "Title of fine" in (tmp_path / "out.html").read_text()
    assert json.loads(status_and_output(capsys, "report", "--json")[1])["runs"][0]["lab"] == "fine"


def test_ctrl_c_keeps_what_was_measured(labs, capsys, tmp_path):
    def interrupted(bench):
        raise KeyboardInterrupt

    object.__setattr__(labs["broken"], "run", interrupted)
    page = tmp_path / "out.html"
    status, out, err = status_and_output(capsys, "run", "--all", "--json", "--html", str(page))
    assert status == 130
    assert [run["lab"] for run in json.loads(out)["runs"]] == ["fine"]
    assert "stopped after 1 of 3 labs" in err
    assert "Title of fine" in page.read_text()


def test_a_record_that_cannot_be_written_costs_no_measurement(labs, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path / "file" / "below"))
    status, out, err = status_and_output(capsys, "run", "fine", "fine", "--json")
    assert status == 0
    assert json.loads(out)["runs"][0]["status"] == "off"
    assert err.count("cannot write the lab record") == 1


def test_a_broken_machine_file_is_measured_anew(labs, capsys, monkeypatch):
    machine_file().write_text('{"schema": 1, "measured')
    fresh = ceilings_here()
    monkeypatch.setattr("cairn.hw.calibrate.calibrate", lambda machine, **more: fresh)
    status, _, err = status_and_output(capsys, "run", "fine")
    assert status == 0
    assert "machine.json is damaged" in err
    assert load(machine_file()).measured_at == fresh.measured_at


def test_the_time_left_follows_the_pace():
    assert time_left(done=0, spent=0, inside=0, total=20) == 20
    assert time_left(done=10, spent=20, inside=5, total=20) == 10  # twice as slow as said
    assert time_left(done=20, spent=5, inside=3, total=20) == 0
