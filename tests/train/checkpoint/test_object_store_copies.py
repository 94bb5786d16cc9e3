"""Which checkpoints go to the object store, and which one comes back."""

import shutil
import threading

import pytest

pytest.importorskip("fsspec", reason="the object store needs fsspec")

from cairn.core.errors import DataError
from cairn.train.checkpoint import folder as folders
from cairn.train.recovery.object_store_copies import FarCopies


def make(root, step):
    folder = folders.folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(f"weights of {step}".encode() * 50)
    folders.mark_complete(folder, step)
    return folder


@pytest.fixture
def far(tmp_path):
    def start(every=1, keep=0, folder="far"):
        said = []
        copies = FarCopies(
            f"file://{tmp_path}/{folder}", every, tmp_path / "run", said.append, keep
        )
        copies.said = said
        return copies

    return start


def trained(far, root, steps):
    """A checkpoint after each step, and a look after each."""
    for step in steps:
        make(root, step)
        far.look()
        far.wait()


def test_every_so_many_go_there_and_the_last_of_a_run_always(far, tmp_path):
    copies = far(every=3)
    trained(copies, tmp_path / "run", range(1, 8))
    assert copies.store.steps() == [3, 6]
    copies.look(last=True)
    copies.wait()
    assert copies.store.steps() == [3, 6, 7]
    copies.look(last=True)  # once
    assert not copies.thread.is_alive()
    assert copies.said == []


def test_checkpoints_that_came_while_one_was_sent_are_counted_each(far, tmp_path):
    copies = far(every=3)
    for step in (1, 2, 3, 4):  # nobody could look in between
        make(tmp_path / "run", step)
    copies.look()
    copies.wait()
    assert copies.store.steps() == [4]  # the third was among them
    trained(copies, tmp_path / "run", (5, 6))
    assert copies.store.steps() == [4, 6]


def test_the_folder_is_read_once_for_each_save_and_not_after_every_step(far, tmp_path, monkeypatch):
    copies, root, reads = far(every=2), tmp_path / "run", []
    complete_steps = folders.complete_steps
    monkeypatch.setattr(
        folders, "complete_steps", lambda root: reads.append(root) or complete_steps(root)
    )
    for save in (1, 2, 3, 4):
        make(root, save)
        for _ in range(50):  # steps of the loop
            copies.look(save)
            copies.wait()
    assert len(reads) == 4
    assert copies.store.steps() == [2, 4]


def test_a_save_that_ends_while_a_copy_is_sent_is_seen_afterwards(far, tmp_path, monkeypatch):
    copies, root = far(), tmp_path / "run"
    send, may_go = copies.store.send, threading.Event()
    monkeypatch.setattr(copies.store, "send", lambda folder: may_go.wait(60) and send(folder))
    make(root, 1)
    copies.look(1)
    make(root, 2)
    copies.look(2)  # the first copy is on its way
    may_go.set()
    copies.wait()
    assert copies.store.steps() == [1]
    copies.look(2)
    copies.wait()
    assert copies.store.steps() == [1, 2]


def test_a_slow_store_gets_the_whole_of_what_the_disk_has_removed(far, tmp_path, monkeypatch):
    copies = far()
    send, root = copies.store.send, tmp_path / "run"

    def slow(folder):
        folders.remove(folders.folder_of(root, 1))  # the disk makes room
        return send(folder)

    monkeypatch.setattr(copies.store, "send", slow)
    trained(copies, root, [1])
    assert copies.said == []
    assert folders.steps(root) == []
    assert not (root / ".sending").exists()
    assert copies.store.fetch(1, tmp_path / "back").name == "step-00000001"


def test_a_disk_without_links_is_sent_from_as_it_is(far, tmp_path, monkeypatch):
    def refused(*args, **named):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refused)
    copies = far()
    trained(copies, tmp_path / "run", [1])
    assert copies.store.steps() == [1]
    assert folders.complete_steps(tmp_path / "run") == [1]


def test_only_so_many_are_kept_there(far, tmp_path):
    copies = far(keep=2)
    trained(copies, tmp_path / "run", range(1, 5))
    assert copies.store.steps() == [3, 4]
    copies.store.fetch(3, tmp_path / "back")


def test_a_damaged_far_copy_gives_way_to_the_one_before(far, tmp_path):
    copies = far()
    trained(copies, tmp_path / "run", (1, 2))
    parts = {step: copies.store._manifest(step).files["data"][0].digest for step in (1, 2)}
    objects = tmp_path / "far" / "objects"
    (objects / parts[2][:2] / parts[2]).write_bytes(b"something else")
    shutil.rmtree(tmp_path / "run")
    again = far()
    again.fetch_if_empty()
    assert folders.complete_steps(tmp_path / "run") == [1]
    assert ["step 2" in line for line in again.said] == [True, False]
    shutil.rmtree(tmp_path / "run")
    (objects / parts[1][:2] / parts[1]).unlink()
    with pytest.raises(DataError, match="none of the 2 checkpoints in"):
        far().fetch_if_empty()
    assert folders.steps(tmp_path / "run") == []


def test_a_store_that_cannot_be_asked_is_not_taken_for_an_empty_one(far, monkeypatch):
    copies = far()

    def unreachable(*args, **named):
        raise RuntimeError("no route to the bucket")

    monkeypatch.setattr(copies.store.files, "find", unreachable)
    with pytest.raises(DataError, match=r"does not say which checkpoints it has.*no route"):
        copies.fetch_if_empty()
    monkeypatch.undo()
    far(folder="empty").fetch_if_empty()  # an empty one is fine


def test_a_store_that_fails_costs_a_warning(far, tmp_path, monkeypatch):
    copies = far()

    def fails(*args, **named):
        raise RuntimeError("quota")

    monkeypatch.setattr(copies.store.files, "pipe_file", fails)
    trained(copies, tmp_path / "run", [1])
    assert len(copies.said) == 1
    assert "step-00000001 was not copied" in copies.said[0]
