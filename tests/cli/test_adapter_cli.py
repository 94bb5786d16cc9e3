"""`cairn tune --lora` and `cairn adapter`, from the command line to a merged model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import folder as checkpoint

from cairn.cli.main import main
from cairn.cli.train.tune import with_adapter
from cairn.core.errors import UsageError


def test_lora_flag():
    assert with_adapter(["r.toml", "--lora"]) == ["r.toml", "--adapter.rank", "16"]
    assert with_adapter(["--lora", "8", "--lr", "1"]) == ["--adapter.rank", "8", "--lr", "1"]
    assert with_adapter(["--lora=4"]) == ["--adapter.rank", "4"]
    for rank in ("0", "-4"):
        with pytest.raises(UsageError, match="rank of 1 or more"):
            with_adapter(["--lora", rank])


def test_tune_info_merge(tmp_path, capsys):
    base, out = str(checkpoint("mistral-full")), tmp_path / "run"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""steps = 2
device = "cpu"
model.checkpoint = "{base}"
[data]
sources = ["random"]
sequence = 32
sequences = 2
microbatch = 2
"""
    )
    flags = ["tune", str(recipe), "--lora", "2", "--out", str(out), "--json"]
    assert main(flags) == 0
    capsys.readouterr()
    assert main(["adapter", "info", str(out / "adapter"), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["spec"]["rank"] == 2
    assert about["maps"] == 21
    assert about["base"] == base
    assert (
        main(["adapter", "merge", str(out / "adapter"), "--out", str(tmp_path / "m"), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["maps"] == 21
    ours, theirs = (
        load_file(tmp_path / "m" / "model.safetensors"),
        load_file(out / "model" / "model.safetensors"),
    )
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor)
    assert main(["adapter", "export", str(out), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "adapter_config.json").is_file()
    assert main(["adapter", "info", str(tmp_path / "m")]) == 2
    # What is there already is not replaced, unless it is an older form of the same adapter.
    (tmp_path / "again" / "notes.txt").write_text("mine")
    for flags in (["export", str(out)], ["merge", str(out / "adapter")]):
        assert main(["adapter", *flags, "--out", str(tmp_path / "again")]) == 2
    assert (tmp_path / "again" / "notes.txt").read_text() == "mine"
    assert main(["adapter", "export", str(out)]) == 0
