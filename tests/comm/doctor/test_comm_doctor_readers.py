"""Files of every kind are read; damaged, strange and dangerous ones are refused with a reason."""

import json
import os
import pickle
from pathlib import Path

import pytest

from cairn.cli.comm.comm import run
from cairn.comm.doctor import samples
from cairn.comm.doctor.diagnose import diagnose
from cairn.comm.doctor.flight_recorder import read_trace
from cairn.comm.doctor.selftest import SelftestCase, cases, run_case
from cairn.core.errors import DataError

LOGS = [case for case in cases() if case.by == "log"]


def entry(sequence, *, op="nccl:all_reduce", state="completed", at=0, sizes=((8,),), **more):
    return {
        "record_id": sequence, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence, "p2p_seq_id": 0, "op_id": sequence, "profiling_name": op,
        "time_created_ns": at, "input_sizes": [list(size) for size in sizes],
        "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"],
        "state": state, "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": False, "timeout_ms": 600000, "is_p2p": False, "frames": [], **more,
    }  # fmt: skip


def dump(entries, ranks=4):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def write(folder: Path, rank: int, entries, ranks=4) -> Path:
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(dump(entries, ranks), protocol=2))
    return path


@pytest.mark.parametrize("case", LOGS, ids=lambda case: case.name)
def test_every_fault_in_a_log_is_named_and_nothing_else(case: SelftestCase):
    verdict = run_case(case)
    assert verdict.right, verdict.named
    assert verdict.evidence


@pytest.mark.parametrize("seed", range(20))
def test_healthy_logs_give_no_finding(seed, tmp_path):
    (tmp_path / "nccl.log").write_text(samples.nccl_log(seed=seed))
    (tmp_path / "inspector.jsonl").write_text(samples.inspector(seed=seed))
    (tmp_path / "sweep.txt").write_text(samples.sweep(seed=seed))
    found = diagnose([tmp_path], [64 << 20])
    assert found.findings == []
    assert sorted(found.read.values()) == ["Inspector", "NCCL log", "nccl-tests"]


class Dangerous:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path):
    marker = tmp_path / "executed"
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"entries": [Dangerous(marker)]}))
    with pytest.raises(DataError, match=r"is no flight-recorder dump.*system"):
        read_trace(path)
    assert not marker.exists()


@pytest.mark.parametrize("keep", [1, 7, 60, 200])
def test_a_dump_that_was_cut_off_is_refused(tmp_path, keep):
    path = write(tmp_path, 0, [entry(1)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="no flight-recorder dump"):
        diagnose([path])


def test_the_json_of_a_dump_says_the_same_as_its_pickle(tmp_path):
    entries = [entry(1), entry(2, state="scheduled")]
    path = write(tmp_path, 3, entries)
    text = tmp_path / "trace_3.json"
    text.write_text(json.dumps(dump(entries)))
    one, other = read_trace(path), read_trace(text)
    assert one.calls == other.calls
    assert one.groups == {"0": [0, 1, 2, 3]}


def test_nccl_dumps_name_the_rank_that_did_not_come(tmp_path):
    for rank in range(4):
        calls = [entry(1), entry(2)]
        if rank != 2:
            calls.append(entry(3, state="started", frames=[
                {"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 1},
                {"name": "step", "filename": "/job/train.py", "line": 42},
            ]))  # fmt: skip
        write(tmp_path, rank, calls)
    finding = diagnose([tmp_path]).findings[0]
    assert (finding.cause, finding.where) == ("hang", "rank 2")
    assert "all_reduce #3" in finding.evidence[0]
    assert "rank 2 ends with all_reduce #2" in finding.evidence[1]
    assert "train.py:42 step" in finding.evidence[-1]


def test_clocks_that_differ_are_no_straggler_where_the_end_is_known(tmp_path):
    """Host of rank 1 is an hour ahead; rank 0 comes 50 ms later than all others."""
    for rank in range(3):
        skew = 3600 * 10**9 if rank == 1 else 0
        calls = []
        for number in range(1, 9):
            end = number * 10**9 + skew
            begin = end - (10**6 if rank == 0 else 51 * 10**6)
            calls.append(entry(number, at=begin, time_discovered_completed_ns=end))
        write(tmp_path, rank, calls, ranks=3)
    findings = diagnose([tmp_path]).findings
    assert [(one.cause, one.where) for one in findings] == [("straggler", "rank 0")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.log", b"", "is empty"),
        ("notes.txt", b"all is well\n", "nothing in it is known"),
        ("core.bin", b"\x7fELF\0\0\0", "binary file"),
        ("trace.pickle", pickle.dumps({"entries": []}, protocol=2), "no rank in its name"),
        ("trace_1", pickle.dumps([1, 2], protocol=2), "no flight-recorder dump"),
        ("insp.jsonl", b'{"coll_perf": {"coll": "AllReduce"}}\n', "insp.jsonl:1"),
        ("insp.jsonl", b'{"header": {}, "coll_perf": null}\n', "no finished collective"),
        ("nccl.log", b"something about NCCL INFO but no line\n", "no line of NCCL"),
        ("sweep.txt", b"# nccl-tests version 2.19\n# out-of-place\n", "no row"),
        ("probe.json", b'{"kind": "cairn comm probe"', "probe.json"),
    ],
)
def test_what_nobody_can_read_is_refused(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        diagnose([path])
    assert caught.value.hint


def test_missing_files_empty_folders_and_two_dumps_of_a_rank_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        diagnose([tmp_path / "nowhere.log"])
    with pytest.raises(DataError, match="empty folder"):
        diagnose([tmp_path])
    one = write(tmp_path, 1, [entry(1)])
    other = tmp_path / "again_1"
    other.write_bytes(one.read_bytes())
    with pytest.raises(DataError, match="both of rank 1"):
        diagnose([one, other])


def test_the_verb_says_what_it_found_and_leaves_with_its_status(tmp_path, capsys):
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(samples.nccl_log())
    bad.write_text(samples.nccl_log(between="NET/Socket/0", network="Socket"))
    assert run(["doctor", str(good)]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert run(["doctor", str(bad), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["cause"] == "transport downgrade"
    assert run(["doctor", str(bad)]) == 1
    text = capsys.readouterr().out
    assert "because" in text
    assert "do " in text
