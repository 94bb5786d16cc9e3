"""Runs of bytes copied within this process: what shared memory and the in-process transport do.

Long runs one by one, which is memcpy; many short ones as rows of a table, those of one length together, a few hundred
kilobytes at a time, because Python's cost for each would be more than the copy. Both give the same bytes.
"""

import numpy as np
from numpy.typing import NDArray

from cairn.comm.transfer.byte_runs import ByteRuns

Bytes = NDArray[np.uint8]
FEW = 8  # runs: not worth a table
SHORT = 2048  # bytes: below that a run costs more to name than to copy
LONG = 32 << 10  # bytes: from there on other threads should not have to wait
AT_ONCE = 256 << 10  # bytes in between, so that they stay in the cache


def copy_runs(source: Bytes, target: Bytes, runs: ByteRuns) -> None:
    """Every run from `source` to `target`, two arrays of bytes that do not overlap."""
    if runs.copies <= FEW or runs.nbytes >= SHORT * runs.copies:
        copy_one_by_one(source, target, runs)
        return
    lengths, kind = np.unique(runs.sizes, return_inverse=True)
    for place, size in enumerate(lengths.tolist()):
        some = np.flatnonzero(kind == place) if len(lengths) > 1 else slice(None)
        same = ByteRuns(runs.source[some], runs.target[some], runs.sizes[some])
        many = same.copies > FEW and 0 < size < SHORT
        (copy_rows if many else copy_one_by_one)(source, target, same)


def copy_one_by_one(source: Bytes, target: Bytes, runs: ByteRuns) -> None:
    from_, into = source.data, target.data
    rows = zip(runs.source.tolist(), runs.target.tolist(), runs.sizes.tolist(), strict=True)
    for origin, goal, size in rows:
        if size < LONG:
            into[goal : goal + size] = from_[origin : origin + size]
        else:  # numpy lets other threads run meanwhile
            target[goal : goal + size] = source[origin : origin + size]


def copy_rows(source: Bytes, target: Bytes, runs: ByteRuns) -> None:
    """Runs of one length, as rows of `unit` bytes: the largest that divides every offset and the length."""
    size = int(runs.sizes[0])
    unit = int(np.gcd.reduce(np.concatenate((runs.source, runs.target, [size]))))
    if unit * 8 < size:  # offsets that share nothing: rows would be single bytes
        copy_one_by_one(source, target, runs)
        return
    kind = np.dtype((np.void, unit))
    rows_s = source[: len(source) // unit * unit].view(kind)
    rows_t = target[: len(target) // unit * unit].view(kind)
    inside = np.arange(size // unit)
    step = max(1, AT_ONCE // size)
    for start in range(0, runs.copies, step):
        some = runs.part(slice(start, start + step))
        origins = (some.source[:, None] // unit + inside).ravel()
        goals = (some.target[:, None] // unit + inside).ravel()
        rows_t[goals] = rows_s[origins]
