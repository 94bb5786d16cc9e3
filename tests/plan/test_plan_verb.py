"""`cairn plan`: what it prints, what it writes, and what it refuses; without torch."""

import json
import re
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
        capsys, "train", "llama-3.1-70b", "--gpus", "16", "--batch-tokens", "1052676"
    )
    assert status == 0
    assert "= 1,052,672 tokens a step: --batch-tokens 1052676 has 4 more" in out
    assert "with --batch-tokens 1048576 (256 sequences) it can" in out
    assert "why the others lost" in out
    assert "memory of a rank of the first" in out


def test_the_trainer_takes_the_flags_of_a_plan(capsys):
    import tomllib

    _, out, _ = run(
        capsys, "train", "qwen3-1.7b", "--gpus", "16", "--pp", "4", "--tp", "2", "--batch-tokens", "524288",
        "--states", "bfloat16", "--json",
    )  # fmt: skip
    best = json.loads(out)["best"][0]
    assert main(["train", "tiny-cpu", *best["flags"].split(), "--print"]) == 0
    recipe = tomllib.loads(capsys.readouterr().out)
    assert recipe["parallel"] == best["choice"]["layout"]
    assert recipe["strategy"]["order"] == best["choice"]["order"]
    assert recipe["strategy"]["sequence_parallel"] is best["choice"]["sequence_parallel"] is True
    assert recipe["precision"]["recompute"] == best["choice"]["recompute"]
    assert recipe["precision"]["masters"] is False
    assert (recipe["data"]["sequences"], recipe["data"]["microbatch"]) == (
        128,
        best["choice"]["microbatch"],
    )


def test_a_plan_in_fp8_says_its_rates_and_runs(capsys):
    small = ("train", "gpt2", "--gpus", "2", "--sequence", "512", "--batch-tokens", "8192")
    _, out, _ = run(capsys, *small)
    assert "MFU is of the bf16 peak, 989 TFLOP/s" in out
    _, out, _ = run(capsys, *small, "--fp8")
    assert "fp8: 1,291 TFLOP/s in products of the layers, 1,059 with scaling and casts" in out
    assert "refuses" not in out
    flags = re.search("cairn train RECIPE (.*)", out)[1].split()
    assert main(["train", "tiny-cpu", *flags, "--print"]) == 0
    assert 'fp8 = "tensor"' in capsys.readouterr().out
    status, _, err = run(capsys, *small, "--fp8", "--gpu", "a100")
    assert (status, "a100 has no fp8 products" in err) == (2, True)


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
        (["train", "qwen3-8b", "--price", "0"], "--price is 0"),
        (["train", "qwen3-8b", "--gpus", "-1"], "--gpus is -1"),
        (["train", "qwen3-8b", "--gpus", "1000000000"], "at most 131,072"),
        (["train", "qwen3-8b", "--gpus", "64", "--tp", "3"], "tp 3 = 3 ranks, but there are 64"),
        (["train", "qwen3-8b", "--nic", "nan"], "expected a number or none, got 'nan'"),
        (["train", "./nowhere"], "there is no such folder"),
        (["train", "qwen3-8b", "--html", "/nowhere/out.html"], "there is no folder /nowhere"),
        (["serve", "Qwen/Qwen3-9B"], "did you mean 'qwen3-8b'"),
        (["serve", "qwen3-8b", "--rate", "0"], "--rate is 0"),
        (["serve", "qwen3-8b", "--rate", "inf"], "--rate is inf"),
        (["serve", "qwen3-8b", "--gpus", "-2"], "--gpus is -2"),
        (["serve", "qwen3-8b", "--requests", "3"], "of fewer there is no p99"),
        (["serve", "qwen3-8b", "--trace", "/nowhere.jsonl"], "cannot read the trace"),
        (["serve", "qwen3-8b", "--input-tokens", "50000"], "longer than the 40,960"),
        (["sreve"], "did you mean 'serve'"),
    ],
)
def test_mistakes_are_answered(capsys, args, says):
    status, _, err = run(capsys, *args)
    assert status == 2
    assert says in err
    assert "Traceback" not in err


TRACE_LINE = '{"timestamp": %d, "input_length": 700, "output_length": 12, "hash_ids": [0, %d]}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TRACE_LINE % (0, 1) + '{"timestamp": 5, "input_len', "line 2"),
        (
            TRACE_LINE % (0, 1) + '{"timestamp": 5, "input_length": -4, "output_length": 1}\n',
            "-4 tokens in",
        ),
        ("", "no column TIMESTAMP"),
        (TRACE_LINE % (7, 1) + TRACE_LINE % (7, 2), "come at one moment"),
    ],
)
def test_a_broken_trace_is_refused(capsys, tmp_path, text, says):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    status, out, err = run(capsys, "serve", "qwen3-0.6b", "--trace", str(path))
    assert (status, out) == (2, "")
    assert says in err


def test_serving_a_trace(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(TRACE_LINE % (50 * n, n + 1) for n in range(30)))
    status, out, _ = run(
        capsys, "serve", "Qwen/Qwen3-0.6B", "--gpu", "H200", "--trace", str(path), "--requests", "20", "--gpus", "1",
        "--no-measured",
    )  # fmt: skip
    assert status == 0
    assert "the first 20 of 30 requests of trace.jsonl at 20/s" in out
    assert "on average 700 tokens in and 12 out" in out


def test_a_model_by_its_folder(capsys, tmp_path):
    from cairn.models.hub import SHIPPED, TINY

    status, out, _ = run(
        capsys, "train", str(SHIPPED / TINY), "--gpus", "1", "--sequence", "256", "--json"
    )
    assert status == 0
    assert json.loads(out)["best"]
    (tmp_path / "config.json").write_text("[1")
    status, _, err = run(capsys, "serve", str(tmp_path))
    assert status == 2
    assert "cannot read the model's shape" in err


def test_names_may_be_written_as_on_the_box(capsys):
    """The record of a model is found whatever the case of its name."""
    from cairn.plan.model_shape import model_shape

    assert model_shape("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"
    assert model_shape("QWEN3-8B").name == model_shape("random:qwen3-8b").name == "qwen3-8b"


def test_planning_needs_no_torch():
    code = (
        "import sys; from cairn.cli.main import main; "
        "main(['plan', 'train', 'gpt2', '--sequence', '512', '--batch-tokens', '4096']); "
        "main(['plan', 'serve', 'gpt2', '--input-tokens', '50', '--output-tokens', '5', '--gpus', '1']); "
        "main(['simulate', 'failures']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]


def test_pictures_that_cannot_be_planned_are_refused(capsys, tmp_path):
    status, _, said = run(capsys, "serve", "qwen3-8b", "--images", "-1")
    assert (status, "--images is -1" in said) == (2, True)
    traced = ("--images", "1", "--trace", str(tmp_path / "trace.jsonl"))
    status, _, said = run(capsys, "serve", "qwen3-8b", *traced)
    assert (status, "the prompts of --trace" in said) == (2, True)


@pytest.mark.parametrize("given", [[], ["--output-tokens", "600"], ["--input-tokens", "5"]])
def test_lengths_that_nobody_gave_fit_a_short_context(capsys, given):
    status, out, _ = run(capsys, "serve", "cairn-tiny", "--requests", "20", *given)
    assert status == 0
    read, written = map(int, re.search(r"of (\d+) tokens in and (\d+) out", out).groups())
    assert 1.25 * (read + written) <= 1024
    assert ("--input-tokens and --output-tokens" in out) == ((read, written) != (5, 256))
