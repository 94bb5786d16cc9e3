"""Which checkpoints are trusted: complete, partial, damaged, and how many are kept."""

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import DataError
from cairn.train.checkpoint import export as exporting
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.piece import whole
from cairn.train.checkpoint.save import Saver


def make(root, step, complete=True, content=b"weights" * 100):
    folder = folders.folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(content)
    (folder / "about.json").write_bytes(b"{}")
    if complete:
        folders.mark_complete(folder, step)
    return folder


def test_the_newest_complete_one_is_taken_and_the_rest_explained(tmp_path):
    make(tmp_path, 10)
    make(tmp_path, 20)
    make(tmp_path, 30, complete=False)
    warnings = []
    assert folders.newest(tmp_path, warnings) == folders.folder_of(tmp_path, 20)
    assert warnings == [
        "passed over step-00000030: it has no COMPLETE: the run ended while it was written"
    ]
    assert folders.newest(tmp_path / "absent", []) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "data").write_bytes(b"weights" * 99), "693 bytes, 700 were written"),
        (lambda f: (f / "data").unlink(), "data is missing"),
        (lambda f: (f / "data").write_bytes(b"Weights" + b"weights" * 99), "damaged"),
        (lambda f: (f / "COMPLETE").write_bytes(b"{"), "COMPLETE cannot be read"),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, reason):
    make(tmp_path, 10)
    damage(make(tmp_path, 20))
    warnings = []
    assert folders.newest(tmp_path, warnings) == folders.folder_of(tmp_path, 10)
    assert reason in warnings[0]
    assert any(reason in line for line in folders.listed(tmp_path))


def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path, monkeypatch):
    folder = make(tmp_path, 10)

    def bad(path, number):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(folders, "_check", bad)
    assert "cannot be read: Input/output error" in folders.complaint(folder)


def test_an_export_while_the_run_goes_on_takes_the_next_one(tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"
    make(root, 10)
    tried = []

    def reading(checkpoint, out, tokenizer):
        tried.append(checkpoint.name)
        if len(tried) == 1:  # the run saves and makes room
            make(root, 20)
            folders.remove(checkpoint)
            raise FileNotFoundError(checkpoint)

    monkeypatch.setattr(exporting, "export_checkpoint", reading)
    assert exporting.export_newest(tmp_path, tmp_path / "model", None).name == "step-00000020"
    assert tried == ["step-00000010", "step-00000020"]


def test_a_run_does_not_begin_anew_because_a_disk_is_bad(tmp_path):
    folder = make(tmp_path, 10)
    (folder / "data").write_bytes(b"")
    with pytest.raises(DataError, match="none of the 1 checkpoints"):
        folders.newest(tmp_path, [])


def test_a_long_file_is_checked_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "CHUNK", 16)
    folder = make(tmp_path, 1, content=bytes(100))
    assert folders.complaint(folder) is None
    (folder / "data").write_bytes(bytes(99) + b"x")
    assert "damaged" in folders.complaint(folder)


def test_a_damaged_one_that_was_passed_over_does_not_outlive_the_good_ones(tmp_path):
    """A run goes on from step 10 because 40 is damaged; what it saves next is the newest, and is kept."""
    make(tmp_path, 10)
    (make(tmp_path, 40) / "data").write_bytes(b"something else")
    assert folders.newest(tmp_path, []) == folders.folder_of(tmp_path, 10)
    saver = Saver(tmp_path, keep=1, in_background=False)
    saver.save(20, {"w": whole(torch.ones(3))}, {})
    assert saver.problem() is None
    assert folders.complete_steps(tmp_path) == [20]
    warnings = []
    assert folders.newest(tmp_path, warnings) == folders.folder_of(tmp_path, 20)
    assert warnings == []
    assert (tmp_path / "step-00000040.passed-over" / "data").read_bytes() == b"something else"


def test_what_was_passed_over_is_bounded(tmp_path):
    """A run that goes back past a checkpoint again and again keeps the newest of those."""
    make(tmp_path, 1)
    for step in (10, 30, 20):
        make(tmp_path, step)
        folders.set_aside(tmp_path, 1)
        folders.keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000030.passed-over",
    ]


def test_files_of_other_ranks_may_take_a_while_to_be_seen(tmp_path, monkeypatch):
    """As on a network file system: first a name is missing, then its size is an old one."""
    folder = make(tmp_path, 5, complete=False)
    files = folders.files_of(folder)
    (folder / "data").rename(tmp_path / "hidden")
    missing, reasons = folders._missing, []

    def shown_later(folder, marker):
        reasons.append(missing(folder, marker))
        if len(reasons) == 1:
            (folder / "data").write_bytes(b"wei")
        elif len(reasons) == 2:
            (tmp_path / "hidden").rename(folder / "data")
        return reasons[-1]

    monkeypatch.setattr(folders, "_missing", shown_later)
    monkeypatch.setattr(folders, "POLL_S", 0.001)
    folders.mark_complete(folder, 5, files)
    assert reasons == ["data is missing", "data has 3 bytes, 700 were written", None]
    assert folders.complaint(folder) is None
    files["other"] = files["data"]
    with pytest.raises(DataError, match="other is missing"):
        folders.mark_complete(folder, 5, files, visible_s=0.01)


@given(st.sets(st.integers(1, 60), max_size=8), st.sets(st.integers(1, 60)), st.integers(1, 4))
def test_keeping_the_newest_never_loses_a_newer_one(tmp_path_factory, steps, unfinished, count):
    root = tmp_path_factory.mktemp("run")
    for step in steps:
        make(root, step, complete=step not in unfinished)
    complete = sorted(steps - unfinished)
    folders.keep_newest(root, count)
    assert folders.complete_steps(root) == complete[-count:]
    newest = max(complete, default=0)
    assert [s for s in folders.steps(root) if s > newest] == sorted(s for s in steps if s > newest)
