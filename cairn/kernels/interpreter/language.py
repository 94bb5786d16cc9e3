"""Language: loops, arguments, assertions, inline assembly, libdevice and autotuning, as kernels expect them."""

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter as stock_interpreter
from triton.runtime.autotuner import Autotuner

from cairn.kernels.interpreter.arithmetic import wide
from cairn.kernels.interpreter.narrow_floats import NARROW, narrow

interpreter: Any = stock_interpreter  # what is patched here is private, and has no types
Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

NUMPY_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "div_rn": np.divide,
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fast_dividef": np.divide,
    "fast_expf": np.exp,
    "fast_logf": np.log,
    "floor": np.floor,
    "fma": lambda x, y, z: x * y + z,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "llrint": np.rint,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "pow": np.power,
    "rint": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),  # halves away from zero
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "trunc": np.trunc,
}


def _word(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two bf16 numbers in one 32-bit word."""
    low, high = (narrow(half, tl.bfloat16).astype(np.uint32) for half in (low, high))
    return (low | high << 16).view(np.int32)


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = np.ascontiguousarray(words).view(np.uint32)
    return (bits << 16).view(np.float32), (bits & 0xFFFF0000).view(np.float32)


ASSEMBLY: dict[str, Callable[..., np.ndarray]] = {
    "bar.sync": np.zeros_like,  # programs run one after the other, and threads at once
    "cvt.rn.bf16x2.f32": lambda low, high: _word(low, high),
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "max.bf16x2": lambda *words: _word(*np.fmax(*(np.stack(_halves(w)) for w in words))),
    "rcp.approx": np.reciprocal,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    "tanh.approx": np.tanh,
}  # by mnemonic; a kernel's test may add what else its inline assembly uses


def scalars_are_indices() -> None:
    """NumPy 2.4 no longer takes a 1-element array for an int, which every loop bound is here."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch


def loops_yield_tensors() -> None:
    """A loop variable is an int32 tensor in a compiled kernel: it has `.to`, and it can overflow."""

    def loop(first: Any, last: Any = None, step: Any = 1, **scheduling: object) -> Iterator[Any]:
        start, end = (0, first) if last is None else (first, last)
        is_long = any(isinstance(b, tl.tensor) and b.dtype == tl.int64 for b in (start, end, step))
        kind, numbers = (tl.int64, np.int64) if is_long else (tl.int32, np.int32)
        for value in range(*map(operator.index, (start, end, step))):
            yield tl.tensor(Handle(np.array([value], dtype=numbers), kind), kind)

    def visit_for(self: Any, node: Any) -> Any:
        call = node.iter
        if getattr(getattr(call, "func", None), "id", None) == "range":
            call.func.id = "interpreted_range"
        return self.generic_visit(node)

    interpreter.__dict__["interpreted_range"] = loop  # kernels see the interpreter's globals
    interpreter.ASTTransformer.visit_For = visit_for
    stock = interpreter._patch_lang_core

    def patch(language: Any, scope: Any) -> None:
        stock(language, scope)
        scope.set_attr(language, "range", loop)

    interpreter._patch_lang_core = patch


def scalar_arguments_are_typed() -> None:
    """A float argument is fp32 and a bool is int1 in a compiled kernel, not a Python number."""
    stock = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if isinstance(argument, bool):
            return tl.tensor(Handle(np.array([argument], dtype=bool), tl.int1), tl.int1)
        if isinstance(argument, float):
            return tl.tensor(Handle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return stock(argument)

    interpreter._implicit_cvt = convert


def language_is_patched_once() -> None:
    """Stock patches all of triton.language at each call of a device function, and half of it stays patched."""
    stock, done = interpreter._patch_lang, []

    def everything() -> None:
        """Stands for a kernel that can see both modules."""

    def patch(function: Any) -> Any:
        if not done:
            probe = type(everything)(everything.__code__, {"tl": tl, "core": tl.core})
            done.append(stock(probe))
        return interpreter._LangPatchScope()  # has nothing to restore

    interpreter._patch_lang = patch


def assertions_raise() -> None:
    """`tl.device_assert` is silent unless the options say debug; overflow checks stay off, hashes rely on it."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, debug=True, sanitize_overflow=False
    )


def assembly_has_equivalents() -> None:
    """Inline assembly cannot run here; the instructions in `ASSEMBLY` have NumPy equivalents."""

    class Result:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def get_result(self, index: int) -> Any:
            return self.handle

    def inline(self: Any, text: str, constraints: Any, values: Any, kinds: Any, *_: Any) -> Result:
        for mnemonic, function in ASSEMBLY.items():
            if mnemonic in text:
                return Result(Handle(function(*(v.data for v in values)), kinds[0].scalar))
        raise NotImplementedError(f"add a NumPy equivalent to interpret.ASSEMBLY for: {text}")

    Builder.create_inline_asm = inline


def libdevice_has_equivalents() -> None:
    """libdevice's functions are empty stubs outside of the compiler, and return None."""
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    def stand_in(function: Callable[..., np.ndarray]) -> Callable:
        def call(first: Any, *rest: Any, **_: Any) -> Any:
            tensors = [interpreter.interpreter_semantic.to_tensor(x) for x in (first, *rest)]
            operands = [wide(tensor.handle).data for tensor in tensors]
            result = function(*operands)
            kind = tensors[0].dtype
            is_test = result.dtype == bool
            handle = Handle(
                result.astype(np.int32) if is_test else result.astype(operands[0].dtype), kind
            )
            if is_test:
                handle = Handle(handle.data, tl.int32)
            elif kind in NARROW:
                handle = Handle(narrow(result, kind), kind)
            shape = list(tensors[0].shape)
            return tl.tensor(handle, tl.block_type(handle.dtype, shape) if shape else handle.dtype)

        return call

    for module in (libdevice, cuda_libdevice):
        for name, function in NUMPY_FUNCTIONS.items():
            if hasattr(module, name):
                setattr(module, name, stand_in(function))


def autotuners_take_the_first() -> None:
    """Autotuning would time kernels on a driver that is not there."""

    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        config = (self.prune_configs(named) if self.early_config_prune else self.configs)[0]
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **named, **config.all_kwargs()})
        return self.fn.run(*arguments, **named, **config.all_kwargs())

    Autotuner.run = run


def errors_arrive_whole() -> None:
    """Stock wraps what a kernel raises once per call level, until only quotes can be read."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call
    knobs.compilation.front_end_debugging = True  # the launch itself wraps no more, either


FIXES = (
    scalars_are_indices,
    loops_yield_tensors,
    scalar_arguments_are_typed,
    language_is_patched_once,
    assertions_raise,
    assembly_has_equivalents,
    libdevice_has_equivalents,
    autotuners_take_the_first,
    errors_arrive_whole,
)
