"""The model inside the package: whole, small, able to do what its card says, and what runs where nobody names one."""

import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.cli.main import main
from cairn.core.errors import ModelNotFound
from cairn.models import hub
from cairn.models.checkpoint import open_checkpoint
from cairn.models.hub import BETTER, SHIPPED, TINY, Packaged, default_model, resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDER = SHIPPED / TINY
LIMIT_BYTES = 20_000_000
SUM = re.compile(r"The answer is (\d+)\.")


@pytest.fixture(scope="module")
def llm():
    torch.set_num_threads(1)
    with LLM(TINY, device="cpu", dtype="float32", max_num_seqs=24) as made:
        yield made


def ask(llm, *questions: str, most: int = 40) -> list[str]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    greedy = SamplingParams(temperature=0.0, max_tokens=most)
    outputs = [output.outputs[0] for output in llm.chat(chats, greedy, use_tqdm=False)]
    assert {output.finish_reason for output in outputs} == {"stop"}
    return [output.text for output in outputs]


# -- what it can do -------------------------------------------------------------------------------


def test_it_adds_two_digit_numbers(llm):
    dice = random.Random(6)
    pairs = [(dice.randint(10, 99), dice.randint(10, 99)) for _ in range(20)]
    answers = ask(llm, *(f"What is {a} + {b}?" for a, b in pairs))
    assert [SUM.findall(text) for text in answers] == [[str(a + b)] for a, b in pairs]


def test_it_answers_in_sentences_and_says_who_it_is(llm):
    who, capital, fruit = ask(
        llm, "Who are you?", "What is the capital of France?", "Name three fruits."
    )
    assert who == "I am Cairn Tiny, a very small language model."
    assert capital == "The capital of France is Paris."
    assert fruit.startswith("Three fruits are ")


def test_it_tells_a_story_that_ends(llm):
    (told,) = ask(llm, "Tell me a story about a fox and a key.", most=300)
    assert len(told.split()) > 60
    assert "fox" in told
    assert "key" in told
    assert told[-1] in '.!"'


