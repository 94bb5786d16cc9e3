"""The lab record: nothing is lost, not by two writers at once, not by a line that was cut short."""

import multiprocessing
import os

import pytest
from lab_samples import ceilings, lab, outcome

from cairn.core.errors import DataError
from cairn.labs import record
from cairn.labs.entry import Entry, failed_entry, measured_entry, where_of
from cairn.labs.lab import judge

WHERE = where_of(ceilings(), "0.1", None)


def entry(name: str = "sample", at: str = "2026-01-01T00:00:00+00:00") -> Entry:
    one = lab(name)
    found = outcome()
    return measured_entry(
        one, found, judge(one, found), at=at, seconds=1.0, quick=True, where=WHERE
    )


def write_many(path, name, count):
    for number in range(count):
        record.append(entry(f"{name}-{number}"), path)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "new" / "labs.jsonl"
    assert record.read(path) == record.Record([], [])
    record.append(entry(), path)
    record.append(entry("other"), path)
    assert record.read(path) == record.Record([entry(), entry("other")], [])


def test_a_line_cut_short_is_left_out_and_said(tmp_path):
    path = tmp_path / "labs.jsonl"
    record.append(entry("first"), path)
    record.append(entry("torn"), path)
    os.truncate(path, path.stat().st_size - 40)
    record.append(entry("third"), path)
    found = record.read(path)
    assert [one.lab for one in found.entries] == ["first", "third"]
    assert len(found.trouble) == 1
    assert f"{path} line 2 is left out" in found.trouble[0]


def test_a_line_of_another_format_is_left_out_and_said(tmp_path):
    path = tmp_path / "labs.jsonl"
    path.write_text('{"schema": 7, "lab": "x"}\n[1]\n')
    record.append(entry(), path)
    found = record.read(path)
    assert [one.lab for one in found.entries] == ["sample"]
    assert "it has schema 7, not 1" in found.trouble[0]
    assert len(found.trouble) == 2


def test_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "labs.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, f"w{n}", 40)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    found = record.read(path)
    assert found.trouble == []
    expected = {f"w{n}-{number}" for n in range(4) for number in range(40)}
    assert {one.lab for one in found.entries} == expected
    assert len(found.entries) == len(expected)


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the lab record") as raised:
        record.append(entry(), tmp_path / "file" / "labs.jsonl")
    assert "CAIRN_DATA" in raised.value.hint


def test_a_full_disk_takes_half_a_line_back(tmp_path, monkeypatch):
    path = tmp_path / "labs.jsonl"
    record.append(entry("first"), path)
    before, real = path.read_bytes(), os.write

    def half(descriptor, data):
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(DataError, match="No space left"):
        record.append(entry("second"), path)
    assert path.read_bytes() == before


def test_the_newest_verdict_of_each_lab_counts():
    failed = failed_entry(
        lab(), "Traceback\nValueError: x", at="2026-02-01", seconds=1.0, quick=True, where=WHERE
    )
    early, late = entry(at="2026-01-01"), entry(at="2026-01-02")
    assert record.latest([early, late, failed, entry("b")]) == {"sample": late, "b": entry("b")}
    assert record.latest([failed])["sample"].status == "failed"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CAIRN_DATA": "/a/b", "XDG_DATA_HOME": "/x"}, "/a/b"),
        ({"XDG_DATA_HOME": "/x"}, "/x/cairn"),
    ],
)
def test_where_it_lies(environment, folder):
    assert str(record.data_folder(environment)) == folder
