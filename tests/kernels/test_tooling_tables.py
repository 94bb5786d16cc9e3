"""Configurations come from the table of this GPU, and a candidate has to be right before it may be fast."""

import types

import msgspec
import pytest
import torch

from cairn.core.errors import DataError, HardwareError
from cairn.kernels import tuned
from cairn.kernels.tooling import catalogue, measure
from cairn.kernels.tooling import tune as tuning
from cairn.kernels.tooling.measure import rotation
from cairn.kernels.tooling.tune import Result, Trial, choose, merged
from cairn.kernels.tuned import TABLES, Table, read_table, slug, trying, write_table

DEFAULT = {"num_warps": 4, "rows": 1}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU by name, with a table of its own."""
    monkeypatch.setattr(tuned, "_current_device", lambda: "NVIDIA H200")
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    tuned.forget()
    yield tmp_path
    tuned.forget()


def write(folder, kernels) -> None:
    write_table(Table(device="NVIDIA H200", kernels=kernels), folder / "nvidia-h200.json")


def test_without_a_gpu_the_default_is_the_answer():
    assert tuned.tuned("rmsnorm", "columns=1", DEFAULT) == DEFAULT
    assert tuned.tuned("rmsnorm", "columns=1", DEFAULT) is not DEFAULT


def test_an_entry_replaces_what_it_names(gpu):
    write(gpu, {"rmsnorm": {"columns=4096": {"num_warps": 8}}})
    assert tuned.tuned("rmsnorm", "columns=4096", DEFAULT) == {"num_warps": 8, "rows": 1}
    assert tuned.tuned("rmsnorm", "columns=2048", DEFAULT) == DEFAULT
    assert tuned.tuned("other", "columns=4096", DEFAULT) == DEFAULT


def test_a_missing_table_is_said_once(gpu, capsys):
    for _ in range(3):
        assert tuned.tuned("rmsnorm", "x", DEFAULT) == DEFAULT
        assert tuned.tuned("swiglu", "y", DEFAULT) == DEFAULT
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "NVIDIA H200" in said[0]


def test_a_missing_entry_is_an_event_once_and_the_first_is_said(gpu, monkeypatch, capsys):
    write(gpu, {"rmsnorm": {"y": {"num_warps": 8}}})
    events = []
    monkeypatch.setattr(tuned, "instant", lambda name, **fields: events.append(fields))
    for _ in range(3):
        for key in ("y", "x", "z"):
            tuned.tuned("rmsnorm", key, DEFAULT)
    found = [(event["kernel"], event["key"]) for event in events]
    assert found == [("rmsnorm", "x"), ("rmsnorm", "z")]
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("note: rmsnorm x runs with its default on NVIDIA H200")


def test_a_damaged_table_is_an_error_with_a_way_out(gpu):
    (gpu / "nvidia-h200.json").write_text('{"device": 3}')
    with pytest.raises(DataError, match=r"nvidia-h200\.json"):
        tuned.tuned("rmsnorm", "x", DEFAULT)


def test_a_trial_goes_before_the_table(gpu):
    write(gpu, {"rmsnorm": {"k": {"num_warps": 8}}})
    with trying("rmsnorm", "k", {"rows": 2}):
        assert tuned.tuned("rmsnorm", "k", DEFAULT) == {"num_warps": 4, "rows": 2}
        assert tuned.tuned("rmsnorm", "other", DEFAULT) == DEFAULT
    assert tuned.tuned("rmsnorm", "k", DEFAULT)["num_warps"] == 8


def test_names_of_tables():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_the_tables_that_ship_can_be_read():
    for path in TABLES.glob("*.json"):
        table = read_table(path)
        assert slug(table.device) == path.stem
        assert set(table.kernels) <= set(catalogue.kernels())


def trial(ms, **config) -> Trial:
    return Trial(config=config, ms=ms)


def test_the_fastest_is_chosen_but_not_for_noise():
    assert choose([trial(1.0, a=1), trial(0.5, a=2), trial(0.6, a=3)]) == {"a": 2}
    assert choose([trial(1.0, a=1), trial(0.995, a=2)]) == {"a": 1}
    assert choose([Trial(config={"a": 1}, refused="no"), trial(2.0, a=2)]) == {"a": 2}
    assert choose([Trial(config={"a": 1}, refused="no")]) is None


def test_gain_is_over_the_first():
    result = Result(kernel="k", key="x", trials=[trial(1.0), trial(0.5)], best={})
    assert result.gain == 2.0
    assert (
        Result(kernel="k", key="x", trials=[Trial(config={}, refused="x")], best=None).gain == 1.0
    )


def test_results_are_merged_into_the_old_table(monkeypatch):
    monkeypatch.setattr(tuning, "require_gpu", lambda: "NVIDIA H200")
    old = Table(device="NVIDIA H200", kernels={"a": {"k": {"w": 1}}, "b": {"k": {"w": 2}}})
    results = [
        Result(kernel="a", key="k", trials=[], best={"w": 4}),
        Result(kernel="a", key="new", trials=[], best={"w": 8}),
        Result(kernel="b", key="lost", trials=[], best=None),
    ]
    table = merged(old, results, "cairn kernels tune")
    assert table.kernels == {"a": {"k": {"w": 4}, "new": {"w": 8}}, "b": {"k": {"w": 2}}}
    assert set(table.versions) == {"torch", "triton"}
    assert msgspec.json.decode(msgspec.json.encode(table), type=Table) == table


def attempt(result, expected=None, monkeypatch=None):
    calls = [lambda: result]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        tuning.timing, "measure", lambda *a, **k: tuning.timing.summarize([1e-3] * 3)
    )
    return tuning._try({"w": 1}, calls, expected, 1.0)


def test_a_candidate_is_timed_when_it_is_right(monkeypatch):
    good = torch.randn(8)
    found, result = attempt((good, {"ignored": 1}), None, monkeypatch)
    assert found.ms == pytest.approx(1.0)
    again, _ = attempt(good * 1.001, result, monkeypatch)
    assert again.refused is None


def test_a_candidate_that_computes_something_else_is_out(monkeypatch):
    good = torch.randn(8)
    found, _ = attempt(good + 1, [good], monkeypatch)
    assert "differs from the first candidate" in (found.refused or "")
    found, _ = attempt(good * float("nan"), [good], monkeypatch)
    assert found.refused
    found, _ = attempt(good * float("nan"), None, monkeypatch)
    assert found.refused == "gives NaN"


@pytest.fixture
def pretended(monkeypatch):
    """torch.cuda as far as tuning asks it: 50 MB of cache, and plenty of memory."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (100 << 30, 140 << 30))
    monkeypatch.setattr(cuda, "memory_allocated", iter([0, 10 << 20]).__next__)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(cuda, name, lambda: None)