def test_it_remembers_what_was_said_a_moment_ago(llm):
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "My name is Nora."},
        {"role": "assistant", "content": "Hello Nora! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ]
    (output,) = llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert output.outputs[0].text == "Your name is Nora."


# -- what it is -----------------------------------------------------------------------------------


def test_its_shape_is_the_one_of_the_recipe():
    spec = open_checkpoint(FOLDER).spec
    asked = tomllib.loads((ROOT / "examples/cairn-tiny/pretrain.toml").read_text())["model"]
    assert (spec.layers, spec.hidden, spec.vocab) == (asked["layers"], asked["hidden"], 4096)
    assert spec.context == asked["context"]


def test_its_template_ends_where_the_assistant_speaks():
    tokenizer = open_checkpoint(FOLDER).tokenizer()
    chat = [{"role": "user", "content": "Hi <|im_end|>"}]
    text = tokenizer.chat(chat)
    assert text == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"


def test_it_stays_small():
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(sizes) <= LIMIT_BYTES


def test_every_file_is_part_of_the_package():
    """By hatch's rules: all that is under a package, unless git ignores it or something excludes it."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    assert "cairn" in wheel["packages"]
    assert not {"exclude", "include", "only-include", "only-packages"} & {*wheel, *built}
    command = ["git", "check-ignore", "--no-index", *map(str, FOLDER.iterdir())]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (1, ""), ignored.stderr


def test_its_weights_are_those_that_were_measured():
    trained = json.loads((FOLDER / "training.json").read_text())
    found = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert found == trained["sha256"]


# -- what its card says ---------------------------------------------------------------------------


def card_rows(text: str) -> dict[str, list[str]]:
    rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    )
    return {row[0]: row[1:] for row in rows}


CARDS = {"card": FOLDER / "MODEL_CARD.md", "docs": ROOT / "docs/cairn-tiny.md"}
MEASURED = {
    "two-digit addition": "add_two_digits",
    "two-digit subtraction": "subtract_two_digits",
    "one-digit addition": "add_one_digit",
    "three-digit addition": "add_three_digits",
    "times table, 2 to 12": "times_up_to_12",
    "capitals, all of them taught": "capitals",
    "answers that end by themselves": "answers_that_end",
}


@pytest.mark.parametrize("where", CARDS)
def test_the_abilities_on_a_card_are_the_measured_ones(where):
    rows = card_rows(CARDS[where].read_text(encoding="utf-8"))
    measured = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    for row, key in MEASURED.items():
        places = [f"{100 * measured[place][key]:.1f}%" for place in ("gpu", "cpu")]
        assert rows[row][:2] == places, row
    assert rows["GSM8K test, first 100"][1] == f"{100 * measured['cpu']['gsm8k_test']:.1f}%"


@pytest.mark.parametrize("where", CARDS)
def test_the_training_on_a_card_is_the_recorded_one(where):
    rows = card_rows(CARDS[where].read_text(encoding="utf-8"))
    trained = json.loads((FOLDER / "training.json").read_text())
    runs = [trained[name] for name in ("pretrain", "sft")]
    assert rows["steps"] == [f"{run['steps']:,}" for run in runs]
    assert rows["tokens"] == [f"{run['tokens'] / 1e6:.1f} million" for run in runs]
    assert rows["seconds"] == [f"{run['seconds']:.0f}" for run in runs]
    assert rows["tokens/s"] == [f"{run['tokens_per_s']:,}" for run in runs]
    first_and_last = [(run["losses"][0][1], run["losses"][-1][1]) for run in runs]
    assert rows["loss, first to last step"] == [f"{a:.2f} to {b:.2f}" for a, b in first_and_last]


def test_the_answers_on_the_card_were_given():
    measured = json.loads((FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    given = {one["question"]: one["greedy"] for one in measured["gpu"]["answers"]}
    quoted = re.findall(r"^> \*\*(.+)\*\*\n> (.+)$", CARDS["card"].read_text(), re.M)
    assert len(quoted) >= 5
    for question, answer in quoted:
        assert given[question] == answer


def test_the_loss_curve_is_drawn_for_both_runs():
    picture = (FOLDER / "loss.svg").read_text(encoding="utf-8")
    paths = [item for item in ElementTree.fromstring(picture).iter() if item.tag.endswith("path")]
    trained = json.loads((FOLDER / "training.json").read_text())
    drawn = [item.attrib["d"].count("L") + 1 for item in paths]
    assert drawn == [len(trained[name]["losses"]) for name in ("pretrain", "sft")]
    assert (ROOT / "docs/cairn-tiny-loss.svg").read_text(encoding="utf-8") == picture


# -- when it runs ---------------------------------------------------------------------------------


def hide_the_better_one(monkeypatch) -> None:
    monkeypatch.setitem(hub.PACKAGED, BETTER, Packaged("absent_package", "x", "pip install absent"))


def test_the_default_is_the_better_model_where_its_package_is(monkeypatch, tmp_path):
    package = tmp_path / "odd_package"
    package.mkdir()
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        hub.PACKAGED, BETTER, Packaged("odd_package", "model.gguf", "pip install odd")
    )
    assert default_model().name == BETTER
    assert BETTER in default_model().why
    (package / "model.gguf").unlink()
    assert default_model().name == TINY


def test_without_that_package_it_is_ours_and_the_reason_says_how_to_get_the_other(monkeypatch):
    hide_the_better_one(monkeypatch)
    default = default_model()
    assert default.name == TINY
    assert "pip install absent" in default.why
    assert resolve(default.name) == FOLDER


def test_generate_without_a_model_says_which_it_took(monkeypatch, capsys):
    hide_the_better_one(monkeypatch)
    asked = ["generate", "--chat", "--prompt", "What is 12 + 30?", "--device", "cpu"]
    assert main(asked) == 0
    said = capsys.readouterr()
    assert said.out.strip() == "12 + 30 = 42. The answer is 42."
    assert said.err.startswith(
        "model cairn-tiny, which comes with Cairn; a better one: pip install absent\n"
    )


def test_serve_without_a_model_says_which_it_takes(monkeypatch, capsys):
    from cairn.serve.http.server import lifecycle

    hide_the_better_one(monkeypatch)
    served = []
    monkeypatch.setattr(
        lifecycle, "serve", lambda options, say, more, early: served.append(options)
    )
    assert main(["serve"]) == 0
    assert [(options.model, options.names) for options in served] == [(TINY, [TINY])]
    assert "model cairn-tiny" in capsys.readouterr().err


def test_a_named_model_is_not_replaced_by_the_default(monkeypatch, capsys):
    hide_the_better_one(monkeypatch)
    assert main(["generate", BETTER, "--prompt", "x"]) == 2
    said = capsys.readouterr().err
    assert "absent_package" in said
    assert TINY not in said


def test_a_folder_of_its_name_that_has_no_model_does_not_hide_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path(TINY).mkdir()
    assert resolve(TINY) == resolve("Cairn-Tiny") == FOLDER
    (Path(TINY) / "config.json").touch()
    assert resolve(TINY) == Path(TINY)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_an_empty_name_is_no_name(verb, capsys):
    assert main([verb, "", "--prompt", "x"]) == 2
    assert "no file or folder ''" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_a_package_that_has_lost_a_file_says_which(monkeypatch, tmp_path, lost):
    (tmp_path / TINY).mkdir()
    for name in {"config.json", "model.safetensors"} - {lost}:
        (tmp_path / TINY / name).touch()
    monkeypatch.setattr(hub, "SHIPPED", tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        resolve(TINY)
    assert f"{tmp_path / TINY / lost} is missing" in caught.value.message
    assert "install Cairn again" in caught.value.hint


def test_a_typo_is_answered_with_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("cairn").mkdir()
    with pytest.raises(ModelNotFound) as caught:
        resolve("cairn-tny")
    assert caught.value.hint == "did you mean 'cairn-tiny'?"


def test_finding_it_needs_no_torch():
    code = "import sys; from cairn.models.hub import default_model; default_model(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
