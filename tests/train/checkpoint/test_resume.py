"""A run that is killed and started again goes on as if nothing had happened, to the bit."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tiny_runs import TINY, loop, recipe

from cairn.core.errors import ConfigError, DataError
from cairn.core.exit_cause import classify
from cairn.models.checkpoint import open_checkpoint
from cairn.train import step_log
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint import save as saving
from cairn.train.checkpoint.export import export_newest
from cairn.train.checkpoint.load import load_pieces, read_about
from cairn.train.checkpoint.piece import Piece, pieces_of, whole
from cairn.train.checkpoint.save import NotSaved, write_pieces
from cairn.train.config import Checkpoint, Optim, Precision
from cairn.train.launch import failure_of
from cairn.train.metrics_log import read_log
from cairn.train.recovery.evidence import evidence_of


def logged(folder):
    return [(record.step, record.loss, record.norm, record.lr) for record in read_log(folder)]


def run_until(config, step):
    """In a process of its own, which kills itself in the middle of a step, as a power cut would."""

    def train():
        one = loop(config)

        def on_record(record):
            if record.step == step:
                one.saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        one.log.on_record = on_record
        one.run()

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("steps", "killed_at", "changes"),
    [
        (20, 12, dict()),
        (12, 8, dict(optim=Optim(kind="muon", lr=1e-2), precision=Precision(kernels="fused"))),
        (12, 8, dict(optim=Optim(lr=1e-2, states="int8", offload=True))),
        (7, 6, dict(precision=Precision(kind="float16"))),
    ],
    ids=["adamw", "muon fused", "int8 offloaded", "float16"],
)
def test_killed_and_resumed_equals_unbroken_to_the_bit(tmp_path, steps, killed_at, changes):
    unbroken = loop(recipe(tmp_path / "a", steps=steps, **changes))
    outcome = unbroken.run()
    config = recipe(tmp_path / "b", steps=steps, **changes)
    run_until(config, killed_at)  # the last checkpoint is of step 10 or 5
    resumed = loop(config)
    again = resumed.run()
    assert (again.first_loss, again.last_loss) == (outcome.first_loss, outcome.last_loss)
    assert logged(tmp_path / "a") == logged(tmp_path / "b")
    expected = unbroken.state.parallel.parameters()
    for name, value in resumed.state.parallel.parameters().items():
        assert torch.equal(value, expected[name]), name
    assert len(folders.complete_steps(tmp_path / "b" / "checkpoints")) == (3 if steps > 10 else 2)


def test_a_checkpoint_in_the_background_is_of_its_own_step(tmp_path):
    """Training goes on while a checkpoint is written; what is written is the state when it was asked for."""
    config = recipe(tmp_path, steps=5, checkpoint=Checkpoint(every=2, keep=9, export=False))
    one = loop(config)
    seen = {}
    original = one.save

    def save():
        seen[one.state.step] = {
            n: p.detach().clone() for n, p in one.state.parallel.parameters().items()
        }
        original()

    one.save = save
    one.run()
    assert set(seen) == {2, 4, 5}
    slots = one.state.parallel.slots
    for step, expected in seen.items():
        found = {n: torch.empty_like(t) for n, t in expected.items()}
        pieces = {f"model/{n}": p for n, p in pieces_of(slots, found).items()}
        load_pieces(folders.folder_of(one.root, step), pieces)
        assert all(torch.equal(found[n], t) for n, t in expected.items())


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    loop(recipe(tmp_path, steps=4)).run()
    outcome = loop(recipe(tmp_path, steps=4)).run()
    assert (outcome.step, outcome.first_loss) == (4, None)
    longer = loop(recipe(tmp_path, steps=6)).run()
    assert longer.step == 6


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path):
    loop(recipe(tmp_path, steps=2)).run()
    other = recipe(tmp_path, model=msgspec.structs.replace(TINY, hidden=64, intermediate=80))
    with pytest.raises(ConfigError, match="hidden is 32 there and 64 here"):
        loop(other).run()
    with pytest.raises(ConfigError, match=r"is .adamw. there and .muon. here"):
        loop(recipe(tmp_path, optim=Optim(kind="muon"))).run()


def test_damage_falls_back_to_the_checkpoint_before(tmp_path):
    loop(recipe(tmp_path, steps=10)).run()
    root = tmp_path / "checkpoints"
    data = next(folders.folder_of(root, 10).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    said = []
    one = loop(recipe(tmp_path, steps=10), log_line=said.append)
    assert one.resume()
    assert one.state.step == 5
    assert any("step-00000010" in text and "damaged" in text for text in said)
    # Under its own name it would count among the newest, and a good one be removed for it.
    assert folders.complete_steps(tmp_path / "checkpoints") == [5]


def test_a_full_disk_is_told_and_training_goes_on(tmp_path, monkeypatch):
    calls = []

    def full_once(folder, pieces, group=None):
        calls.append(folder)
        if len(calls) == 2:
            (folder / "__0_0.distcp").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_pieces(folder, pieces, group)

    monkeypatch.setattr(saving, "write_pieces", full_once)
    said, on_record = [], []

    def log_line(text):
        said.append(text)
        on_record.append(text)

    slowly = lambda record: (on_record.append(record.step), time.sleep(0.02))  # noqa: E731
    outcome = loop(recipe(tmp_path, steps=20), log_line=log_line, on_record=slowly).run()
    assert outcome.step == 20
    (warned,) = [text for text in said if "disk is full" in text]
    # At the latest when the next save begins, which is behind the record of its step.
    assert on_record.index(warned) < on_record.index(16)
    assert folders.steps(tmp_path / "checkpoints") == [5, 15, 20]  # nothing half is left of 10


def test_a_run_whose_last_checkpoint_is_lost_has_failed(tmp_path, monkeypatch):
    def full(folder, pieces, group=None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_pieces", full)
    with pytest.raises(NotSaved, match="the disk is full") as caught:
        loop(recipe(tmp_path, steps=3)).run()
    failure = failure_of(0, caught.value)
    rank = SimpleNamespace(word="failed", value=failure)
    _, evidence = evidence_of([rank], [failure])
    assert (
        caught.value.exit_status == 1
    )  # 2 would say: a mistake in what was asked, no use to try again
    assert classify(evidence).cause == "unknown"


def test_a_run_that_is_stopped_after_a_failed_save_tries_again_and_says_so(tmp_path, monkeypatch):
    """The warning has been given by then; the end has to know of it all the same."""
    monkeypatch.setattr(
        saving, "write_pieces", lambda *rest: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    )
    one = loop(recipe(tmp_path, checkpoint=Checkpoint(every=2, in_background=False)))
    one._anybody = lambda here: one.state.step == 2
    with pytest.raises(NotSaved):
        one.run()


def test_a_full_disk_is_told_whatever_torch_calls_it(tmp_path):
    """torch's writer ends with `unexpected pos 704 vs 598` there."""
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write_pieces(tmp_path, {"w": whole(torch.zeros(9999))})
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("older", [False, True])
def test_an_error_is_told_as_it_is_however_little_room_there_is(tmp_path, monkeypatch, older):
    """Only the operating system knows whether a disk is full; older checkpoints are mentioned if there are some."""

    def broken(folder, pieces, group=None):
        raise RuntimeError("unexpected pos 704 vs 598")

    if older:
        loop(recipe(tmp_path, steps=2)).run()
    one = loop(recipe(tmp_path, steps=3))
    monkeypatch.setattr(saving, "write_pieces", broken)
    nearly_full = shutil._ntuple_diskusage(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    with pytest.raises(NotSaved, match="RuntimeError: unexpected pos 704 vs 598") as caught:
        one.run()
    assert ("older checkpoints are still there" in caught.value.hint) == older
    assert ("no checkpoint is there yet" in caught.value.hint) != older


def test_a_complete_checkpoint_outlives_an_error_after_it(tmp_path, monkeypatch):
    """The older ones are gone by then: removed as well, it would leave a run with none."""
    loop(recipe(tmp_path, steps=2)).run()
    one = loop(recipe(tmp_path, steps=4, checkpoint=Checkpoint(every=0, keep=1, export=False)))
    keep_newest = folders.keep_newest

    def lost(root, count):
        keep_newest(root, count)
        raise ConnectionError("closed by peer")

    monkeypatch.setattr(folders, "keep_newest", lost)
    with pytest.raises(NotSaved, match="closed by peer"):
        one.run()
    assert folders.complete_steps(one.root) == [4]
    assert folders.complaint(folders.folder_of(one.root, 4)) is None


class Full:
    """A sink whose disk is full for a while."""

    def __init__(self):
        self.got = []

    def put(self, record):
        if record.step in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.got.append(record.step)

    def close(self):
        pass


def test_a_log_that_cannot_be_written_does_not_end_a_run(tmp_path, monkeypatch):
    sink, said = Full(), []
    monkeypatch.setattr(step_log, "open_sinks", lambda *rest: [sink])
    outcome = loop(recipe(tmp_path, steps=4), log_line=said.append).run()
    assert outcome.step == 4
    assert sink.got == [1, 4]
    assert [text for text in said if "step 2 is not in the log" in text]
    assert not [text for text in said if "step 3" in text]  # once is enough


def test_no_room_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(ConfigError, match="a checkpoint needs"):
        loop(recipe(tmp_path))


def test_the_log_of_a_lost_life_is_dropped(tmp_path):
    run_until(recipe(tmp_path), 8)
    assert len(read_log(tmp_path)) >= 7
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"step": 9, "lo')  # cut off by the end of its process
    one = loop(recipe(tmp_path))
    one.run()
    assert [record.step for record in read_log(tmp_path)] == list(range(1, 21))


def test_pieces_written_by_one_layout_are_read_by_another(tmp_path):
    table = torch.arange(24.0).view(6, 4)
    columns = {"a": Piece(table[:, :2].clone(), (6, 4), (0, 0))}
    folder = tmp_path / "x"
    folder.mkdir()
    write_pieces(folder, {"a": whole(table)})
    load_pieces(folder, columns)
    rows = Piece(torch.empty(2, 4), (6, 4), (3, 0))
    load_pieces(folder, {"a": rows})
    assert torch.equal(columns["a"].tensor, table[:, :2])
    assert torch.equal(rows.tensor, table[3:5])
    with pytest.raises(DataError, match=r"\[6, 4\] in the checkpoint, \[6, 5\] here"):
        load_pieces(folder, {"a": Piece(torch.empty(6, 5), (6, 5), (0, 0))})
    with pytest.raises(DataError, match="float32 in the checkpoint"):
        load_pieces(folder, {"a": whole(table.half())})


def test_an_export_has_the_weights_of_the_checkpoint(tmp_path):
    one = loop(recipe(tmp_path / "run", steps=3, precision=Precision(kernels="fused")))
    one.run()
    found = export_newest(tmp_path / "run", tmp_path / "model", None)
    assert read_about(found).step == 3
    export_newest(tmp_path / "run", tmp_path / "model", None)  # again, over the old one
    model = open_checkpoint(tmp_path / "model").load("cpu", fused=True)
    for name, value in one.state.parallel.parameters().items():
        assert torch.equal(model.get_parameter(name), value), name
    with pytest.raises(DataError, match="no complete checkpoint"):
        export_newest(tmp_path / "absent", tmp_path / "model", None)


def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path):
    one = loop(recipe(tmp_path, steps=20, checkpoint=Checkpoint(every=0, export=False)))

    def on_record(record):
        if record.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    one.log.on_record = on_record
    outcome = one.run()
    assert outcome.stopped_early
    assert folders.complete_steps(one.root) == [outcome.step]
    resumed = loop(recipe(tmp_path, steps=20, checkpoint=Checkpoint(every=0, export=False)))
    assert resumed.run().step == 20
