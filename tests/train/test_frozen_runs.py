"""Runs with frozen weights: they resume, their checkpoints refer to the base, and what is exported is whole."""

import msgspec
import pytest
import torch
from plain_model import PlainModel
from tiny_runs import TINY, loop, recipe

from cairn.core.errors import ConfigError, DataError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.train.checkpoint.export import export_newest
from cairn.train.checkpoint.folder import folder_of
from cairn.train.checkpoint.load import read_about
from cairn.train.config import Checkpoint, Optim, Schedule
from cairn.train.describe import shape_of
from cairn.train.metrics_log import read_log
from cairn.train.prepare import prepare

FROZEN = ["embedding.*", "layers.0.*"]


def frozen_recipe(folder, steps, **model):
    return recipe(
        folder,
        steps=steps,
        model=msgspec.structs.replace(TINY, frozen=FROZEN, **model),
        optim=Optim(lr=1e-2, kind="muon"),
        schedule=Schedule(kind="constant"),
        checkpoint=Checkpoint(every=2, export=False),
    )


def losses(folder):
    return [record.loss for record in read_log(folder)]


def exported(run):
    export_newest(run, run / "model", None)
    model = open_checkpoint(run / "model").load("cpu", torch.float32)
    return {
        slot.name: model.get_parameter(slot.parameter)[slot.index].detach().clone()
        for slot in model.slots()
    }


def test_a_run_resumes_and_exports_everything(tmp_path):
    loop(frozen_recipe(tmp_path / "a", 6)).run()
    loop(frozen_recipe(tmp_path / "b", 4)).run()
    loop(frozen_recipe(tmp_path / "b", 6)).run()
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    whole = exported(tmp_path / "b")
    plain = PlainModel(shape_of(TINY)).model
    for slot in plain.slots():
        before = plain.get_parameter(slot.parameter)[slot.index]
        is_frozen = slot.name.startswith(("embedding", "layers.0"))
        assert torch.equal(whole[slot.name], before) == is_frozen, slot.name


def test_a_checkpoint_does_not_repeat_what_is_frozen(tmp_path):
    config = frozen_recipe(tmp_path / "a", 2)
    prepared = prepare(config)
    names = prepared.state.pieces().keys()
    assert not any("embedding" in name or "layers.0." in name for name in names)
    assert any("layers.1." in name for name in names)
    sizes = sum(p.numel() for p in prepared.state.parallel.parameters().values())
    assert prepared.frozen == prepared.state.spec.parameters() - sizes
    loop(config).run()
    with pytest.raises(ConfigError, match=r"model\.frozen is \['embedding\.\*'"):
        prepare(msgspec.structs.replace(config, model=TINY))


def test_another_base_is_refused(tmp_path):
    export(PlainModel(shape_of(TINY), seed=1).model, tmp_path / "base")
    config = frozen_recipe(tmp_path / "a", 2, checkpoint=tmp_path / "base", preset="tiny-qwen3")
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, layers=0, hidden=0, heads=0)
    )
    loop(config).run()
    about = read_about(folder_of(tmp_path / "a" / "checkpoints", 2))
    assert about.base is not None
    assert about.base.digest
    assert exported(tmp_path / "a").keys()
    weights = next((tmp_path / "base").glob("*.safetensors"))
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(DataError, match="are not those of the run"):
        export_newest(tmp_path / "a", tmp_path / "out", None)
    with pytest.raises(DataError, match="are not those that"):
        loop(msgspec.structs.replace(config, steps=4)).run()
