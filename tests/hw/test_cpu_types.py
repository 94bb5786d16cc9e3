"""Which 16-bit types a CPU multiplies in, by its features, and what is measured there."""

import pytest

from cairn.hw import cpu_types
from cairn.hw.cpu_types import multiplies
from cairn.hw.measure_device import why_not


@pytest.mark.parametrize(
    ("features", "quick"),
    [
        ({"avx2", "avx512"}, set()),
        ({"avx512", "avx512-bf16"}, {"bf16"}),
        ({"avx512-bf16", "avx512-fp16"}, {"bf16", "fp16"}),
        ({"neon", "dot"}, set()),
        ({"neon", "bf16", "i8mm"}, {"bf16"}),
    ],
)
def test_the_cpu_decides_for_each_type(monkeypatch, features, quick):
    monkeypatch.setattr(cpu_types, "cpu_features", lambda: frozenset(features))
    assert {dtype for dtype in ("bf16", "fp16") if multiplies(dtype)} == quick
    assert multiplies("fp32")


@pytest.mark.parametrize("features", [{"neon", "dot"}, {"neon", "bf16"}], ids=["without", "with"])
def test_a_ceiling_is_measured_where_there_are_such_products(monkeypatch, features):
    """What torch does without them is a thousandth of what it does in float32: no limit of anything."""
    monkeypatch.setattr(cpu_types, "cpu_features", lambda: frozenset(features))
    reason = why_not("cpu", "bf16")
    assert (reason is None) == ("bf16" in features)
    assert reason is None or "fp32" in reason
    assert why_not("cpu", "fp32") is None
