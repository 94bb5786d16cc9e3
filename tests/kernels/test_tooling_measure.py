"""A row says how wrong, how fast and beside what; a wrong kernel gets no time."""

import math

import pytest

from cairn.hw.timing import summarize
from cairn.kernels.kernel import Case, Cost, Prepared
from cairn.kernels.tooling import catalogue, demo, measure
from cairn.kernels.tooling.measure import Ceiling, measure_case

CEILING = Ceiling(device="GPU", bytes_per_s=4e12, flops_per_s={"bf16": 800e12})


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """Each call says for itself how long it took."""

    def timed(call, inputs=((),), **_):
        return summarize([call(*inputs[0])] * 5)

    monkeypatch.setattr(measure.timing, "measure", timed)
    monkeypatch.setattr(measure.timing, "measure_graph", timed)
    monkeypatch.setattr(measure, "rotation", lambda make, first, size: [first, make()])


def case(ours=1e-3, anchors=None, error=1e-3, graph=False, prepare=None, **fields) -> Case:
    prepared = Prepared(
        lambda: ours, {n: (lambda s=s: s) for n, s in (anchors or {}).items()}, lambda: error
    )
    cost = fields.pop("cost", Cost(4e11, 3.2e9))
    return Case("k", "8 x 8", "bf16", cost, prepare or (lambda: prepared), graph=graph, **fields)


@pytest.mark.parametrize("graph", [False, True])
def test_a_row(graph):
    row = measure_case(case(anchors={"slow": 4e-3, "best": 2e-3}, graph=graph), CEILING)
    assert row.failure is None
    assert row.ms == pytest.approx(1.0)
    assert row.tflops == pytest.approx(400)
    assert row.gbps == pytest.approx(3200)
    assert row.fraction_of_ceiling == pytest.approx(0.8)  # memory: 0.8 ms; compute: 0.5 ms
    assert (row.anchor, row.ratio_to_anchor) == ("best", pytest.approx(2.0))
    assert row.anchors_ms == {"slow": pytest.approx(4.0), "best": pytest.approx(2.0)}
    assert row.error == 1e-3


def test_ours_and_the_anchors_take_turns():
    order = []
    prepared = Prepared(
        lambda: order.append("ours") or 1e-3,
        {"best": lambda: order.append("best") or 2e-3},
        lambda: 0.0,
    )
    row = measure_case(case(prepare=lambda: prepared), CEILING)
    assert order == ["ours", "best"] * measure.ROUNDS
    assert row.ratio_to_anchor == pytest.approx(2.0)


def test_a_compute_bound_case_is_held_against_the_matmul_rate():
    row = measure_case(case(cost=Cost(6e11, 1e6)), CEILING)
    assert row.fraction_of_ceiling == pytest.approx(0.75)
    assert (row.anchor, row.ratio_to_anchor) == (None, None)


def test_a_dtype_without_a_matmul_rate_is_bound_by_memory():
    assert CEILING.floor_s(Cost(1e15, 4e12), "int4") == pytest.approx(1.0)


@pytest.mark.parametrize("error", [2e-2, math.nan, math.inf])
def test_a_wrong_kernel_gets_no_time(error):
    row = measure_case(case(error=error), CEILING)
    assert "exceeds 0.01" in (row.failure or "")
    assert (row.ms, row.tflops, row.ratio_to_anchor) == (None, None, None)


def test_the_tolerance_is_the_cases_own():
    assert measure_case(case(error=2e-2, tolerance=5e-2), CEILING).failure is None


@pytest.mark.parametrize("where", ["prepare", "error", "ours"])
def test_whatever_a_kernel_raises_is_in_its_row(where):
    def fails(*_):
        raise RuntimeError("no such\nluck")

    prepared = Prepared(
        fails if where == "ours" else lambda: 1.0, {}, fails if where == "error" else lambda: 0.0
    )
    row = measure_case(case(prepare=fails if where == "prepare" else lambda: prepared), CEILING)
    assert row.failure == "RuntimeError: no such"


def test_an_anchor_that_does_not_run_is_a_note():
    def fails():
        raise RuntimeError("no cuDNN")

    prepared = Prepared(lambda: 1e-3, {"cuDNN": fails, "torch": lambda: 2e-3}, lambda: 0.0)
    row = measure_case(case(prepare=lambda: prepared), CEILING)
    assert row.failure is None
    assert (row.anchor, row.notes) == ("torch", ["cuDNN did not run: RuntimeError: no cuDNN"])


def test_a_line_for_a_person():
    good = demo.line(measure_case(case(anchors={"cuBLAS": 2e-3}), CEILING))
    for words in (
        "8 x 8",
        "1000.0 us",
        "400.0 TFLOP/s",
        "3200 GB/s",
        "80.0% of ceiling",
        "2.00x cuBLAS",
    ):
        assert words in good
    assert "FAILED: error" in demo.line(measure_case(case(error=1.0), CEILING))


def test_check_goes_through_the_cases_and_times_nothing(capsys, monkeypatch):
    monkeypatch.setattr(measure.timing, "measure", lambda *_, **__: pytest.fail("it was timed"))

    def fails() -> Prepared:
        raise RuntimeError("no such luck")

    assert demo.check([case(), case(error=1.0), case(error=math.nan), case(prepare=fails)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("error 1.0e-03")
    assert lines[1].endswith("error 1.0e+00 exceeds 1.0e-02")
    assert lines[2].endswith("error nan exceeds 1.0e-02")
    assert lines[3].endswith("RuntimeError: no such luck")
    assert demo.check([case()]) == 0


@pytest.mark.parametrize(
    ("arguments", "checked"), [(["--check", "2"], ["1", "2"]), (["--check"], ["1", "2", "3"])]
)
def test_the_smallest_cases_are_checked_first(monkeypatch, arguments, checked):
    import sys
    import types

    import torch

    cases = [case(cost=Cost(0, size))._replace(shape=str(size)) for size in (3, 1, 2)]
    module = types.ModuleType("made_up_kernel")
    module.cases = lambda: iter(cases)
    seen = []
    monkeypatch.setitem(sys.modules, "made_up_kernel", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["made_up_kernel", *arguments])
    monkeypatch.setattr(demo, "check", lambda cases: seen.extend(c.shape for c in cases) or 0)
    with pytest.raises(SystemExit) as left:
        demo.demo("made_up_kernel")
    assert left.value.code == 0
    assert seen == checked


@pytest.mark.parametrize("arguments", [["--check", "x"], ["--check", "0"], ["--fast"], ["a", "b"]])
def test_a_demo_says_what_it_takes(monkeypatch, capsys, arguments):
    monkeypatch.setattr("sys.argv", ["cairn.kernels.cases.rmsnorm", *arguments])
    with pytest.raises(SystemExit) as left:
        demo.demo("cairn.kernels.cases.rmsnorm")
    assert left.value.code == 2
    assert (
        capsys.readouterr().err
        == "usage: python -m cairn.kernels.cases.rmsnorm [--check [COUNT]]\n"
    )


def test_every_kernel_has_tests_in_the_interpreter():
    """Which its demo runs where there is no GPU."""
    files = {name: demo.interpreted_tests(name) for name in catalogue.kernels()}
    assert all(files.values())
    assert [path.name for path in files["rmsnorm"]] == ["interpreted_rmsnorm.py"]
    assert [path.name for path in files["kv_write"]] == ["interpreted_rope.py"]
