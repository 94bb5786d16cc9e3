"""`cairn bench train` on a small model: rows, files, merging, failures."""

import json
from pathlib import Path

import pytest

from cairn.bench import train as bench
from cairn.bench.train import TrainReport, TrainRow, TrainSetup
from cairn.cli.main import main
from cairn.core.errors import ConfigError

ARGS = ["bench", "train", "--model", "tiny-qwen3", "--seq", "32", "--batch", "2", "--steps", "1",
        "--rounds", "1", "--warmup", "1", "--device", "cpu"]  # fmt: skip


def test_rows_have_what_the_table_needs(tmp_path, capsys):
    out = tmp_path / "training.json"
    assert main([*ARGS, "--dtype", "fp32", "--out", str(out), "--commit", "abc"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    again = [
        *ARGS,
        "--dtype",
        "fp8",
        "--microbatch",
        "1",
        "--out",
        str(out),
        "--commit",
        "abc",
        "--merge",
    ]
    assert main([*again, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert [row["dtype"] for row in document["rows"]] == ["fp32", "fp8"]
    for row in document["rows"]:
        for name in (
            "model",
            "dtype",
            "tokens_per_s",
            "mfu",
            "peak_gib",
            "seq",
            "batch",
            "of_measured",
        ):
            assert name in row
        assert row["tokens_per_s"] > 0
        assert row["failure"] is None
    assert bench.read(out).rows[0].model == "tiny-qwen3"


def test_measuring_again_replaces_a_row():
    origin = bench.record.RecordOrigin(command="c", commit="x", date="d", device="v", versions={})
    one, two = (
        TrainRow(model="a", dtype="bf16", seq=1, batch=1, microbatch=1, step_ms=ms)
        for ms in (1.0, 2.0)
    )
    other = TrainRow(model="b", dtype="bf16", seq=1, batch=1, microbatch=1)
    old = bench.report(origin, [one, other])
    assert isinstance(old, TrainReport)
    new = bench.report(origin, [two], old)
    assert [(row.model, row.step_ms) for row in new.rows] == [("b", None), ("a", 2.0)]


def test_what_cannot_be_measured_is_refused(capsys):
    with pytest.raises(ConfigError, match="batch 8 % microbatch 3"):
        bench.check(TrainSetup(model="tiny-qwen3", microbatch=3))
    assert main([*ARGS, "--merge"]) == 2
    assert main(["bench", "train", "--model", "qwen9"]) == 2
    assert "qwen9" in capsys.readouterr().err


def test_a_profile_adds_up(tmp_path, capsys):
    out = tmp_path / "trace.json"
    args = ["profile", "train", "--model", "tiny-qwen3", "--seq", "16", "--batch", "2", "--steps", "1",
            "--microbatch", "1", "--recompute", "none", "--device", "cpu", "--out", str(out)]  # fmt: skip
    assert main([*args, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [part["part"] for part in document["parts"]] == ["forward", "backward", "norm", "update"]
    assert sum(part["share"] for part in document["parts"]) == pytest.approx(1)
    assert sum(kernel["share"] for kernel in document["kernels"]) == pytest.approx(1)
    held = {row["what"]: row for row in document["memory"]}
    assert held["weights"]["measured"] == held["weights"]["predicted"]
    names = {event.get("name") for event in json.loads(out.read_text())["traceEvents"]}
    assert {"train step", "aten::mm"} <= names
    assert main([*args, "--lora", "2"]) == 0
    assert "an adapter of rank 2" in capsys.readouterr().out


def test_without_a_model_the_rows_of_the_record_are_measured(tmp_path, monkeypatch):
    """All of them go to the file: none of those that are there is lost."""
    names = ("model", "dtype", "states", "seq", "batch", "microbatch", "plain")

    def measured(setup, ran):
        rest = {name: getattr(setup, name) for name in names}
        rest["microbatch"] = setup.microbatch or setup.batch
        return TrainRow(**rest, tokens_per_s=1.0, step_ms=1.0, loss=1.0)

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr("cairn.models.checkpoint.check_device", lambda device: None)
    monkeypatch.setattr("cairn.bench.limit.device_name", lambda device: "a GPU")
    out = tmp_path / "training.json"
    asked = ["bench", "train", "--device", "cuda", "--out", str(out), "--commit", "abc"]
    assert main(asked) == 0
    record = bench.read(Path("benchmarks/h200/training.json"))
    found, wanted = (
        [[getattr(row, name) for name in names] for row in document.rows]
        for document in (bench.read(out), record)
    )
    assert sorted(found) == sorted(wanted)
    assert main([*asked, "--steps", "3"]) == 2
