"""The GPUs to plan for: what they sustain, how they are joined, what they cost to run.

    h200    measured here (benchmarks/h200): products 0.68 PFLOP/s, memory 4.26 TB/s
    others  the datasheet, times what chips of that kind are seen to sustain

A measured `machine.json` of this machine goes before both. Prices and watts are round figures for comparing plans, not
offers; both are flags. Data and look-ups only.
"""

import msgspec

from cairn.core.errors import ConfigError, HardwareError, did_you_mean
from cairn.hw import ceilings
from cairn.hw.datasheet import CHIPS, Chip

GIGA = 1e9
BUSY = 0.85  # of its power limit: what a busy GPU draws


class Device(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int
    flops_per_s: float  # bf16 products, sustained
    fp8_flops_per_s: float
    peak_flops_per_s: float  # bf16, the vendor's: what MFU is a share of
    bytes_per_s: float  # of memory, sustained
    fabric: str  # a key of nccl_model.FABRICS
    nic_gb_per_s: float  # for each GPU, between nodes
    gpus_per_node: int = 8
    watts: float = 700.0  # of a busy GPU
    usd_per_hour: float = 3.0
    why: str = ""

    def words(self) -> str:
        rates = f"{self.flops_per_s / 1e12:,.0f} TFLOP/s in bf16 products, {self.bytes_per_s / 1e12:.2f} TB/s"
        return f"{self.name}: {rates}, {self.why}"


class _Known(msgspec.Struct, frozen=True):
    chip: str  # of the datasheet
    flops_share: float  # of the promised bf16 rate
    bytes_share: float
    fabric: str
    usd_per_hour: float
    flops_note: str = "what chips of this kind sustain in large products"
    tdp_w: int = 0  # where it is held below the datasheet's; 0: the datasheet's
    nic_gb_per_s: float = 50.0  # 400 Gbit/s for each GPU, as DGX H100 and B200 have


KNOWN = {
    "h200": _Known("H200 SXM", 0.687, 0.888, "h200", 3.5, "measured in benchmarks/h200"),
    "h100": _Known("H100 SXM", 0.62, 0.90, "h100", 2.5),
    "h100-500w": _Known("H100 SXM", 0.46, 0.66, "h100", 2.2, "a 500 W part with HBM2e", 500),
    "a100": _Known("A100 SXM 80GB", 0.83, 0.88, "a100", 1.5, nic_gb_per_s=25.0),  # DGX A100: HDR
    "a100-40gb": _Known("A100 SXM 40GB", 0.83, 0.88, "a100", 1.2, nic_gb_per_s=25.0),
    "b200": _Known("B200", 0.70, 0.88, "b200", 5.0),
}


def device(name: str, **changes: float) -> Device:
    """A device by its name; `changes` are fields of it that the caller knows better."""
    entry = KNOWN.get(name.lower())
    if entry is None:
        hint = did_you_mean(name, KNOWN, f"there are: {', '.join(KNOWN)}")
        raise ConfigError(f"no GPU '{name}' is known to the planner", hint=hint)
    chip = next(chip for chip in CHIPS if chip.name == entry.chip)
    flops, moved, why = _sustained(chip, entry)
    result = Device(
        name=name.lower(),
        memory_bytes=chip.memory_bytes,
        flops_per_s=flops,
        fp8_flops_per_s=flops * (1.9 if "fp8" in chip.flops_per_s else 1.0),
        peak_flops_per_s=chip.flops_per_s["bf16"],
        bytes_per_s=moved,
        fabric=entry.fabric,
        nic_gb_per_s=entry.nic_gb_per_s,
        watts=BUSY * (entry.tdp_w or chip.tdp_w),
        usd_per_hour=entry.usd_per_hour,
        why=why,
    )
    for field, value in changes.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{field.replace('_', ' ')} is {value}", hint="above 0")
    return msgspec.structs.replace(result, **changes) if changes else result


def _sustained(chip: Chip, entry: _Known) -> tuple[float, float, str]:
    """Measured on this machine, if it has such a chip; else the table's shares of the datasheet."""
    try:
        measured = ceilings.load()
    except HardwareError:
        measured = None
    if (
        measured is not None
        and measured.device_name in chip.drivers_call_it
        and measured.copy is not None
    ):
        rate = measured.matmul.get("bf16")
        if rate is not None:
            return (
                rate.value,
                measured.copy.value,
                f"measured on this machine, {measured.measured_at}",
            )
    flops = chip.flops_per_s["bf16"] * entry.flops_share
    return flops, chip.bytes_per_s * entry.bytes_share, entry.flops_note
