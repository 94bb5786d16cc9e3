"""`cairn plan`: what it prints, what it writes, and what it refuses; without torch."""

import json
import subprocess
import sys

import pytest

from cairn.cli.main import main


def run(capsys, *args):
    status = main(["plan", *args])
    return status, *capsys.readouterr()


def test_train_as_json_and_as_a_page(capsys, tmp_path):
    page = tmp_path / "out.html"
    status, out, _ = run(
        capsys,
        "train",
        "qwen3-1.7b",
        "--gpus",
        "8",
        "--gpu",
        "h200",
        "--batch-tokens",
        "262144",
        "--json",
        "--html",
        str(page),
    )
    assert status == 0
    document = json.loads(out)
    assert 1 <= len(document["best"]) <= 10
    best = document["best"][0]
    assert sum(best["time_s"].values()) == pytest.approx(best["step_s"])
    assert best["memory_bytes"]["total"] == sum(
        v for k, v in best["memory_bytes"].items() if k != "total"
    )
    assert document["tried"] == sum(row["count"] for row in document["lost"]) + len(
        document["best"]
    )
    assert document["run"]["usd"] > 0
    assert document["compared"]["Published, several GPUs"]["median_error"] < 0.2
    text = page.read_text()
    assert "Memory of one rank" in text
    assert "<svg" in text or "None of the best has a pipeline" in text


def test_train_in_words(capsys):
    status, out, _ = run(
        capsys, "train", "llama-3.1-70b", "--gpus", "16", "--batch-tokens", "1048576"
    )
    assert status == 0
    assert "why the others lost" in out
    assert "memory of a rank of the first" in out


def test_train_that_cannot_be(capsys):
    status, out, _ = run(capsys, "train", "llama-3.1-70b", "--gpus", "2", "--batch-tokens", "65536")
    assert status == 1
    assert "nothing fits" in out


def test_serve_as_json_and_as_a_page(capsys, tmp_path):
    page = tmp_path / "out.html"
    status, out, _ = run(
        capsys, "serve", "qwen3-0.6b", "--rate", "10", "--input-tokens", "100", "--output-tokens", "20", "--gpus", "2",
        "--no-measured", "--json", "--html", str(page),
    )  # fmt: skip
    assert status == 0
    document = json.loads(out)
    assert document["best"]["gpus"] == 1
    assert document["best"]["load"]["tpot_p99"] > 0
    assert len(document["curve"]) >= 3
    assert page.read_text().count("<svg") == 3


def test_serve_that_cannot_be(capsys):
    status, out, _ = run(
        capsys, "serve", "llama-3.1-70b", "--gpus", "1", "--rate", "1", "--no-measured"
    )
    assert status == 1
    assert "does not fit" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train"], "MODEL is missing"),
        (["train", "qwen3-9b"], "did you mean 'qwen3-8b'"),
        (["train", "qwen3-8b", "--gpu", "h2000"], "did you mean 'h200'"),
        (["train", "qwen3-8b", "--gpus", "0"], "--gpus is 0"),
        (["train", "qwen3-8b", "--sequence", "50000"], "longer than the 40960"),
        (["train", "qwen3-8b", "--batch-tokens", "100"], "less than one sample"),
        (["train", "qwen3-8b", "--price", "0"], "usd per hour is 0"),
        (["serve", "qwen3-8b", "--rate", "0"], "--rate is 0"),
        (["serve", "qwen3-8b", "--input-tokens", "50000"], "longer than the 40960"),
        (["sreve"], "did you mean 'serve'"),
    ],
)
def test_mistakes_are_answered(capsys, args, says):
    status, _, err = run(capsys, *args)
    assert status == 2
    assert says in err
    assert "Traceback" not in err


def test_planning_needs_no_torch():
    code = (
        "import sys; from cairn.cli.main import main; "
        "main(['plan', 'train', 'gpt2', '--sequence', '512', '--batch-tokens', '4096']); "
        "main(['plan', 'serve', 'gpt2', '--input-tokens', '50', '--output-tokens', '5', '--gpus', '1']); "
        "main(['simulate', 'failures']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
