"""`cairn comm bench`: the table and the JSON of nccl-tests, every operation checked, mistakes refused at once."""

import json
import re

import pytest

from cairn.cli.comm.comm_bench import sizes_of
from cairn.cli.main import main
from cairn.comm import bench_mpi
from cairn.comm.bench_operations import RankData
from cairn.comm.bench_ranks import BenchRankFailed
from cairn.comm.bench_report import figure
from cairn.comm.bench_spec import BenchTiming
from cairn.comm.bench_sweep import bus_factor
from cairn.comm.nccl_tests import read_sweep
from cairn.core.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NO_MPI = bench_mpi.missing()


def run(capsys, *words):
    status = main(["comm", "bench", *words])
    return status, capsys.readouterr()


def test_one_document_for_all_backends(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_mpi, "missing", lambda: "it is not installed")
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
    assert found["skipped"]["mpi"] == "it is not installed"
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
        "all_gather -d bfloat16 --ranks 3",
        "reduce_scatter -o max -d int64 --ranks 3",
        "alltoall -d half",
        "broadcast -r 1 -d uint8",
        "reduce -r 1 -o prod -d int32",
        "sendrecv",
        "gather",
        "scatter -r 1",
        "all_reduce -o min -d double",
    ],
)
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


def test_every_flag_of_nccl_tests_is_taken(capsys):
    words = "all_reduce_perf -t1 -g 2 -b 1K -e 4K -f 4 -n 2 -m 3 -w 1 -N 2 -p 1 -c 1 -o sum -d float -r 0"
    words += " -z 0 -y 0 -T 60 -G 0 -C 1 -S 1 -a 1 -R 0 -x 0 -D 0 -V 0 -M 0 --backends cairn"
    status, out = run(capsys, *words.split())
    assert status == 0
    rows = [line.split() for line in out.out.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == ["1024", "4096"] * 2  # -N
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", row[-1]) for row in rows)  # -S
    assert "-z 0 changes nothing" in out.err
    status, out = run(capsys, *words.split(), "--json")
    found = json.loads(out.out)
    assert found["config"]["aggregated_iterations"] == 3


def test_the_long_words_of_nccl_tests(capsys):
    words = "broadcast --ngpus 2 --minbytes 8 --maxbytes=8 --iters 1 --warmup_iters 1 --local_register=0"
    status, out = run(capsys, *words.split(), "--run_cycles", "2", "--backends", "cairn", "--json")
    assert status == 0
    assert [row["size"] for row in json.loads(out.out)["results"]] == [8, 8]


def test_every_type_and_reduction_in_one_run(capsys, tmp_path):
    page = tmp_path / "page.html"
    words = "all_reduce -b 64 -e 64 -n 1 -w 1 -d all -o all --backends cairn --json"
    status, out = run(capsys, *words.split(), "--html", str(page))
    assert status == 0
    found = json.loads(out.out)
    pairs = {(row["type"], row["redop"]) for row in found["results"]}
    assert len(pairs) == len(found["results"]) == 8 * 4
    assert found["out_of_bounds"]["count"] == 0
    assert "bfloat16 prod" in page.read_text()


@pytest.mark.parametrize("ranks", [2, 7, 64])
@pytest.mark.parametrize("kind", ["uint8", "int8", "bfloat16", "half", "float"])
def test_products_are_exact_in_every_type_on_any_number_of_ranks(kind, ranks):
    place = RankData(
        0, ranks, 8, type=kind, reduction="prod", root=0, in_place=False, group=None, device="cpu"
    )
    product = place.values(0)
    for rank in range(1, ranks):
        product = product * place.values(rank)
    assert place.reduced().tolist() == product.tolist()


@pytest.mark.skipif(NO_MPI is not None, reason=f"no MPI: {NO_MPI}")
@pytest.mark.parametrize(
    "words",
    [
        "all_reduce -o prod", "all_gather", "reduce_scatter -o min", "alltoall", "broadcast -r 1",
        "reduce -r 1", "sendrecv", "gather -r 1", "scatter",
    ],
)  # fmt: skip
def test_mpi_beside_ours(capsys, words):
    """Ranks of mpiexec, both backends in turns."""
    words += " -b 240 -e 240 -n 2 -w 1 -d int32 --backends cairn,mpi --json"
    status, out = run(capsys, *words.split())
    assert status == 0
    found = json.loads(out.out)
    assert [row["backend"] for row in found["results"]] == ["cairn", "mpi"]
    assert found["out_of_bounds"]["count"] == 0


@pytest.mark.skipif(NO_MPI is not None, reason=f"no MPI: {NO_MPI}")
def test_mpi_that_has_no_such_type_is_left_out(capsys):
    words = "all_reduce -b 8 -e 8 -n 1 -w 1 -d half --backends cairn,mpi"
    status, out = run(capsys, *words.split())
    assert status == 0
    assert "skipped mpi: it has no half" in out.err


def test_mpi_whose_starter_fails_says_what_it_said(monkeypatch, tmp_path):
    starter = tmp_path / "mpiexec"
    starter.write_text("#!/bin/sh\necho there are no slots >&2\nexit 3\n")
    starter.chmod(0o755)
    monkeypatch.setattr(bench_mpi, "program", lambda: str(starter))
    with pytest.raises(BenchRankFailed, match=r"status 3:\nthere are no slots"):
        bench_mpi.run_mpi(2, [], lambda size: None, timeout_s=60)


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(capsys, tmp_path):
    for flag in ("-J", "--html"):
        for path in (tmp_path, tmp_path / "no" / "x.json"):
            status, out = run(capsys, "all_reduce", flag, str(path))
            assert status == 2
            assert f"cannot write {path}" in out.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("all_reduced", "did you mean 'all_reduce'"), ("all_reduce --ranks 1", "1 ranks"),
        ("all_reduce -b 2M -e 1M", "sizes from 2M to 1M"), ("all_reduce -f 1", "step factor of 1"),
        ("all_reduce --backends glo", "did you mean 'gloo'"), ("all_reduce -r 2", "cannot be the root"),
        ("all_reduce -n 0", "0 iterations"), ("all_reduce -g 64 --backends nccl", "none of the backends is here"),
        ("all_reduce -G 4", "--cudagraph 4: nothing here has that"), ("all_reduce -m 0", "-m 0 -N 1"),
        ("all_reduce -N 0", "-m 1 -N 0"), ("all_reduce -t 40 -g 2", "80 ranks"), ("all_reduce -a 4", "4"),
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
    times = BenchTiming(times_us=[1.0, 2.0, 3.0, 4.0, 100.0], wrong=0)
    assert times.quantile(0.5) == 3
    assert times.mean_us == 22
