"""`cairn kernels`: names without torch, a status that says whether all is well, a page that is written."""

import json
import subprocess
import sys

import pytest

from cairn.cli import kernels as verb
from cairn.core.errors import HardwareError, UsageError
from cairn.kernels.tooling import build, catalogue
from cairn.kernels.tooling.build import Job
from cairn.kernels.tooling.compiled import Compiled
from cairn.kernels.tooling.machine_code import occupancy

GOOD = Compiled(
    kernel="a", variant="a 64", registers=32, warps=4, shared_bytes=1024, occupancy=occupancy(32, 1024, 4),
    mix={"float": 2}, opcodes={"FADD": 2}, stage_ms={"ptx": 1.0}, tools="triton 3.6.0",
    stages={"ptx": ".version 8.7", "sass": "/*0000*/ EXIT ;"}, register_operand=True,
)  # fmt: skip
BAD = Compiled(kernel="b", variant="b 64 [x]", registers=255, spill_store_bytes=8, warps=4)
JOBS = {
    "a": [Job("a", "a 64"), Job("a", "a 128"), Job("a", "other 128")],
    "b": [Job("b", "b 64 [x]")],
}


@pytest.fixture
def known(monkeypatch):
    """Two kernels, one good and one bad, already compiled."""
    entries = {
        name: catalogue.Entry(f"x.{name}", f"y.{name}", f"Does {name}.", False) for name in JOBS
    }
    monkeypatch.setattr(catalogue, "kernels", lambda: entries)
    monkeypatch.setattr(build, "jobs", lambda names: [job for name in names for job in JOBS[name]])

    def facts(job: Job) -> Compiled:
        base = GOOD if job.kernel == "a" else BAD
        return Compiled(
            **{f: getattr(base, f) for f in base.__struct_fields__} | {"variant": job.variant}
        )

    monkeypatch.setattr(build, "build", lambda jobs, **_: (facts(job) for job in reversed(jobs)))
    monkeypatch.setattr(build, "build_one", facts)


def test_list_names_every_kernel(known, capsys):
    assert verb.run(["list"]) == 0
    assert capsys.readouterr().out == "a  Does a.\nb  Does b.\n"
    assert verb.run(["list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["a", "b"]


def test_list_needs_neither_torch_nor_triton():
    code = (
        "import sys; from cairn.cli.kernels import run; run(['list'])\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rmsnorm" in done.stdout


def test_check_fails_when_a_kernel_does(known, capsys):
    assert verb.run(["check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "✓ a    3 variants, 32 registers, shared memory up to 1 KiB",
        "    info a wgmma takes its left operand from registers: check it for exactness on integers (3 of 3)",
        "✗ b    1 variant, 255 registers, shared memory up to 0 B",
        "    fail b 64 [x]: spills 8 bytes to memory and reads 0 back, with 255 registers in 4 warps",
        "",
        "4 variants of 2 kernels, 1 failure",
    ]


def test_check_passes_for_one_that_is_good(known, capsys):
    assert verb.run(["check", "--only", "a"]) == 0
    capsys.readouterr()
    assert verb.run(["check", "--only", "a", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["target"], document["failures"], document["tools"]) == (
        "sm_90a",
        0,
        "triton 3.6.0",
    )
    assert [v["variant"] for v in document["variants"]] == ["a 64", "a 128", "other 128"]
    assert document["variants"][0]["registers"] == 32
    assert document["variants"][0]["findings"][0]["severity"] == "info"
    assert "stages" not in document["variants"][0]


def test_explain_prints_a_summary_or_a_stage(known, capsys):
    assert verb.run(["explain", "a"]) == 0
    out = capsys.readouterr().out
    assert "registers per thread  32" in out
    assert "  2  a 128" in out
    assert verb.run(["explain", "a", "--stage", "ptx"]) == 0
    assert capsys.readouterr().out == ".version 8.7\n"
    assert verb.run(["explain", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variants"][0]["mix"] == {"float": 2}


def test_explain_writes_a_page(known, capsys, tmp_path):
    out = tmp_path / "out.html"
    assert verb.run(["explain", "a", "--html", str(out)]) == 0
    assert capsys.readouterr() == ("", f"wrote {out}\n")
    assert out.read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError, match="cannot write"):
        verb.run(["explain", "a", "--html", str(tmp_path)])


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [(None, "a 64"), ("2", "a 128"), ("a 64", "a 64"), ("OTHER", "other 128"), ("64", "a 64")],
)
def test_a_variant_can_be_named_in_several_ways(wanted, chosen):
    assert verb.choose_variant(JOBS["a"], wanted).variant == chosen


@pytest.mark.parametrize(
    ("wanted", "words"), [("128", "2 variants have '128'"), ("zz", "no variant has 'zz'")]
)
def test_a_variant_that_is_not_one_is_a_usage_error(wanted, words):
    with pytest.raises(UsageError, match=words) as raised:
        verb.choose_variant(JOBS["a"], wanted)
    assert "other 128" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chek"], "has no 'chek'"),
        (["check", "--only", "c"], "no kernel 'c'"),
        (["explain", "c"], "no kernel 'c'"),
        (["explain"], "NAME"),
        (["explain", "a", "--stage", "asm"], "asm"),
    ],
)
def test_mistakes_are_usage_errors(known, args, words):
    with pytest.raises(UsageError, match=words):
        verb.run(args)


def test_without_a_name_the_help_is_the_answer(capsys):
    assert verb.run([]) == 2
    assert "usage: cairn kernels list|check|explain|build|tune" in capsys.readouterr().err
    assert verb.run(["--help"]) == 0
    assert "compile and lint" in capsys.readouterr().out


def test_tune_needs_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(HardwareError, match="needs a CUDA device"):
        verb.run(["tune"])


@pytest.mark.timeout(120)
def test_a_real_kernel_from_end_to_end(capsys, tmp_path):
    if "rmsnorm" not in catalogue.kernels():
        pytest.skip("no rmsnorm in the catalogue")
    out = tmp_path / "out.html"
    assert verb.run(["explain", "rmsnorm", "--html", str(out)]) == 0
    assert all(
        f'data-stage="{stage}"' in out.read_text() for stage in ("source", "ttir", "ptx", "sass")
    )