def test_a_key_is_tuned_on_the_same_inputs(pretended, monkeypatch):
    made = []

    def prepare():
        x = torch.randn(8)
        made.append(x)
        return lambda: x * tuned.tuned("k", "key", {"factor": 1})["factor"]

    def seconds(calls, budget_ms):
        return tuning.timing.summarize([2e-5 if tuned.tuned("k", "key", {}).get("fast") else 4e-5])

    monkeypatch.setattr(tuning, "replayed", seconds)
    monkeypatch.setattr(tuning.timing, "measure", lambda *_, **__: seconds(None, 1.0))
    candidates = [
        {"factor": 1},
        {"factor": 2, "fast": True},
        {"factor": 1, "fast": True},
        {"factor": "x"},
    ]
    result = tuning.tune_key("k", tuned.Tuning("key", candidates, prepare), 1.0)
    assert len(made) == 20, "10 MiB each, until the cache is exceeded four times"
    assert [t.ms for t in result.trials] == [pytest.approx(0.04), None, pytest.approx(0.02), None]
    assert "differs" in (result.trials[1].refused or "")
    assert "TypeError" in (result.trials[3].refused or "")
    assert (result.best, result.gain) == ({"factor": 1, "fast": True}, pytest.approx(2.0))


def test_a_shape_that_cannot_be_made_is_a_result(pretended):
    def prepare():
        raise RuntimeError("out of memory")

    result = tuning.tune_key("k", tuned.Tuning("key", [{"a": 1}], prepare), 1.0)
    assert (result.best, result.trials[0].refused) == (None, "RuntimeError: out of memory")


def test_copies_stop_where_memory_does(pretended, monkeypatch):
    room = iter([(100, 140), (30, 140)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(room))
    assert len(rotation(object, object(), 1.0)) == 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 140))
    assert len(rotation(object, object(), 1.0)) == measure.COPIES
    assert len(rotation(object, object(), 1e12)) == 1


def test_tuning_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(HardwareError, match="needs a CUDA device"):
        next(iter(tuning.tune(["rmsnorm"])))
