"""Can this machine run a lab? What it needs, whether that is here, and if not why.

    unmet(lab.needs, machine, device)  ->  ["gpu: this machine has none"], or []

Asks the probe and the file system, never torch: a list of labs stays quick. `device` is where torch computes
("cuda:0", "cpu"), for who knows it already.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable

from cairn.hw.machine import Machine
from cairn.labs.lab import Need, Words

COMPILERS = ("cc", "gcc", "clang")


def unmet(needs: Iterable[Need], machine: Machine, device: str | None = None) -> list[Words]:
    """One reason for each need that is not met, in the order of the needs."""
    found = ((need, _missing(need, machine, device)) for need in needs)
    return [Words(f"needs {n}: {why.en}", f"需要 {n}：{why.zh}") for n, why in found if why]


def _missing(need: Need, machine: Machine, device: str | None) -> Words | None:
    if need == "gpu":
        return _gpu(machine, device)
    if need == "gpu or compiler":  # two forms of one idea
        return _gpu(machine, device) and _compiler(machine)
    return _CHECKS[need](machine)


def _gpu(machine: Machine, device: str | None) -> Words | None:
    if device is not None and device.startswith("cuda"):
        return None
    if not machine.gpus:
        return Words("this machine has no GPU", "本机没有 GPU")
    name, torch = machine.gpus[0].name, machine.versions.torch
    if device is not None:
        return Words(f"torch {torch} cannot use {name}", f"torch {torch} 无法使用 {name}")
    return None


def _cores(machine: Machine) -> Words | None:
    count = machine.cpu.usable_threads or machine.cpu.threads or os.cpu_count() or 1
    count = count if machine.cpu.quota is None else min(float(count), machine.cpu.quota)
    if count >= 2:
        return None
    return Words(f"this process may use {count:g}", f"本进程只能使用 {count:g} 个")


def _processes(machine: Machine) -> Words | None:
    del machine
    if not hasattr(os, "fork"):
        return Words("this system cannot fork", "系统不支持 fork")
    if importlib.util.find_spec("_multiprocessing") is None:
        return Words("Python was built without semaphores", "此 Python 不带信号量")
    return None


def _root(machine: Machine) -> Words | None:
    del machine
    if os.geteuid() == 0:
        return None
    user = os.geteuid()
    return Words(f"this process runs as user {user}", f"当前进程的用户号是 {user}")


def _linux(machine: Machine) -> Words | None:
    del machine
    if sys.platform == "linux":
        return None
    return Words(f"this system is {sys.platform}", f"当前系统是 {sys.platform}")


def _nixl(machine: Machine) -> Words | None:
    """Its wheels have the names of their CUDA builds."""
    del machine
    from cairn.comm.transfer.nixl import why_not

    missing = why_not()
    return None if missing is None else Words(missing, "未安装 NIXL（pip install nixl）")


def _package(name: str) -> Callable[[Machine], Words | None]:
    def check(machine: Machine) -> Words | None:
        del machine
        if importlib.util.find_spec(name) is not None:
            return None
        return Words(f"the Python package {name} is not installed", f"未安装 Python 包 {name}")

    return check


def c_compiler() -> str | None:
    """Where it is: $CC, or the first of the usual ones on the PATH."""
    names = (os.environ.get("CC"), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _compiler(machine: Machine) -> Words | None:
    del machine
    if c_compiler() is not None:
        return None
    names = ", ".join(COMPILERS)
    return Words(f"no C compiler on the PATH ({names})", f"PATH 中没有 C 编译器（{names}）")


def _go(machine: Machine) -> Words | None:
    del machine
    if shutil.which("go") is not None:
        return None
    return Words(
        "Go is not on the PATH; install it: apt-get install golang-go",
        "PATH 中没有 Go；安装：apt-get install golang-go",
    )


_CHECKS: dict[Need, Callable[[Machine], Words | None]] = {
    "2 cores": _cores,
    "2 processes": _processes,
    "root": _root,
    "linux": _linux,
    "compiler": _compiler,
    "go": _go,
    "triton": _package("triton"),
    "nixl": _nixl,
}
