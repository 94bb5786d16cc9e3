"""Collects the evidence for `cairn doctor`, with a few trials where reading a file is not enough.

Gathers everything that the checks judge: the probed machine, and a handful of trials (does torch
import, does a small product come out right, can the caches be written). All the input and output
of `cairn doctor` is here, and no opinion on any of it.
"""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cairn.core.errors import HardwareError
from cairn.hw import ceilings
from cairn.hw.machine import Filesystem, Machine
from cairn.hw.probe import probe
from cairn.hw.storage import cache_folder, hub_folder, nearest_existing, read_filesystem
from cairn.hw.versions import package_version

DEPENDENCIES = {"gguf": "gguf", "huggingface_hub": "huggingface_hub", "jinja2": "jinja2"}
# Of the extras in pyproject.toml, and what `cairn train` can log to: the module, and what needs it.
OPTIONAL_PACKAGES = {
    "soundfile": ("soundfile", "recordings other than WAV"),
    "pillow": ("PIL", "pictures"),
    "opentelemetry-sdk": ("opentelemetry.sdk", "cairn serve --otel-endpoint"),
    "opentelemetry-exporter-otlp-proto-http": (
        "opentelemetry.exporter.otlp.proto.http",
        "the same",
    ),
    "pyarrow": ("pyarrow", "parquet files"),
    "zstandard": ("zstandard", ".zst files"),
    "ray": ("ray", "jobs on Ray"),
    "lightkube": ("lightkube", "cairn operator run"),
    "grpcio": ("grpc", "cairn fleet serve --keda, --endpoint-picker"),
    "tensorboard": ("tensorboard", "cairn train --log.tensorboard"),
    "wandb": ("wandb", "cairn train --log.wandb"),
}
NIXL_PACKAGES = ("nixl-cu13", "nixl-cu12")
PEER_MEMORY = Path("/sys/module/nvidia_peermem")
PRODUCT_SIZE = 64


class WritableFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that commands write to."""

    filesystem: Filesystem
    writable: bool


class CalibrationState(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    measured_at: str | None = None
    problem: str | None = None  # why it cannot be used at all
    stale: list[str] = []  # what has changed since


class HardwareEvidence(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    own_pid: int
    is_root: bool
    torch_problem: str | None = None  # None: it imports
    torch_gpus: int = 0  # that torch can use
    matmul_problem: str | None = None  # None: every device computes the right number
    triton_problem: str | None = None  # None: it imports
    pairs_without_p2p: list[tuple[int, int]] = []
    cairn_cache: WritableFolder | None = None
    hub_cache: WritableFolder | None = None
    calibration: CalibrationState | None = None
    missing_packages: list[str] = []  # that Cairn depends on
    missing_optional: dict[str, str] = {}  # by name, what needs it
    nixl: str | None = None  # its version, where it is installed
    peer_memory: bool = False  # network ports may reach GPU memory


def collect(environment: Mapping[str, str] | None = None) -> HardwareEvidence:
    """Probe first: once torch holds a GPU, its own memory would count as that of others."""
    machine = probe(environment=environment)
    torch_problem = try_import("torch")
    gpus = 0 if torch_problem else _torch_gpus()
    return HardwareEvidence(
        machine=machine,
        own_pid=os.getpid(),
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        torch_problem=torch_problem,
        torch_gpus=gpus,
        matmul_problem=torch_problem or try_matmul(gpus),
        triton_problem=try_import("triton"),
        pairs_without_p2p=_pairs_without_p2p(gpus),
        cairn_cache=_place(cache_folder(environment)),
        hub_cache=_place(hub_folder(environment)),
        calibration=read_calibration(cache_folder(environment) / "machine.json", machine),
        missing_packages=[name for name, module in DEPENDENCIES.items() if not _has(module)],
        missing_optional=missing_optional(),
        nixl=next(filter(None, map(package_version, NIXL_PACKAGES)), None),
        peer_memory=PEER_MEMORY.exists(),
    )


def missing_optional() -> dict[str, str]:
    return {name: use for name, (module, use) in OPTIONAL_PACKAGES.items() if not _has(module)}


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def try_import(module: str) -> str | None:
    """Import a module; return None or the reason why it fails."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a broken package may raise anything: that is the finding
        return f"{type(error).__name__}: {_first_line(error)}"
    return None


def try_matmul(gpus: int) -> str | None:
    """Return None if a matmul of small integers, exact in any precision, is correct on each GPU; else the error."""
    import torch

    devices = [f"cuda:{index}" for index in range(gpus)] or ["cpu"]
    left, right = (torch.randint(-4, 5, (PRODUCT_SIZE, PRODUCT_SIZE)) for _ in range(2))
    expected = (left @ right).float()
    for device in devices:
        try:
            computed = (left.float().to(device) @ right.float().to(device)).cpu()
        except RuntimeError as error:
            return f"{device}: {type(error).__name__}: {_first_line(error)}"
        wrong = int((computed != expected).sum())
        if wrong:
            return f"{device}: {wrong} of {expected.numel()} numbers of a small product are wrong"
    return None


def read_calibration(path: Path, machine: Machine) -> CalibrationState:
    try:
        measured = ceilings.load(path)
    except HardwareError as error:
        return CalibrationState(path=str(path), problem=error.message)
    stale = ceilings.staleness(measured, machine)
    return CalibrationState(path=str(path), measured_at=measured.measured_at, stale=stale)


def _torch_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _pairs_without_p2p(gpus: int) -> list[tuple[int, int]]:
    if gpus < 2:
        return []
    import torch

    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    return [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


def _place(folder: Path) -> WritableFolder:
    return WritableFolder(
        filesystem=read_filesystem(folder),
        writable=os.access(nearest_existing(folder), os.W_OK | os.X_OK),
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
