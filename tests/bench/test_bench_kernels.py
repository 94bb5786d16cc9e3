"""`cairn bench kernels` goes on after a failure, keeps what it has, and writes what the documents promise."""

import json

import pytest
import torch

from cairn.bench import kernels as bench
from cairn.bench import kernels_table, record
from cairn.cli.bench import bench as verb
from cairn.core.errors import DataError, HardwareError, UsageError
from cairn.kernels.kernel import Case, Cost, Prepared
from cairn.kernels.tooling import catalogue, measure
from cairn.kernels.tooling.measure import Ceiling, Row

CEILING = Ceiling(device="NVIDIA H200", bytes_per_s=4.2e12, flops_per_s={"bf16": 7.9e14})
PROMISED = {
    "kernel", "shape", "dtype", "ms", "tflops", "gbps", "fraction_of_ceiling", "anchor", "ratio_to_anchor", "error",
}  # fmt: skip


def case(shape: str, error: float = 0.0) -> Case:
    return Case("made_up", shape, "bf16", Cost(1.0, 1.0), lambda: Prepared(int, {}, lambda: error))


class Module:
    @staticmethod
    def cases():
        yield from (case("1 x 1"), case("2 x 2", error=1.0), case("3 x 3"))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that takes a millisecond for everything."""
    entry = catalogue.Entry("made_up", "made_up", "For this test.", False)
    monkeypatch.setattr(catalogue, "kernels", lambda: {"made_up": entry})
    monkeypatch.setattr(catalogue, "load", lambda name: Module)
    monkeypatch.setattr(measure, "require_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(measure, "measure_ceiling", lambda dtypes: CEILING)

    def timed(case, ceiling, budget_ms):
        if case.prepare().error() > case.tolerance:
            return Row(
                kernel=case.kernel, shape=case.shape, dtype=case.dtype, error=1.0, failure="wrong"
            )
        return row(case.shape)

    monkeypatch.setattr(bench, "measure_case", timed)


def row(shape: str, kernel: str = "made_up", **fields) -> Row:
    values = dict(
        ms=1.0, tflops=500.0, gbps=4000.0, fraction_of_ceiling=0.9, anchor="cuBLAS", ratio_to_anchor=1.05, error=1e-3
    )  # fmt: skip
    return Row(kernel=kernel, shape=shape, dtype="bf16", **{**values, **fields})


def test_a_failure_does_not_stop_the_run(gpu, capsys):
    assert verb.run(["kernels"]) == 1
    out = capsys.readouterr().out
    assert "2 x 2" in out
    assert "FAILED: wrong" in out
    assert "[3/3]" in out
    assert out.splitlines()[-1] == "3 cases, 1 failed"


def test_a_lost_gpu_ends_the_run(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_lost", lambda: "CUDA error: an illegal memory access")
    out = tmp_path / "kernels.json"
    with pytest.raises(HardwareError, match="made_up 2 x 2 has left the GPU unusable"):
        verb.run(["kernels", "--out", str(out), "--commit", "abc"])
    assert [r.shape for r in bench.read(out).rows] == ["1 x 1", "2 x 2"]


def test_json_is_one_document_with_what_is_promised(gpu, capsys):
    assert verb.run(["kernels", "--json", "--match", "3 x 3", "--commit", "abc"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"command", "commit", "date", "device", "versions", "ceiling", "rows"} == set(document)
    assert document["commit"] == "abc"
    assert document["command"] == "cairn bench kernels --match '3 x 3'"
    assert document["versions"]["torch"] == torch.__version__
    assert document["rows"][0].keys() >= PROMISED


def test_the_file_is_there_after_each_row(gpu, monkeypatch, tmp_path):
    out = tmp_path / "deep" / "kernels.json"

    def stopped(case, ceiling, budget_ms):
        if case.shape == "3 x 3":
            raise KeyboardInterrupt
        return row(case.shape)

    monkeypatch.setattr(bench, "measure_case", stopped)
    with pytest.raises(KeyboardInterrupt):
        verb.run(["kernels", "--out", str(out), "--commit", "abc"])
    assert [r.shape for r in bench.read(out).rows] == ["1 x 1", "2 x 2"]


def test_merge_keeps_what_was_not_measured_again(gpu, tmp_path, capsys):
    out = tmp_path / "kernels.json"
    source = record.origin("old", "NVIDIA H200", "abc")
    old = [row("9 x 9"), row("1 x 1", ms=99.0), row("5 x 5", kernel="other")]
    bench.write(bench.report(source, CEILING, old), out)
    assert verb.run(["kernels", "--out", str(out), "--merge", "--commit", "new"]) == 1
    rows = bench.read(out).rows
    assert bench.read(out).command == "old; cairn bench kernels"
    assert [r.commit for r in rows] == ["abc", "new", "new", "new", "abc"]
    assert [(r.kernel, r.shape) for r in rows] == [
        ("made_up", "9 x 9"),
        ("made_up", "1 x 1"),
        ("made_up", "2 x 2"),
        ("made_up", "3 x 3"),
        ("other", "5 x 5"),
    ]
    assert rows[1].ms == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--merge"], "--merge is given without --out"),
        (["--match", "nothing like this"], "no case has"),
        (["--only", "made"], "there is no kernel 'made'"),
    ],
)
def test_mistakes(gpu, arguments, words):
    with pytest.raises(UsageError, match=words):
        verb.run(["kernels", *arguments])


def test_without_git_the_commit_has_to_be_given(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(record, "current_commit", lambda: None)
    with pytest.raises(UsageError, match="commit that is measured is unknown"):
        verb.run(["kernels", "--out", str(tmp_path / "x.json")])


def test_without_a_gpu_there_is_a_hint():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(HardwareError) as raised:
        verb.run(["kernels"])
    assert "cairn kernels check" in (raised.value.hint or "")


def test_the_table():
    source = record.origin("cairn bench kernels", "NVIDIA H200", "abc")
    failed = Row(kernel="k", shape="2 | 2", dtype="fp8", failure="error 1 | 2")
    document = bench.report(source, CEILING, [row("8192 x 4096"), failed])
    text = kernels_table.markdown(document)
    assert "copy 4.2 TB/s, bf16 790 TFLOP/s" in text
    assert (
        "| made_up | 8192 x 4096 | bf16 | 1,000.0 us | 500 | 4,000 | 90% | cuBLAS | 1.05 | 1e-03 |"
        in text
    )
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines[:3]} == {len(kernels_table.HEADINGS) + 1}


def test_the_table_goes_between_its_marks(tmp_path):
    source = record.origin("cairn bench kernels", "NVIDIA H200", "abc")
    report, page = tmp_path / "k.json", tmp_path / "kernels.md"
    bench.write(bench.report(source, CEILING, [row("1 x 1")]), report)
    page.write_text(f"before\n{kernels_table.BEGIN}\nold\n{kernels_table.END}\nafter\n")
    assert kernels_table.main([str(report), str(page)]) == 0
    first = page.read_text()
    assert "old" not in first
    assert "1 x 1" in first
    assert first.startswith("before\n")
    assert first.endswith("\nafter\n")
    kernels_table.main([str(report), str(page)])
    assert page.read_text() == first
    with pytest.raises(DataError, match="no place for the table"):
        kernels_table.insert("nothing", "table")
    assert kernels_table.main([]) == 2


def test_a_file_of_another_kind_is_an_error(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"x\.json"):
        bench.read(path)
