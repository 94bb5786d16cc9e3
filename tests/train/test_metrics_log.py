"""The log of a run and its report."""

import sys
import types

import pytest
from tiny_runs import recipe, state_of

from cairn.core.errors import ConfigError, DataError
from cairn.train.config import Log
from cairn.train.memory import predict
from cairn.train.metrics_log import (
    FILE,
    HeldOut,
    JsonLines,
    Record,
    TensorBoard,
    WeightsAndBiases,
    open_sinks,
    read_log,
    smoothed,
)
from cairn.train.report import render


def record(step, loss=2.0, **rest):
    fields = dict(norm=1.0, lr=0.1, tokens=step * 10, seconds=0.5, tokens_per_s=20.0)
    return Record(step=step, loss=loss, **(fields | rest))


def test_lines_come_back_and_a_resumed_run_drops_the_lost_ones(tmp_path):
    sink = JsonLines(tmp_path, 0)
    for step in range(1, 8):
        sink.put(record(step))
    sink.close()
    JsonLines(tmp_path, 4).close()
    assert [r.step for r in read_log(tmp_path)] == [1, 2, 3, 4]
    assert read_log(tmp_path / "absent") == []


def test_a_log_that_cannot_be_cut_says_why_and_keeps_its_lines(tmp_path):
    sink = JsonLines(tmp_path, 0)
    sink.put(record(1))
    (tmp_path / f".{FILE}").mkdir()  # where the shorter log would be written
    with pytest.raises(IsADirectoryError):
        sink.rewind(0)
    sink.put(record(2))
    sink.close()
    assert [r.step for r in read_log(tmp_path)] == [1, 2]


def test_a_line_cut_off_at_the_end_is_forgiven_and_one_in_the_middle_is_not(tmp_path):
    sink = JsonLines(tmp_path, 0)
    sink.put(record(1))
    sink.close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"step": 2')
    assert [r.step for r in read_log(tmp_path)] == [1]
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(DataError, match="line 1"):
        read_log(tmp_path)


def test_sinks_that_are_not_installed_say_so(tmp_path, monkeypatch):
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    for log in (Log(wandb=True), Log(tensorboard=True)):
        with pytest.raises(ConfigError, match="not installed"):
            open_sinks(tmp_path, log, 0, {})


def test_smoothing_follows_the_loss_and_leaves_out_what_is_not_finite():
    records = [record(1, 4.0), record(2, None), record(3, 1.0)]
    assert smoothed(records, 0.5) == [(1, 4.0), (3, 2.0)]


def test_the_report_shows_curves_recipe_and_bad_steps(tmp_path):
    config = recipe(tmp_path)
    spec = state_of(config).state.spec
    records = [
        record(1, 4.0, mfu=0.4),
        record(2, None, bad="the loss is <nan>"),
        record(3, 3.0, mfu=0.5),
    ]
    page = render(config, spec, predict(spec, config, False), ["a note"], records)
    for words in (
        "Loss",
        "Learning rate",
        "MFU",
        "a note",
        "4.000 to 3.000",
        "[optim]",
        "&lt;nan&gt;",
    ):
        assert words in page
    assert "<nan>" not in page
    assert "nothing" not in render(config, spec, predict(spec, config, False), [], [])


def test_other_tools_get_the_numbers_of_steps_and_of_held_out_data(tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path / "tensorboard")
            calls.append("opened")

        def __getattr__(self, name):
            return lambda *values: calls.append((name, *values))

    class Run:
        def log(self, values, step):
            calls.append(("log", values, step))

        def finish(self):
            calls.append("finished")

    calls = []
    held = HeldOut(step=2, loss=1.5, bits_per_byte=0.7, tokens=8, seconds=0.1, texts=["a text"])
    board = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: Run()))
    for sink in (TensorBoard(tmp_path), WeightsAndBiases(tmp_path, {})):
        sink.put(record(1))
        sink.put(held)
        sink.close()
    assert ("add_scalar", "loss", 2.0, 1) in calls
    assert ("add_scalar", "validation/loss", 1.5, 2) in calls
    assert ("add_text", "validation/text 0", "a text", 2) in calls
    logged = [(values, step) for name, values, step in (c for c in calls if c[0] == "log")]
    assert logged[1][0]["validation/bits_per_byte"] == 0.7
    assert [step for _, step in logged] == [1, 2]
    assert calls[-1] == "finished"
