"""Installed versions of the software that determines speed and correctness.

Reads package metadata and files; imports neither torch nor triton, so that `cairn doctor` can
still report on an installation that no longer imports. Whether they work is for the checks to say.
"""

import ctypes
import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

import cairn
from cairn.hw.machine import Versions
from cairn.hw.sysfs import read_text

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def read_versions(root: Path) -> Versions:
    torch, torch_cuda = _torch_versions()
    return Versions(
        python=platform.python_version(),
        cairn=cairn.__version__,
        torch=torch,
        torch_cuda=torch_cuda,
        triton=package_version("triton"),
        nccl=next(filter(None, map(package_version, NCCL_PACKAGES)), None),
        numpy=package_version("numpy"),
        driver=_driver_version(root),
        driver_cuda=_driver_cuda(),
    )


def package_version(name: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13, 0): enough to compare releases."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _torch_versions() -> tuple[str | None, str | None]:
    """The release and the CUDA it was built for: torch/version.py says both without an import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    text = read_text(Path(spec.origin).with_name("version.py")) or ""
    release = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= ['\"](.+)['\"]", text, re.MULTILINE)
    return (release[1] if release else package_version("torch")), (cuda[1] if cuda else None)


def _driver_version(root: Path) -> str | None:
    """Parse `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ...`."""
    text = read_text(root / "proc/driver/nvidia/version") or ""
    match = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(\.\d+)?)\s", text)
    return match[1] if match else read_text(root / "sys/module/nvidia/version")


def _driver_cuda() -> str | None:
    """Ask libcuda itself: it answers without a GPU context, and without NVML."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value == 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
