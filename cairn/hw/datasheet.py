"""Datasheet figures of GPUs.

A table of published peaks, dense (never the doubled "with sparsity" figures), tensor products with
a 32-bit accumulator where the vendor tells them apart. They are leads: a chip under its power
limit reaches 70 to 95% of them, and `calibrate` measures how much. Knows nothing about the machine
it runs on.
"""

from typing import Literal

import msgspec

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
DTYPES: tuple[Dtype, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")

TERA = 10**12
GIGA = 10**9
MEBI = 1 << 20


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    drivers_call_it: tuple[str, ...]  # exact names, as NVML and torch report them
    memory_bytes: int
    bytes_per_s: float  # of its main memory, reads plus writes
    flops_per_s: dict[str, float]  # by dtype; a dtype that is missing has no unit of its own
    l2_bytes: int
    link_bytes_per_s: float | None  # to the other GPUs of the box, both directions; None: PCIe only
    tdp_w: int


def _rates(**tera: float) -> dict[str, float]:
    return {dtype: value * TERA for dtype, value in tera.items()}


AMPERE_100 = _rates(fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624)
HOPPER_SXM = _rates(fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
HOPPER_NVL = _rates(fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1671, int8=1671)

CHIPS: tuple[Chip, ...] = (
    Chip(
        name="A100 SXM 40GB",
        drivers_call_it=("NVIDIA A100-SXM4-40GB",),
        memory_bytes=40 * GIGA,
        bytes_per_s=1.555 * TERA,
        flops_per_s=AMPERE_100,
        l2_bytes=40 * MEBI,
        link_bytes_per_s=600 * GIGA,
        tdp_w=400,
    ),
    Chip(
        name="A100 PCIe 40GB",
        drivers_call_it=("NVIDIA A100-PCIE-40GB",),
        memory_bytes=40 * GIGA,
        bytes_per_s=1.555 * TERA,
        flops_per_s=AMPERE_100,
        l2_bytes=40 * MEBI,
        link_bytes_per_s=600 * GIGA,  # with a bridge over a pair
        tdp_w=250,
    ),
    Chip(
        name="A100 SXM 80GB",
        drivers_call_it=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=80 * GIGA,
        bytes_per_s=2.039 * TERA,
        flops_per_s=AMPERE_100,
        l2_bytes=40 * MEBI,
        link_bytes_per_s=600 * GIGA,
        tdp_w=400,
    ),
    Chip(
        name="A100 PCIe 80GB",
        drivers_call_it=("NVIDIA A100 80GB PCIe",),
        memory_bytes=80 * GIGA,
        bytes_per_s=1.935 * TERA,
        flops_per_s=AMPERE_100,
        l2_bytes=40 * MEBI,
        link_bytes_per_s=600 * GIGA,  # with a bridge over a pair
        tdp_w=300,
    ),
    Chip(
        name="H100 SXM",
        drivers_call_it=("NVIDIA H100 80GB HBM3",),
        memory_bytes=80 * GIGA,
        bytes_per_s=3.35 * TERA,
        flops_per_s=HOPPER_SXM,
        l2_bytes=50 * MEBI,
        link_bytes_per_s=900 * GIGA,
        tdp_w=700,
    ),
    Chip(
        name="H100 PCIe",
        drivers_call_it=("NVIDIA H100 PCIe",),
        memory_bytes=80 * GIGA,
        bytes_per_s=2.0 * TERA,
        flops_per_s=_rates(fp32=51.2, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513),
        l2_bytes=50 * MEBI,
        link_bytes_per_s=600 * GIGA,  # with a bridge over a pair
        tdp_w=350,
    ),
    Chip(
        name="H100 NVL",
        drivers_call_it=("NVIDIA H100 NVL",),
        memory_bytes=94 * GIGA,
        bytes_per_s=3.9 * TERA,
        flops_per_s=HOPPER_NVL,
        l2_bytes=60 * MEBI,
        link_bytes_per_s=600 * GIGA,
        tdp_w=400,
    ),
    Chip(
        name="H200 SXM",
        drivers_call_it=("NVIDIA H200",),
        memory_bytes=141 * GIGA,
        bytes_per_s=4.8 * TERA,
        flops_per_s=HOPPER_SXM,
        l2_bytes=60 * MEBI,
        link_bytes_per_s=900 * GIGA,
        tdp_w=700,
    ),
    Chip(
        name="H200 NVL",
        drivers_call_it=("NVIDIA H200 NVL",),
        memory_bytes=141 * GIGA,
        bytes_per_s=4.8 * TERA,
        flops_per_s=HOPPER_NVL,
        l2_bytes=60 * MEBI,
        link_bytes_per_s=900 * GIGA,
        tdp_w=600,
    ),
    Chip(
        name="H20",
        drivers_call_it=("NVIDIA H20",),
        memory_bytes=96 * GIGA,
        bytes_per_s=4.0 * TERA,
        flops_per_s=_rates(fp32=44, tf32=74, bf16=148, fp16=148, fp8=296, int8=296),
        l2_bytes=60 * MEBI,
        link_bytes_per_s=900 * GIGA,
        tdp_w=400,
    ),
    Chip(
        name="GH200 96GB",
        drivers_call_it=(
            "NVIDIA GH200 480GB",
            "NVIDIA GH200 120GB",
        ),  # the number is Grace's memory
        memory_bytes=96 * GIGA,
        bytes_per_s=4.0 * TERA,
        flops_per_s=HOPPER_SXM,
        l2_bytes=60 * MEBI,
        link_bytes_per_s=900 * GIGA,
        tdp_w=900,  # of the module, Grace included
    ),
    Chip(
        name="GH200 144GB",
        drivers_call_it=("NVIDIA GH200 144G HBM3e",),
        memory_bytes=144 * GIGA,
        bytes_per_s=4.9 * TERA,
        flops_per_s=HOPPER_SXM,
        l2_bytes=60 * MEBI,
        link_bytes_per_s=900 * GIGA,
        tdp_w=900,  # of the module, Grace included
    ),
    Chip(
        name="B200",
        drivers_call_it=("NVIDIA B200",),
        memory_bytes=180 * GIGA,
        bytes_per_s=8.0 * TERA,
        flops_per_s=_rates(fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=4500),
        l2_bytes=126 * MEBI,
        link_bytes_per_s=1800 * GIGA,
        tdp_w=1000,
    ),
    Chip(
        name="L4",
        drivers_call_it=("NVIDIA L4",),
        memory_bytes=24 * GIGA,
        bytes_per_s=300 * GIGA,
        flops_per_s=_rates(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
        l2_bytes=48 * MEBI,
        link_bytes_per_s=None,
        tdp_w=72,
    ),
    Chip(
        name="L40S",
        drivers_call_it=("NVIDIA L40S",),
        memory_bytes=48 * GIGA,
        bytes_per_s=864 * GIGA,
        flops_per_s=_rates(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733),
        l2_bytes=96 * MEBI,
        link_bytes_per_s=None,
        tdp_w=350,
    ),
    Chip(
        name="A10",
        drivers_call_it=("NVIDIA A10",),
        memory_bytes=24 * GIGA,
        bytes_per_s=600 * GIGA,
        flops_per_s=_rates(fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250),
        l2_bytes=6 * MEBI,
        link_bytes_per_s=None,
        tdp_w=150,
    ),
    Chip(
        name="RTX 3090",
        drivers_call_it=("NVIDIA GeForce RTX 3090",),
        memory_bytes=24 * GIGA,
        bytes_per_s=936 * GIGA,
        flops_per_s=_rates(fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
        l2_bytes=6 * MEBI,
        link_bytes_per_s=112.5 * GIGA,  # with a bridge over a pair
        tdp_w=350,
    ),
    Chip(
        name="RTX 4090",
        drivers_call_it=("NVIDIA GeForce RTX 4090",),
        memory_bytes=24 * GIGA,
        bytes_per_s=1.008 * TERA,
        flops_per_s=_rates(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
        l2_bytes=72 * MEBI,
        link_bytes_per_s=None,
        tdp_w=450,
    ),
    Chip(
        name="RTX 5090",
        drivers_call_it=("NVIDIA GeForce RTX 5090",),
        memory_bytes=32 * GIGA,
        bytes_per_s=1.792 * TERA,
        flops_per_s=_rates(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, int8=838),
        l2_bytes=96 * MEBI,
        link_bytes_per_s=None,
        tdp_w=575,
    ),
    Chip(
        name="MI300X",
        drivers_call_it=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        memory_bytes=192 * GIGA,
        bytes_per_s=5.3 * TERA,
        flops_per_s=_rates(fp32=163.4, tf32=653.7, bf16=1307, fp16=1307, fp8=2615, int8=2615),
        l2_bytes=4 * MEBI,  # in each of eight dies; a 256 MiB cache lies behind them
        link_bytes_per_s=896 * GIGA,
        tdp_w=750,
    ),
)

_BY_NAME = {name: chip for chip in CHIPS for name in chip.drivers_call_it}


def find_chip(name: str) -> tuple[Chip | None, str]:
    """The chip that a driver calls so, or None, and the reason.

    Never a near match: an "RTX 4090 Laptop GPU" or an "A10G" is another chip with other peaks.
    """
    chip = _BY_NAME.get(name.strip())
    if chip is not None:
        return chip, f"the datasheet of {chip.name}"
    if " MIG " in name:
        return None, f"{name!r} is a slice of a GPU; a datasheet describes whole ones"
    return None, f"no datasheet here for {name!r}; its measured ceilings are what counts"


# After 128b/130b coding (8b/10b in the first two), one direction.
PCIE_LANE_BYTES_PER_S = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def pcie_rate(generation: int | None, width: int | None) -> float | None:
    """Bytes per second in one direction over a PCI Express link, before protocol headers."""
    lane = PCIE_LANE_BYTES_PER_S.get(generation or 0)
    return lane * width if lane is not None and width else None
