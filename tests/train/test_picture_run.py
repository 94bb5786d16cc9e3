"""A model that sees is tuned on chats with pictures and can be opened; what cannot be written is refused first."""

import json
import shutil

import pytest

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import tiny_vision as tiny
import torch

from cairn.cli.train import tune_pictures
from cairn.core.errors import ConfigError
from cairn.models.checkpoint import open_checkpoint
from cairn.train import picture_run
from cairn.train.picture_run import PictureTuning, tune


@pytest.fixture
def chats(tmp_path):
    tiny.photograph(31, 40).save(tmp_path / "one.png")
    asked = [{"type": "image", "image": "one.png"}, {"type": "text", "text": "What?"}]
    told = [{"role": "user", "content": asked}, {"role": "assistant", "content": "A wave."}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": told}) + "\n")
    return path


def test_two_steps_change_the_text_and_leave_a_frozen_tower(chats, tmp_path, capsys):
    out, model = tmp_path / "out", tiny.folder("llava")
    args = ["--model", str(model), "--out", str(out), "--steps", "2", "--batch", "1"]
    assert tune_pictures.run([str(chats), *args, "--lr", "0.01", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "step 2/2 loss" in said
    assert "0:00 left" in said
    assert "cairn serve" in said
    before, after = open_checkpoint(model), open_checkpoint(out)
    assert after.whole.names() == before.whole.names()
    changed = {
        name
        for name in before.whole.names()
        if not torch.equal(before.whole.tensor(name), after.whole.tensor(name))
    }
    assert any("language_model" in name and "q_proj" in name for name in changed)
    assert any("vision_tower" in name for name in before.whole.names())
    assert not any("vision_tower" in name or "projector" in name for name in changed)
    assert after.load_tower("cpu", torch.float32) is not None
    tuned = after.load("cpu", torch.float32)
    assert all(parameter.isfinite().all() for parameter in tuned.parameters())


def test_a_quantised_model_is_refused(chats, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("llava"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model is quantised \(fp8\).*floating point"):
        tune(PictureTuning(model=str(folder), chats=chats, out=tmp_path / "out", device="cpu"))
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder_to_write_to(chats):
    with pytest.raises(ConfigError, match=r"chats.jsonl is a file"):
        tune(PictureTuning(model=str(tiny.folder("llava")), chats=chats, out=chats, device="cpu"))


def test_what_has_no_place_is_refused_before_the_first_step(chats, tmp_path, monkeypatch):
    monkeypatch.setattr(picture_run, "picture_loss", lambda *_: pytest.fail("a step was made"))
    monkeypatch.setattr(picture_run, "part_of", lambda name: ("text", name + "?"))
    given = PictureTuning(
        model=str(tiny.folder("llava")), chats=chats, out=tmp_path / "out", device="cpu"
    )
    with pytest.raises(ConfigError, match="has no place for"):
        tune(given)
