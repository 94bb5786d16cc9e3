"""What does the command nvidia-smi say about each GPU?

The second choice, for a host that has a driver but no Python package for NVML. Only the `--query`
forms, which read; the command comes with every driver. Does not know SM counts or NVLink: the
queries have no field for them.
"""

import shutil
import subprocess

from cairn.hw.machine import Ecc, Gpu, GpuProcess, PcieLink
from cairn.hw.nvml import sysfs_bus

GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "compute_cap",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)
ROW_FIELDS = (
    "gpu_uuid",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
TIMEOUT_S = 20

Row = dict[str, str]


class SmiMissing(Exception):
    """There is no nvidia-smi, or it fails: the message says which."""


def gpus_from_smi() -> list[Gpu]:
    cards = query("gpu", GPU_FIELDS)
    rows = _optional(
        "remapped-rows", ROW_FIELDS
    )  # consumer cards and old drivers know no such query
    processes = _optional("compute-apps", PROCESS_FIELDS)
    return [_gpu(card, rows, processes) for card in cards]


def query(subject: str, fields: tuple[str, ...]) -> list[Row]:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise SmiMissing("there is no command nvidia-smi")
    asked = [command, f"--query-{subject}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SmiMissing(f"nvidia-smi does not answer: {error}") from error
    if done.returncode != 0:
        complaint = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        raise SmiMissing(f"nvidia-smi leaves with status {done.returncode}: {complaint[0]}")
    return parse_rows(done.stdout, fields)


def parse_rows(text: str, fields: tuple[str, ...]) -> list[Row]:
    """Comma-separated lines as dictionaries, without what the card could not say (`[N/A]`)."""
    split = (line.split(", ") for line in text.splitlines() if line.strip())
    return [
        {
            field: value
            for field, value in zip(fields, row, strict=False)
            if not value.startswith("[")
        }
        for row in split
    ]


def _optional(subject: str, fields: tuple[str, ...]) -> list[Row]:
    try:
        return query(subject, fields)
    except SmiMissing:
        return []


def _gpu(card: Row, rows: list[Row], processes: list[Row]) -> Gpu:
    uuid = card.get("uuid")
    own_row = next((row for row in rows if row.get("gpu_uuid") == uuid), {})
    own_processes = [row for row in processes if row.get("gpu_uuid") == uuid and "pid" in row]
    watts = card.get("power.limit")
    return Gpu(
        index=int(card["index"]),
        source="nvidia-smi",
        name=card.get("name", "unknown GPU"),
        uuid=uuid,
        pci_bus=sysfs_bus(card["pci.bus_id"]) if "pci.bus_id" in card else None,
        memory_bytes=_mebibytes(card, "memory.total"),
        memory_used_bytes=_mebibytes(card, "memory.used"),
        capability=card.get("compute_cap"),
        max_sm_clock_hz=_megahertz(card, "clocks.max.sm"),
        max_memory_clock_hz=_megahertz(card, "clocks.max.mem"),
        power_limit_w=float(watts) if watts else None,
        pcie=PcieLink(
            generation=_integer(card, "pcie.link.gen.current"),
            width=_integer(card, "pcie.link.width.current"),
            max_generation=_integer(card, "pcie.link.gen.max"),
            max_width=_integer(card, "pcie.link.width.max"),
        ),
        ecc=_ecc(card, own_row),
        mig=_switch(card, "mig.mode.current"),
        processes=[
            GpuProcess(pid=int(row["pid"]), memory_bytes=_mebibytes(row, "used_memory"))
            for row in own_processes
        ],
    )


def _ecc(card: Row, row: Row) -> Ecc:
    return Ecc(
        enabled=_switch(card, "ecc.mode.current"),
        uncorrected=_integer(card, "ecc.errors.uncorrected.volatile.total"),
        remapped_rows=_integer(row, "remapped_rows.uncorrectable"),
        remap_pending=_switch(row, "remapped_rows.pending"),
        remap_failed=_switch(row, "remapped_rows.failure"),
    )


def _integer(row: Row, field: str) -> int | None:
    value = row.get(field, "")
    return int(value) if value.isdecimal() else None


def _mebibytes(row: Row, field: str) -> int | None:
    value = _integer(row, field)
    return None if value is None else value << 20


def _megahertz(row: Row, field: str) -> int | None:
    value = _integer(row, field)
    return None if value is None else value * 1_000_000


def _switch(row: Row, field: str) -> bool | None:
    """Modes read Enabled or Disabled, row flags Yes or No, and on some drivers 0 or 1."""
    value = row.get(field)
    return None if value is None else value in ("Enabled", "Yes", "1")
