"""A GPU that is not there: tensors with shapes and addresses but no bytes, so that launches can be seen without one.

    with absent_gpu("NVIDIA H200") as launches:
        ...                                      code that launches kernels on tensors of "cuda"
    launches                                     each specialisation that Triton would have compiled, once

Tensors are torch's `meta` tensors that say they are on a GPU, so whatever reads their device takes the GPU's way.
Triton itself decides which specialisation a launch needs, with the same code as on a GPU; the kernel is then noted
instead of compiled and run. Nothing may read a value, because there is none.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cairn.core.errors import UsageError, did_you_mean
from cairn.hw.datasheet import find_chip

GPU = torch.device("cuda", 0)
NOWHERE = torch.device("meta")
TARGETS = {"sm_90": GPUTarget("cuda", 90, 32)}
MULTIPROCESSORS = {"NVIDIA H100 PCIe": 114}  # all others of sm_90 have as many as follows
MOST_MULTIPROCESSORS = 132
SHARED_BYTES = 228 << 10  # of a multiprocessor


class Launch(NamedTuple):
    """A specialisation of a kernel: the input of Triton's compiler."""

    source: Any  # triton's ASTSource, or Gluon's
    target: GPUTarget
    options: dict[str, Any]


class AbsentTensor(Tensor):
    """A `meta` tensor that claims to be on a GPU. Its address is its offset from an aligned start."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return int(self.storage_offset()) * self.element_size()


class _OnAbsentGPU(TorchFunctionMode):
    """Torch function mode that creates GPU tensors without storage and pins nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.device:  # a name is no tensor
            return func(*args, **(kwargs or {}))
        kwargs = {name: _elsewhere(value) for name, value in (kwargs or {}).items()}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if func is Tensor.__bool__ or func is torch.equal:
            return True  # there are no values: what is asked of them holds, as of weights rounded in the engine
        if func is torch._scaled_mm:  # has no form for `meta` tensors that writes into `out`
            return _marked(kwargs["out"])
        result = func(*(_elsewhere(value) for value in args), **kwargs)
        return _marked(result)


def _elsewhere(value: Any) -> Any:
    """Convert a value for torch's `meta` functions, which also read the device."""
    if isinstance(value, AbsentTensor):
        return value.as_subclass(Tensor)
    if isinstance(value, torch.device) and value.type == "cuda":
        return NOWHERE
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return NOWHERE
    if isinstance(value, tuple | list) and any(isinstance(part, AbsentTensor) for part in value):
        return type(value)([_elsewhere(part) for part in value])
    return value


def _marked(result: Any) -> Any:
    if type(result) is Tensor and result.is_meta:
        return result.as_subclass(AbsentTensor)
    if isinstance(result, tuple | list) and any(type(part) is Tensor for part in result):
        parts = [_marked(part) for part in result]
        return parts if isinstance(result, list) else tuple(parts)
    return result


class _AbsentDriver:
    """Driver stub with the answers that Triton needs to compile."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Stream:
    """Stub of a torch.cuda stream; everything is launched in order."""

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...


@contextmanager
def absent_gpu(name: str, architecture: str = "sm_90") -> Generator[list[Launch]]:
    """Within it, torch sees one GPU of this name with all of its memory free."""
    if architecture not in TARGETS:
        hint = did_you_mean(architecture, TARGETS, otherwise=f"there is: {', '.join(TARGETS)}")
        raise UsageError(f"kernels cannot be built for {architecture}", hint=hint)
    launches: list[Launch] = []
    before: Any = driver._active  # None where nothing has asked for it yet
    with ExitStack() as stack:
        for what, answer in _answers(name, TARGETS[architecture]).items():
            stack.enter_context(patch.object(torch.cuda, what, answer))
        stack.enter_context(_noted(launches))
        stack.callback(driver.set_active, before)
        driver.set_active(_AbsentDriver(TARGETS[architecture]))  # type: ignore[arg-type]
        stack.enter_context(_OnAbsentGPU())
        yield launches


def _answers(name: str, target: GPUTarget) -> dict[str, Any]:
    """Answers of torch.cuda about the GPU."""
    chip, _ = find_chip(name)
    if chip is None:
        raise UsageError(f"the GPU {name!r} is not known", hint='one that is: "NVIDIA H200"')
    capability = divmod(int(target.arch), 10)
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=MULTIPROCESSORS.get(name, MOST_MULTIPROCESSORS),
        total_memory=chip.memory_bytes,
        L2_cache_size=chip.l2_bytes,
        shared_memory_per_multiprocessor=SHARED_BYTES,
    )
    memory = (chip.memory_bytes, chip.memory_bytes)
    stream = _Stream()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: memory,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": lambda *_: stream,
        "Stream": lambda *_, **__: stream,
        "Event": lambda *_, **__: stream,
        "stream": lambda *_: nullcontext(),
    }


@contextmanager
def _noted(launches: list[Launch]) -> Generator[None]:
    """Launches are noted, each specialisation once, and not carried out."""
    original, touched = JITFunction.run, set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return original(self, *args, grid=grid, warmup=True, **kwargs)

    def note(
        self: Any,
        key: str,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        warmup: bool,
    ) -> object:
        kernels, _, target, _, _ = self.device_caches[device]
        source = self.ASTSource(self, signature, constants, attributes)
        launches.append(Launch(source, target, dict(options.__dict__)))
        touched.add(self)
        kernels[key] = launches[-1]
        return launches[-1]

    with patch.object(JITFunction, "run", run), patch.object(JITFunction, "_do_compile", note):
        try:
            yield
        finally:
            for function in touched:
                function.device_caches.pop(0, None)
