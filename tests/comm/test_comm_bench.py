"""`cairn comm bench`: the table and the JSON of nccl-tests, every operation checked, mistakes refused at once."""

import json
import re

import pytest

from cairn.cli.comm_bench import sizes_of
from cairn.cli.main import main
from cairn.comm.bench_report import figure
from cairn.comm.bench_sweep import Timing, bus_factor
from cairn.comm.nccl_tests import read_sweep
from cairn.core.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def run(capsys, *words):
    status = main(["comm", "bench", *words])
    return status, capsys.readouterr()


def test_one_document_for_all_backends(capsys, tmp_path):
    page = tmp_path / "page.html"
    words = "all_reduce -b 1K -e 16K -f 4 --ranks 2 --backends gloo,cairn,mpi -n 4 -w 1 --json"
    status, out = run(capsys, *words.split(), "--html", str(page))
    assert status == 0
    found = json.loads(out.out)
    assert found["version"] == 2
    assert [row["size"] for row in found["results"]] == [1024, 1024, 4096, 4096, 16384, 16384]
    assert {row["backend"] for row in found["results"]} == {"gloo", "cairn"}
    for row in found["results"]:
        for form in ("out_of_place", "in_place"):
            assert row[form].keys() == {"time", "alg_bw", "bus_bw", "nwrong"}
            assert row[form]["nwrong"] == 0
            spread = row[f"{form}_per_iter"]
            assert spread["min_us"] <= spread["p50_us"] <= spread["p99_us"] <= spread["max_us"]
            assert len(spread["times_us"]) == row["actual_iterations"] == 4
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert "without MPI" in found["skipped"]["mpi"]
    assert "skipped mpi" in out.err
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "http" not in text


def test_a_table_that_the_reader_of_nccl_tests_reads(capsys, tmp_path):
    written = tmp_path / "sweep.json"
    words = [
        "all_reduce",
        "-b1K",
        "-e",
        "64K",
        "-f",
        "8",
        "-g",
        "2",
        "--backends",
        "cairn",
        "-n",
        "3",
        "-w",
        "1",
        "-I",
    ]
    status, out = run(capsys, *words, "-J", str(written))
    assert status == 0
    table = tmp_path / "sweep.txt"
    table.write_text(out.out)
    from_table, from_json = read_sweep(table), read_sweep(written)
    assert [point.bytes for point in from_table] == [1024, 8192, 65536]
    assert [point.bytes for point in from_json] == [1024, 8192, 65536]
    for one, other in zip(from_table, from_json, strict=True):
        assert one.us == pytest.approx(other.us, rel=0.01, abs=0.1)
    assert re.search(r"^# Avg bus bandwidth    : [0-9.e-]+ $", out.out, re.MULTILINE)
    assert "i_p99" in out.out


@pytest.mark.parametrize(
    "words",
    [
        "all_gather -d bfloat16 --ranks 3", "reduce_scatter -o max -d int64 --ranks 3",
        "alltoall -d half",
        "broadcast -r 1 -d uint8", "reduce -r 1 -o prod -d int32", "sendrecv", "gather", "scatter -r 1",
        "all_reduce -o min -d double",
    ],
)  # fmt: skip
def test_every_operation_is_right_on_both(capsys, words):
    status, out = run(
        capsys,
        *words.split(),
        *["-b", "100", "-e", "20000", "-f", "100", "-n", "1", "-w", "1", "--json"],
    )
    assert status == 0
    found = json.loads(out.out)
    assert len(found["results"]) == 4
    assert found["out_of_bounds"]["count"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("all_reduced", "did you mean 'all_reduce'"), ("all_reduce --ranks 1", "1 ranks"),
        ("all_reduce -b 2M -e 1M", "sizes from 2M to 1M"), ("all_reduce -f 1", "step factor of 1"),
        ("all_reduce --backends glo", "did you mean 'gloo'"), ("all_reduce -r 2", "cannot be the root"),
        ("all_reduce -n 0", "0 iterations"), ("all_reduce --backends mpi", "none of the backends is here"),
        ("all_reduce -o avg -d int32", "not exact"), ("all_reduce -b x", "x"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(capsys, words, said):
    status, out = run(capsys, *words.split())
    assert status == 2
    assert said in out.err


def test_sizes_as_nccl_tests_counts_them():
    assert sizes_of("1K", "1M", 4, "") == [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
    assert sizes_of("8", "32", 2, "8") == [8, 16, 24, 32]
    assert sizes_of("1G", "1G", 2, "") == [1 << 30]
    with pytest.raises(UsageError):
        sizes_of("0", "1M", 2, "")


def test_bus_factors():
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("alltoall", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("sendrecv", 4) == 1


def test_numbers_fit_their_columns():
    for value in (0, 0.123, 9.9, 123.4, 99999.0, 1234567.8, 12345678.9, 3e9):
        assert len(figure(value, 7)) <= 8
    assert figure(45.98, 7) == "  45.98"
    times = Timing(times_us=[1.0, 2.0, 3.0, 4.0, 100.0], wrong=0)
    assert times.quantile(0.5) == 3
    assert times.mean_us == 22
