"""The tools on a real GPU: ceilings, rows with and without a graph, tuning that refuses what is wrong."""

import pytest
import torch
import triton
import triton.language as tl

from cairn.kernels import tuned
from cairn.kernels.kernel import Case, Cost, Prepared
from cairn.kernels.tooling import tune
from cairn.kernels.tooling.measure import measure_case, measure_ceiling
from cairn.kernels.tuned import Tuning, read_table

pytestmark = pytest.mark.gpu

DEFAULT = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def _double(x, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < count) * 2, mask=place < count)


def double(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    config = tuned.tuned("double", "any", DEFAULT)
    if config.get("wrong"):
        return out.copy_(x)
    grid = (triton.cdiv(x.numel(), config["BLOCK"]),)
    _double[grid](x, out, x.numel(), BLOCK=config["BLOCK"], num_warps=config["num_warps"])
    return out


def case(count: int, graph: bool) -> Case:
    def prepare() -> Prepared:
        x = torch.randn(count, device="cuda")
        out = torch.empty_like(x)

        def error() -> float:
            out.fill_(float("nan"))
            return float((double(x, out) - 2 * x).norm() / x.norm())

        return Prepared(lambda: double(x, out), {"torch": lambda: torch.mul(x, 2, out=out)}, error)

    return Case("double", str(count), "fp32", Cost(count, 8.0 * count), prepare, 1e-6, graph)


@pytest.fixture(scope="module")
def ceiling():
    return measure_ceiling(["bf16", "fp32", "no such type"], budget_ms=50)


def test_ceilings_are_plausible(ceiling):
    assert set(ceiling.flops_per_s) == {"bf16", "fp32"}
    assert ceiling.flops_per_s["bf16"] > ceiling.flops_per_s["fp32"]
    assert ceiling.bytes_per_s > 1e11


@pytest.mark.parametrize(("count", "graph"), [(1 << 27, False), (1 << 20, True), (1000, True)])
def test_a_memory_bound_row(ceiling, count, graph):
    row = measure_case(case(count, graph), ceiling, budget_ms=30)
    assert row.failure is None
    assert row.anchor == "torch"
    assert row.ms is not None
    assert row.fraction_of_ceiling is not None
    assert 0 < row.fraction_of_ceiling < 1.3, "more would mean that the cache was measured"
    if count > 1 << 26:
        assert row.fraction_of_ceiling > 0.5


def test_tuning_refuses_what_is_wrong_or_does_not_run(monkeypatch, tmp_path):
    def prepare():
        x = torch.randn(1 << 22, device="cuda")
        out = torch.empty_like(x)
        return lambda: double(x, out)

    candidates = [DEFAULT, {"wrong": True}, {"BLOCK": 1000}, {"BLOCK": 256, "num_warps": 1}]
    result = tune.tune_key("double", Tuning("any", candidates, prepare), budget_ms=10)
    good, wrong, broken, other = result.trials
    assert good.ms is not None
    assert "differs" in (wrong.refused or "")
    assert broken.refused
    assert other.ms is not None
    assert result.best in (DEFAULT, candidates[3])

    path = tune.save([result], "test", tmp_path)
    assert read_table(path).kernels["double"]["any"] == result.best
    monkeypatch.setattr(tuned, "TABLES", tmp_path)
    tuned.forget()
    try:
        assert tuned.tuned("double", "any", {"x": 1}) == {"x": 1, **result.best}
    finally:
        tuned.forget()
