"""bfloat16 and the two 8-bit floats as NumPy arrays, which knows neither.

`widen` turns stored bits into float32, which is exact; `narrow` rounds float32 to the nearest value, ties to
even, as the GPU does. An 8-bit float that is too large becomes the largest one (`satfinite` in PTX) and never
an infinity; NaN stays NaN. Knows nothing about kernels.
"""

import functools

import numpy as np
import torch
import triton.language as tl

FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
NARROW = (tl.bfloat16, *FLOAT8)  # what the interpreter keeps as unsigned integers


def widen(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype == tl.bfloat16:
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
    return _values(dtype)[bits]


def narrow(values: np.ndarray, dtype: tl.dtype, truncate: bool = False) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == tl.bfloat16:
        bits = values.view(np.uint32)
        # Adding just under half of the last kept bit, plus that bit, is rounding to nearest even.
        rounded = bits if truncate else bits + (0x7FFF + ((bits >> 16) & 1))
        return np.where(np.isnan(values), np.uint16(0x7FC0), (rounded >> 16).astype(np.uint16))
    kind = FLOAT8[dtype]
    largest = torch.finfo(kind).max
    limited = torch.from_numpy(np.clip(values, -largest, largest))
    return limited.to(kind).view(torch.uint8).numpy()


@functools.cache
def _values(dtype: tl.dtype) -> np.ndarray:
    """Value of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8[dtype]).float().numpy()
