"""`cairn train` from the outside."""

import io
import json

import pytest
import torch

from cairn.cli.main import main
from cairn.cli.train.display import Display, curve
from cairn.cli.train.train import DEFAULTS, TrainVerb, read
from cairn.cli.train.tune import TuneVerb
from cairn.models.runnable import open_model
from cairn.train.metrics_log import Record
from cairn.train.recipes import recipe

SMALL = ["--model.layers", "1", "--model.hidden", "32", "--data.sequence", "64", "--data.sequences", "4",
         "--data.microbatch", "4", "--data.vocab", "400"]  # fmt: skip


def test_the_tiny_recipe_trains_and_says_how_to_serve_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny-cpu", "--steps", "12", "--json", *SMALL]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["last_loss"] < document["first_loss"]
    assert len(document["losses"]) == 12
    assert document["serve"] == "cairn serve runs/tiny-cpu/model"
    assert "Loss" in (tmp_path / document["report"]).read_text()
    opened = open_model(document["model"])
    text = opened.tokenizer.decode(opened.tokenizer.encode("Once upon a time"))
    assert text == "Once upon a time"
    assert opened.load("cpu").model.spec.layers == 1
    # Its folder is enough to go on: the recipe is in it.
    assert main(["train", "--out", "runs/tiny-cpu"]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert main(["train", "runs/tiny-cpu"]) == 2
    assert "cairn train --out runs/tiny-cpu" in capsys.readouterr().err
    assert main(["train", "--out", "runs/tiny-cpu", "--export-only"]) == 0
    assert "step-00000012" in capsys.readouterr().out
    assert main(["train", "--out", "runs/tiny-cpu", "--steps", "14", "--log.every", "2"]) == 0
    out, err = capsys.readouterr()
    assert "go on with: cairn train --out runs/tiny-cpu" in out
    assert [line.split()[1] for line in err.splitlines()] == ["14/14"]
    assert "steps = 14" in (tmp_path / "runs/tiny-cpu/recipe.toml").read_text()


@pytest.mark.parametrize(("flags", "error"), [
    (["--data.sources", "/nonexist.txt"], "there is no data at '/nonexist.txt'"),
    (["--data.sources", ""], "data.sources has an empty name: ['']"),
    (["--data.sources", "."], ". is an empty folder"),
    (["--validation.sources", ""], "validation.sources has an empty name: ['']"),
    (["--export-only"], "runs/hint has no complete checkpoint"),
])  # fmt: skip
def test_a_run_that_does_not_start_names_no_command_that_goes_on(
    tmp_path, capsys, monkeypatch, flags, error
):
    """Its recipe was never written, so that command would train another model into the folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny-cpu", "--out", "runs/hint", *flags]) == 2
    out, err = capsys.readouterr()
    assert error in err
    assert "cairn train --out" not in out + err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["train", "tune", "align"])
@pytest.mark.parametrize(("args", "what"), [([""], "RECIPE"), (["--out", ""], "--out")])
def test_an_empty_name_is_no_default(capsys, verb, args, what):
    """Of a variable in a script that was never set: the default recipe would be trained."""
    assert main([verb, *args, "--print"]) == 2
    assert f"error: {what} is empty" in capsys.readouterr().err


def test_a_printed_recipe_runs_after_an_edit(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny-cpu", "--print", "--steps", "2", *SMALL]) == 0
    text = capsys.readouterr().out
    (tmp_path / "my.toml").write_text(text.replace("lr = 0.003", "lr = 0.001"))
    assert main(["train", "my.toml", "--print", "--json", "--out", "runs/my"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["optim"]["lr"], printed["out"]) == (0.001, "runs/my")
    assert main(["train", "my.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == "runs/my"
    assert "lr = 0.001" in (tmp_path / "runs/my/recipe.toml").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tiny-cpu", "--data.sources", "storys"], "storys"),
        (["tiny-cpu", "--data.sources", "nowhere/x"], "nowhere/x"),
        (["tiny-cpu", "--tp", "3"], "tp 3 does not divide"),
        (["tiny-cpu", "--data.sequence", "9999"], "longer than the model's context"),
        (["tiny-cpu", "--steps", "0"], "steps"),
        (["tiny-cpu", "--lora"], "`cairn tune` has it"),
        (["tiny-cpu", "--device", "tpu"], "tpu"),
        (["tiny-cpu", "--model.checkpoint", "nowhere"], "nowhere"),
        (["tiny-cpu", "--export-only"], "--out"),
        (["qwen3-0.6b-1xh200"], "tokens"),
        (["cairn-tiny"], "the model to begin with is --model.checkpoint cairn-tiny"),
        (["Qwen/Qwen3-8B"], "a model is --model.checkpoint Qwen/Qwen3-8B"),
        (["texts.jsonl"], "text to learn from is --data.sources texts.jsonl"),
        (["tiny-cpu", "--data.sources", "short.txt"], "error: short.txt has 6 tokens, less than"),
    ],
)
def test_bad_input_is_answered_at_once(args, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("four words, a tail")
    assert main(["train", *args]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "hint:" in told
    assert not list(tmp_path.glob("runs/*/checkpoints"))


@pytest.mark.parametrize("recovery", [[], ["--recovery.on"]])
def test_ranks_of_a_launcher_do_not_train_each_by_itself(recovery, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "tiny-cpu", "--steps", "2", *SMALL, *recovery]) == 2
    told = capsys.readouterr().err
    assert "tp 1 = 1 rank, but there are 2" in told
    assert "use dp 2, or start 1 rank" in told
    assert not list(tmp_path.iterdir())


def test_a_plan_says_what_a_run_needs(capsys):
    assert main(["train", "qwen3-1.7b-1xh200", "--plan", "--device", "cuda"]) == 0
    told = capsys.readouterr().out
    assert "activations" in told
    assert "together" in told
    assert "one process" in told
    assert "fused form" in told
    # Of what runs here: on a CPU the plain form.
    if not torch.cuda.is_available():
        assert main(["train", "tiny-cpu", "--plan"]) == 0
        told = capsys.readouterr().out
        assert "plain form on cpu" in told
        assert "--device cuda" in told


def test_a_plan_of_several_ranks_is_of_one_of_them(capsys):
    assert main(["train", "llama3-8b-8xh100", "--plan", "--json", "--device", "cuda"]) == 0
    cut = json.loads(capsys.readouterr().out)
    assert cut["of"] == "each of 8 ranks (fsdp 8)"
    assert (
        main(["train", "llama3-8b-8xh100", "--plan", "--json", "--fsdp", "1", "--device", "cuda"])
        == 0
    )
    whole = json.loads(capsys.readouterr().out)["bytes"]
    assert cut["bytes"]["states"] == pytest.approx(whole["states"] / 8, rel=0.01)
    assert cut["bytes"]["together"] < 80 * 2**30 < whole["together"]
    frozen = ["--model.frozen", "embedding.*", "layers.?.*", "layers.1?.*"]  # half of the layers
    asked = ["train", "llama3-8b-8xh100", "--plan", "--json", "--device", "cuda", *frozen]
    assert main(asked) == 0
    half = json.loads(capsys.readouterr().out)
    assert half["of"] == "each of 8 ranks (fsdp 8)"
    assert half["bytes"]["weights"] == cut["bytes"]["weights"]
    for part in ("states", "masters"):
        assert half["bytes"][part] / cut["bytes"][part] == pytest.approx(0.39, abs=0.03)
    # Of a pipeline, the stage with most to train: the second one has all of its weights to train.
    assert main([*asked, "--fsdp", "1", "--pp", "8"]) == 0
    staged = json.loads(capsys.readouterr().out)
    assert staged["bytes"]["states"] == pytest.approx(4 * staged["bytes"]["weights"], rel=0.1)


def test_a_plan_is_of_the_weights_that_it_begins_with(capsys):
    asked = ["train", "tiny-cpu", "--plan", "--json", "--device", "cpu"]
    assert main([*asked, "--model.checkpoint", "cairn-tiny"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == open_model("cairn-tiny").spec.parameters()
    assert not plan["fused"]
    # Of an adapter the optimizer remembers the adapter alone.
    assert main(["tune", "--plan", "--json", "--device", "cpu"]) == 0
    tuned = json.loads(capsys.readouterr().out)["bytes"]
    assert 2 * (tuned["weights"] - plan["bytes"]["weights"]) == tuned["states"]


def test_a_curve_goes_down_with_the_loss():
    drawn = curve([4.0, 3.0, 2.0, 1.0])
    assert drawn == "".join(sorted(drawn, reverse=True))
    assert curve([float("nan")]) == ""


def record(step, loss=2.0, seconds=0.5):
    return Record(
        step=step, loss=loss, norm=1.0, lr=0.1, tokens=1, seconds=seconds, tokens_per_s=2e3
    )


def test_a_log_has_a_line_for_each_logged_step_with_the_time_left(capsys):
    display = Display(steps=40, every=10)
    for step in range(1, 41):
        display.on_record(record(step, None if step == 20 else 2.5))
    display.log_line("words")
    out, err = capsys.readouterr()
    assert out == "words\n"
    lines = err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", "10/40", "20/40", "30/40", "40/40"]
    assert lines[1] == "step 10/40 loss 2.5000 2k tokens/s, 0:15 left"
    assert "not finite" in lines[2]
    assert "left" not in lines[-1]


def test_a_terminal_has_a_bar_and_words_stand_above_it(capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    display = Display(steps=40, every=10, as_json=True, err=terminal)
    display.on_record(record(8))
    assert "8/40" in terminal.getvalue()
    assert "0:16 left" in terminal.getvalue()
    display.log_line("held-out loss 1.5")
    assert terminal.getvalue().endswith("\r\x1b[Kheld-out loss 1.5\n")
    display.close()
    assert capsys.readouterr().out == ""


def test_the_help_has_a_sentence_for_every_table(capsys):
    assert main(["train", "--help"]) == 0
    assert "Initialize self" not in capsys.readouterr().out


@pytest.mark.parametrize(("prog", "kind"), [("cairn train", TrainVerb), ("cairn tune", TuneVerb)])
def test_help_shows_what_runs_without_flags(prog, kind, capsys):
    with pytest.raises(SystemExit):
        read(["--help"], kind, prog)
    default = recipe(DEFAULTS[prog])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"updates of the weights (default: {default.steps})" in shown
    assert f"(default: {default.optim.lr})" in shown
