"""The table of vendors' peaks is consistent with itself, and never guesses a chip."""

import pytest

from cairn.hw.datasheet import CHIPS, DTYPES, find_chip, pcie_rate


@pytest.mark.parametrize(
    ("driver_name", "chip"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_known_names(driver_name, chip):
    found, reason = find_chip(driver_name)
    assert found is not None
    assert found.name == chip
    assert chip in reason


@pytest.mark.parametrize(
    "driver_name",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "NVIDIA L40", "Arm Neoverse N1", ""],
)
def test_a_near_match_is_no_match(driver_name):
    found, reason = find_chip(driver_name)
    assert found is None
    assert repr(driver_name) in reason


def test_a_slice_is_not_the_chip():
    found, reason = find_chip("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert found is None
    assert "slice" in reason


def test_every_name_belongs_to_one_chip():
    names = [name for chip in CHIPS for name in chip.drivers_call_it]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_rates_grow_as_numbers_shrink(chip):
    rates = chip.flops_per_s
    assert set(rates) <= set(DTYPES)
    assert rates["fp32"] <= rates["tf32"] < rates["bf16"] == rates["fp16"]
    assert rates["bf16"] < rates.get("fp8", rates["int8"]) <= rates["int8"]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_units_are_bytes_and_seconds(chip):
    assert 10e9 < chip.memory_bytes < 1e12
    assert 100e9 < chip.bytes_per_s < 20e12
    assert 1 << 20 <= chip.l2_bytes < 1 << 30
    assert 30 < chip.flops_per_s["bf16"] / chip.bytes_per_s < 1000  # the ridge, in FLOP per byte


def test_h200_numbers_of_the_brochure():
    chip, _ = find_chip("NVIDIA H200")
    assert chip is not None
    assert chip.bytes_per_s == 4.8e12
    assert chip.flops_per_s["bf16"] == pytest.approx(989.4e12)
    assert chip.flops_per_s["fp8"] == pytest.approx(2 * chip.flops_per_s["bf16"], rel=1e-3)


def test_pcie():
    assert pcie_rate(5, 16) == pytest.approx(63e9, rel=1e-3)
    assert pcie_rate(None, 16) is None
    assert pcie_rate(5, None) is None
