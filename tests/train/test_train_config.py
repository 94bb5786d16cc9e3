"""A run as one value: TOML there and back, what is refused, and recipes by name."""

import msgspec
import pytest

from cairn.cli.train.train import free_folder, read, train_part
from cairn.core.config import to_toml
from cairn.core.errors import CairnError, ConfigError, UsageError
from cairn.train.config import Data, Optim, Precision, Train
from cairn.train.parallel.layout import Layout
from cairn.train.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_printed_recipe_is_the_recipe(name, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(to_toml(recipe(name)))
    assert train_part(read([str(file)])) == recipe(name) == train_part(read([name]))


def test_flags_win_over_a_recipe_and_have_short_forms():
    config = read(["tiny-cpu", "--pp", "2", "--tp=2", "--lr", "0.5", "--steps", "7", "--json"])
    assert (config.parallel.pp, config.parallel.tp, config.optim.lr, config.steps) == (2, 2, 0.5, 7)
    assert config.json
    assert config.model == recipe("tiny-cpu").model


def test_a_named_recipe_keeps_nothing_apart_from_preferences(monkeypatch):
    """Who asks for an objective by flag has not asked for the recipe's held-out text, which preferences refuse."""
    asked = ["tiny-lora", "--data.sources", "pairs.jsonl"]
    assert read(asked).validation.share > 0
    assert read([*asked, "--objective.kind", "dpo"]).validation.share == 0
    with pytest.raises(ConfigError, match="held-out"):
        read([*asked, "--objective.kind", "dpo", "--validation.share", "0.1"])
    monkeypatch.setenv("CAIRN_TRAIN_OBJECTIVE__KIND", "kto")
    assert read(asked).validation.share == 0


def test_flags_are_held_against_the_recipe_and_not_against_defaults():
    config = read(
        ["qwen3-8b-1xh200", "--data.sequences", "6"]
    )  # 6 % 8 of the defaults would be refused
    assert (config.data.sequences, config.data.microbatch) == (6, 2)


def test_explain_says_what_the_recipe_wrote(capsys):
    with pytest.raises(SystemExit):
        read(["tiny-cpu", "--explain", "--steps", "9"])
    told = capsys.readouterr().out
    assert "flag --steps" in told
    assert any("optim.lr" in line and "tiny-cpu.toml" in line for line in told.splitlines())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stepz = 3\n", "stepz"),
        ("[optim]\nlearning_rate = 1\n", "optim.learning_rate"),
        ("[optim]\nlr = -1\n", "optim.lr"),
        ("[optim]\nlr = inf\n", "optim.lr"),
        ("[optim]\nweight_decay = inf\n", "optim.weight_decay"),
        ("[parallel]\ndp = 0\n", "parallel.dp"),
        ("[data]\nsources = ['stories']\nweights = [0.0]\n", "data.weights"),
        ("[optim]\nlr = 'fast'\n", "optim.lr"),
        ("[schedule]\nkind = 'cosin'\n", "schedule.kind"),
        ("[data]\nsequences = 6\nmicrobatch = 4\n", "6 %"),
    ],
)
def test_a_typo_is_refused_before_anything_starts(text, complaint, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(CairnError) as error:
        read([str(file)])
    assert complaint in error.value.message
    assert error.value.hint


def test_unknown_recipe_and_file():
    with pytest.raises(ConfigError, match="tiny-gpu"):
        read(["tiny-gpu"])
    with pytest.raises(ConfigError, match="no such file"):
        read(["absent.toml"])
    with pytest.raises(UsageError):
        read(["tiny-cpu", "--no-such-flag"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(precision=Precision(kind="float16", masters=False)), "float16"),
        (dict(optim=Optim(states="bfloat16")), "bfloat16"),
        (dict(optim=Optim(states="bfloat16"), precision=Precision(kind="bfloat16")), "masters"),
        (dict(precision=Precision(kind="bfloat16", masters=False)), "optim.states"),
        (dict(data=Data(sources=["a", "b"], weights=[1.0])), "weights"),
        (dict(data=Data(sources=[])), "empty"),
        (dict(parallel=Layout(dp=3)), "sequences"),
        (dict(precision=Precision(offload_activations=True, recompute="full")), "no layer keeps"),
        (dict(precision=Precision(offload_activations=True), parallel=Layout(pp=2)), "pp 2"),
        (dict(precision=Precision(offload_layers=2)), "without offload_activations"),
    ],
)
def test_pairs_that_cannot_work(changes, words):
    with pytest.raises(ConfigError, match=words):
        Train(**changes)


@pytest.mark.parametrize(
    ("sequences", "microbatch", "dp", "words"),
    [
        (12, 4, 2, "use data.microbatch 3"),
        (8, 8, 3, "a multiple of 24, or dp * fsdp a divisor of 8"),
    ],
)
def test_the_way_out_of_an_uneven_batch_works(sequences, microbatch, dp, words):
    with pytest.raises(ConfigError) as error:
        Train(data=Data(sequences=sequences, microbatch=microbatch), parallel=Layout(dp=dp))
    assert words in (error.value.hint or "")


def test_a_rank_with_a_smaller_share_computes_all_of_it_at_once():
    config = Train(data=Data(sequences=8, microbatch=8), parallel=Layout(dp=2))
    assert (config.data.microbatch, config.microbatches) == (4, 1)


def test_microbatches_follow_from_the_layout():
    config = Train(data=Data(sequences=16, microbatch=2), parallel=Layout(dp=2, fsdp=2))
    assert (config.microbatches, config.tokens_per_step) == (2, 16 * 256)


def test_a_new_run_takes_a_free_folder(tmp_path):
    assert free_folder(tmp_path, "x") == tmp_path / "x"
    (tmp_path / "x").mkdir()
    (tmp_path / "x-2").mkdir()
    assert free_folder(tmp_path, "x") == tmp_path / "x-3"


def test_config_survives_json():
    config = recipe("llama3-8b-8xh100")
    assert msgspec.convert(msgspec.to_builtins(config, enc_hook=str), Train) == config
