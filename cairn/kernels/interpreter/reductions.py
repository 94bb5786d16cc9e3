"""Reductions and scans of the interpreter, vectorised: log2(n) calls of the combine function instead of n.

The order in which values meet is that of a tree, as it is on a GPU, so a combine function has to be associative;
neighbours stay in order, so it need not be commutative. Knows nothing about launches or memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

from cairn.kernels.interpreter.narrow_floats import NARROW, narrow, widen

Combine = Callable[..., Any]

WHOLE: dict[Combine, Callable[..., np.ndarray]] = {
    tl.standard._sum_combine: np.sum,
    tl.standard._elementwise_max: np.fmax.reduce,
    tl.standard._elementwise_min: np.fmin.reduce,
}
PICKS: dict[Combine, Callable[..., np.ndarray]] = {
    tl.standard._argmax_combine_tie_break_left: np.argmax,
    tl.standard._argmax_combine_tie_break_fast: np.argmax,
    tl.standard._argmin_combine_tie_break_left: np.argmin,
    tl.standard._argmin_combine_tie_break_fast: np.argmin,
}
RUNNING: dict[Combine, Callable[..., np.ndarray]] = {
    tl.standard._sum_combine: np.cumsum,
    tl.standard._prod_combine: np.cumprod,
}


def reduce_along(
    tensors: Sequence[Any], axis: int | None, combine: Combine, keep: bool
) -> list[Any]:
    rank = len(tensors[0].shape)
    arrays = [tensor.handle.data for tensor in tensors]
    if axis is None:
        arrays, along = [array.reshape(-1) for array in arrays], 0
    else:
        along = int(axis) % rank
    results = _reduced(arrays, [tensor.dtype for tensor in tensors], along, combine)
    if keep:
        shape = [1] * rank if axis is None else None
        results = [r.reshape(shape) if shape else np.expand_dims(r, along) for r in results]
    return [_tensor(r, tensor.dtype) for r, tensor in zip(results, tensors, strict=True)]


def scan_along(tensors: Sequence[Any], axis: int, combine: Combine, reverse: bool) -> list[Any]:
    along = int(axis) % len(tensors[0].shape)
    kinds = [tensor.dtype for tensor in tensors]
    arrays = [np.moveaxis(tensor.handle.data, along, 0) for tensor in tensors]
    arrays = [array[::-1] for array in arrays] if reverse else arrays
    if combine in RUNNING and kinds[0] not in NARROW:
        results = [RUNNING[combine](arrays[0], axis=0)]
    else:
        results = _scanned(arrays, kinds, combine)
    results = [result[::-1] for result in results] if reverse else results
    return [
        _tensor(np.moveaxis(result, 0, along), kind)
        for result, kind in zip(results, kinds, strict=True)
    ]


def _reduced(
    arrays: list[np.ndarray], kinds: list[Any], axis: int, combine: Combine
) -> list[np.ndarray]:
    if combine in WHOLE:
        if kinds[0] in NARROW:
            wide = WHOLE[combine](widen(arrays[0], kinds[0]), axis=axis)
            return [narrow(wide, kinds[0])]
        return [WHOLE[combine](arrays[0], axis=axis)]
    if combine in PICKS:
        values = widen(arrays[0], kinds[0]) if kinds[0] in NARROW else arrays[0]
        place = np.expand_dims(PICKS[combine](values, axis=axis), axis)
        return [np.take_along_axis(a, place, axis).squeeze(axis) for a in arrays]
    arrays = [np.moveaxis(array, axis, 0) for array in arrays]
    while len(arrays[0]) > 1:
        arrays = _combined([a[::2] for a in arrays], [a[1::2] for a in arrays], kinds, combine)
    return [array[0] for array in arrays]


def _scanned(arrays: list[np.ndarray], kinds: list[Any], combine: Combine) -> list[np.ndarray]:
    """Hillis and Steele: after step d every place has combined the 2d values before it."""
    distance, count = 1, len(arrays[0])
    place = np.arange(count).reshape(-1, *[1] * (arrays[0].ndim - 1))
    while distance < count:
        shifted = [np.roll(array, distance, axis=0) for array in arrays]
        combined = _combined(shifted, arrays, kinds, combine)
        arrays = [np.where(place >= distance, c, a) for c, a in zip(combined, arrays, strict=True)]
        distance *= 2
    return arrays


def _combined(
    left: list[np.ndarray], right: list[np.ndarray], kinds: list[Any], combine: Combine
) -> list[np.ndarray]:
    operands = [
        _tensor(a, kind) for side in (left, right) for a, kind in zip(side, kinds, strict=True)
    ]
    result = combine(*operands)
    results = result if isinstance(result, tuple | tl.tuple) else (result,)
    return [
        np.broadcast_to(r.handle.data, a.shape).astype(_get_np_dtype(kind))
        for r, a, kind in zip(results, left, kinds, strict=True)
    ]


def _tensor(array: np.ndarray, kind: Any) -> Any:
    array = np.asarray(array).astype(_get_np_dtype(kind))
    if not array.shape:
        return tl.tensor(TensorHandle(array.reshape(1), kind), kind)
    return tl.tensor(TensorHandle(array, kind), tl.block_type(kind, list(array.shape)))


def reductions_run_as_trees() -> None:
    """Stock reductions with a combine function of one's own take a Python step per element."""
    reduce: Any = interpreter.ReduceOps
    reduce.apply_impl = lambda self, tensors: reduce_along(
        tensors, self.axis, self.combine_fn, self.keep_dims
    )
    scan: Any = interpreter.ScanOps
    scan.apply_impl = lambda self, tensors: scan_along(
        tensors, self.axis, self.combine_fn, self.reverse
    )


FIXES = (reductions_run_as_trees,)
