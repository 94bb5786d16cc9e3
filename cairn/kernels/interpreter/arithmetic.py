"""Numbers: bfloat16 and 8-bit floats compute as they do on a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from cairn.kernels.interpreter.narrow_floats import NARROW, narrow, widen

Handle = interpreter.TensorHandle
Builder: Any = interpreter.InterpreterBuilder


def wide(handle: Any) -> Any:
    kind = handle.dtype.scalar
    return Handle(widen(handle.data, kind), tl.float32) if kind in NARROW else handle


def _like(handle: Any, kind: Any) -> Any:
    """Back to the narrow type; what a comparison gave stays boolean."""
    if handle.data.dtype == bool:
        return handle
    return Handle(narrow(handle.data, kind), kind)


def narrow_floats_compute_in_float32() -> None:
    """bfloat16 and 8-bit floats are kept as integers, and stock operators compute on those."""

    def widening(method: Callable, operands: int) -> Callable:
        def call(self: Any, *arguments: Any) -> Any:
            kinds = [h.dtype.scalar for h in arguments[:operands] if h.dtype.scalar in NARROW]
            if not kinds:
                return method(self, *arguments)
            widened = [wide(handle) for handle in arguments[:operands]]
            return _like(method(self, *widened, *arguments[operands:]), kinds[-1])

        return call

    for name, operands in {
        "binary_op": 2,
        "unary_op": 1,
        "create_fma": 3,
        "create_rsqrt": 1,
        "create_erf": 1,
        "create_clampf": 3,
    }.items():
        setattr(Builder, name, widening(getattr(Builder, name), operands))


def narrow_floats_convert_by_rounding() -> None:
    """Stock conversions to bfloat16 truncate, and those to 8-bit floats overflow into other numbers."""
    stock = Builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        kind = target.scalar
        if kind == source.dtype.scalar:
            return source
        if kind in NARROW:
            return Handle(narrow(wide(source).data.astype(np.float32), kind), kind)
        return stock(self, wide(source), target)

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar in NARROW:
            truncate = rounding == ir.ROUNDING_MODE.RTZ
            values = wide(source).data.astype(np.float32)
            return Handle(narrow(values, target.scalar, truncate), target.scalar)
        return cast(self, source, target)

    Builder.cast_impl = cast
    Builder.create_fp_to_fp = convert


def narrow_floats_have_constants() -> None:
    """`tl.full(shape, 1.0, tl.bfloat16)` asks the builder for a constant that it does not have."""

    def constant(kind: Any) -> Callable:
        return lambda self, value: Handle(narrow(np.array([value]), kind), kind)

    for kind in NARROW:
        setattr(Builder, f"get_{kind.name}", constant(kind))


def narrow_floats_multiply() -> None:
    """A stock `tl.dot` of bfloat16 multiplies bit patterns; ours sums exact products in the accumulator's type."""
    stock = Builder.create_dot

    def dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        if a.dtype.scalar not in NARROW and b.dtype.scalar not in NARROW:
            return stock(self, a, b, accumulator, *rest)
        total = wide(a).data @ wide(b).data + wide(accumulator).data
        kind = accumulator.dtype.scalar
        if kind in NARROW:
            return Handle(narrow(total, kind), kind)
        return Handle(total.astype(accumulator.data.dtype), kind)

    Builder.create_dot = dot


def minimum_drops_nan() -> None:
    """`tl.minimum`, `tl.maximum` and `tl.clamp` drop NaN unless told to pass it on, as the GPU does."""
    stock = Builder.create_clampf

    def clamp(self: Any, value: Any, low: Any, high: Any, propagate: Any) -> Any:
        if propagate == ir.PROPAGATE_NAN.ALL:
            return stock(self, value, low, high, propagate)
        return self.create_minnumf(self.create_maxnumf(value, low), high)

    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    Builder.create_clampf = clamp


FIXES = (
    narrow_floats_compute_in_float32,
    narrow_floats_convert_by_rounding,
    narrow_floats_have_constants,
    narrow_floats_multiply,
    minimum_drops_nan,
)
