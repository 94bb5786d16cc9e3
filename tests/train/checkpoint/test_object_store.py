"""Checkpoints far away: whole or not there, only what changed travels, and damage is found."""

import msgspec
import pytest
import torch

pytest.importorskip("fsspec", reason="the object store needs fsspec")

from cairn.core.errors import ConfigError, DataError
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.load import load_pieces
from cairn.train.checkpoint.object_store import ObjectStore, cuts_of
from cairn.train.checkpoint.piece import whole
from cairn.train.checkpoint.save import write_pieces


def checkpoint(root, step, frozen, trained):
    folder = folders.folder_of(root, step)
    folder.mkdir(parents=True)
    write_pieces(folder, {"frozen": whole(frozen), "trained": whole(trained)})
    (folder / folders.ABOUT).write_text(f'{{"step": {step}}}')
    folders.mark_complete(folder, step)
    return folder


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_only_what_has_changed_travels_and_all_comes_back(tmp_path, kind):
    url = f"memory://{tmp_path.name}/run" if kind == "memory" else f"file://{tmp_path}/far"
    store = ObjectStore(url)
    frozen, trained = torch.randn(200_000), torch.randn(1000)
    first = store.send(checkpoint(tmp_path / "a", 10, frozen, trained))
    assert first.new_bytes > 800_000
    second = store.send(checkpoint(tmp_path / "a", 20, frozen, trained + 1))
    assert second.bytes > 800_000
    assert second.new_bytes < 30_000  # the frozen tensor is there already
    assert store.steps() == [10, 20]
    back = store.fetch(20, tmp_path / "b")
    assert folders.complaint(back) is None
    room = {"frozen": whole(torch.empty(200_000)), "trained": whole(torch.empty(1000))}
    load_pieces(back, room, together=False)
    assert torch.equal(room["frozen"].tensor, frozen)
    assert torch.equal(room["trained"].tensor, trained + 1)
    gone = store.keep_newest(1)
    assert gone > 0
    assert store.steps() == [20]
    store.fetch(20, tmp_path / "c")


def test_what_was_not_finished_is_not_there(tmp_path, monkeypatch):
    store = ObjectStore(f"file://{tmp_path}/far")
    folder = checkpoint(tmp_path / "a", 10, torch.randn(100), torch.randn(10))
    original = ObjectStore._write

    def dies(self, name, data):
        if name.startswith("steps/"):
            raise OSError("the line is cut")
        original(self, name, data)

    monkeypatch.setattr(ObjectStore, "_write", dies)
    with pytest.raises(OSError, match="the line is cut"):
        store.send(folder)
    assert store.steps() == []
    monkeypatch.undo()
    assert store.send(folder).new_objects == 0  # what had arrived is not sent again
    assert store.steps() == [10]


def test_damage_and_loss_are_named(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/far")
    store.send(checkpoint(tmp_path / "a", 10, torch.randn(1000), torch.randn(10)))
    with pytest.raises(DataError, match="has no step 7"):
        store.fetch(7, tmp_path / "b")
    victim = max(
        (tmp_path / "far" / "objects").rglob("*"), key=lambda p: p.stat().st_size * p.is_file()
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        store.fetch(10, tmp_path / "b")
    victim.unlink()
    with pytest.raises(DataError, match="is missing"):
        store.fetch(10, tmp_path / "b")
    assert folders.complete_steps(tmp_path / "b") == []
    with pytest.raises(ConfigError, match="cannot be opened"):
        ObjectStore("nonsense-protocol://x")


def test_files_are_cut_where_tensors_begin(tmp_path):
    folder = checkpoint(tmp_path, 5, torch.randn(3000), torch.randn(10))
    (cuts,) = cuts_of(folder).values()
    assert len(cuts) == 2
    assert msgspec.json.decode((folder / folders.COMPLETE).read_bytes())["step"] == 5
