"""Selection of the implementation of an operation, with its reason.

    reference   a few lines of torch in float32: defines what is right; any device
    torch       what PyTorch has (cuBLAS, cuDNN, a fused op)
    triton      our kernel, any recent NVIDIA GPU
    gluon       our kernel for Hopper's asynchronous units, sm_90 only

An operation offers its implementations in order of preference, each with the reason why it cannot run these
arguments, if there is one. The first that can is taken, unless the caller or CAIRN_KERNELS names another:
CAIRN_KERNELS="attention=triton,all=reference". Naming one that cannot run is an error, never a silent fallback.
"""

import functools
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from cairn.core.errors import ConfigError, HardwareError, did_you_mean
from cairn.core.events import instant

Impl = Literal["auto", "reference", "torch", "triton", "gluon"]
NAMES = ("reference", "torch", "triton", "gluon")


class Choice(NamedTuple):
    impl: str
    why: str


def choose(operation: str, requested: Impl, offers: Mapping[str, str | None]) -> Choice:
    """`offers`: implementation -> why it cannot run these arguments, or None; best first."""
    name, who = requested, "as asked"
    if name == "auto":
        overrides = _overrides(os.environ.get("CAIRN_KERNELS", ""))
        name = overrides.get(operation) or overrides.get("all") or "auto"
        who = "CAIRN_KERNELS says so"
    if name != "auto":
        return _named(operation, name, who, offers)
    refused = []
    for impl, obstacle in offers.items():
        if obstacle is None:
            why = "; ".join(refused) or "the best there is"
            return _noted(operation, Choice(impl, why))
        refused.append(f"{impl}: {obstacle}")
    raise HardwareError(
        f"no implementation of {operation} can run these arguments: {'; '.join(refused)}",
        hint="change the arguments, or run on another device",
    )


def _named(operation: str, name: str, who: str, offers: Mapping[str, str | None]) -> Choice:
    if name not in offers:
        hint = did_you_mean(name, offers, otherwise=f"it has: {', '.join(offers)}")
        raise ConfigError(f"{operation} has no implementation {name!r} ({who})", hint=hint)
    obstacle = offers[name]
    if obstacle is not None:
        able = [impl for impl, reason in offers.items() if reason is None]
        raise HardwareError(
            f"{operation} cannot run as {name} ({who}): {obstacle}",
            hint=f"able to: {', '.join(able) or 'none'}",
        )
    return _noted(operation, Choice(name, who))


@functools.lru_cache(maxsize=4096)
def _noted(operation: str, choice: Choice) -> Choice:
    """Each choice is said once, to the event sink."""
    instant("kernel choice", operation=operation, impl=choice.impl, why=choice.why)
    return choice


@functools.lru_cache(maxsize=16)
def _overrides(text: str) -> dict[str, str]:
    overrides = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, impl = entry.partition("=")
        if not equals or impl not in NAMES:
            raise ConfigError(
                f"CAIRN_KERNELS has the entry {entry!r}",
                hint=f"write OPERATION=IMPLEMENTATION, with one of {', '.join(NAMES)}",
            )
        if operation not in _operations():
            hint = did_you_mean(operation, _operations(), otherwise="see `cairn kernels list`")
            raise ConfigError(f"CAIRN_KERNELS names an operation {operation!r}", hint=hint)
        overrides[operation] = impl
    return overrides


def _operations() -> tuple[str, ...]:
    """Selectable operations: every kernel, the backward pass of attention, and `all`."""
    from cairn.kernels.tooling.catalogue import kernels

    return *kernels(), "attention_backward", "all"


@functools.lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) on Hopper; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def needs_cuda(*tensors: torch.Tensor) -> str | None:
    """Why a Triton kernel cannot run on these, or None. The interpreter runs kernels on CPU tensors."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    off = next((t for t in tensors if t.device.type != "cuda"), None)
    return None if off is None else f"a tensor is on {off.device}, not on a GPU"


def needs_hopper(*tensors: torch.Tensor) -> str | None:
    for tensor in tensors:
        if tensor.device.type != "cuda":
            return f"a tensor is on {tensor.device}, not on a GPU of compute capability 9.0"
        major, minor = capability(tensor.device)
        if (major, minor) != (9, 0):
            return f"{tensor.device} has compute capability {major}.{minor}, not 9.0"
    return None
