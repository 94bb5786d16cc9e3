"""How does a TPU multiply matrices without caches? A weight-stationary systolic array, one cycle at a time.

          b columns
        [w w w w]      weights stay; a row of activations enters from the left, one step later per row (skewed);
    a ->[w w w w]      partial sums move down; a finished sum falls out at the bottom.
        [w w w w]
         |     |       cycles for m rows on an array of r x c:  m + r + c - 2      useful: m of them per cell

The model moves whole registers per cycle with NumPy, so that it can be checked against the product and the formula.
"""

from typing import Any, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.workbench import Workbench


class Trace(NamedTuple):
    product: Any  # [m, c]
    cycles: int
    busy: int  # multiply-adds with a real operand, over all cells and cycles


def cycles_of(rows_in: int, height: int, width: int) -> int:
    """From the first operand entering to the last sum leaving."""
    return rows_in + height + width - 2


def utilisation(rows_in: int, height: int, width: int) -> float:
    """Share of all cell-cycles that multiply something."""
    return rows_in / cycles_of(rows_in, height, width)


def simulate(a_MR: Any, w_RC: Any) -> Trace:
    """Every register of the array, cycle after cycle, until all sums have left it."""
    import numpy as np

    rows_in, height = a_MR.shape
    width = w_RC.shape[1]
    moving = np.zeros((height, width), dtype=a_MR.dtype)  # activations, going right
    valid = np.zeros((height, width), dtype=bool)
    sums = np.zeros((height, width), dtype=a_MR.dtype)  # partial sums, going down
    out_MC = np.zeros((rows_in, width), dtype=a_MR.dtype)
    cycle = busy = left = 0
    lanes = np.arange(height)
    while left < rows_in * width:
        moving[:, 1:], valid[:, 1:] = moving[:, :-1].copy(), valid[:, :-1].copy()
        row = cycle - lanes  # lane r gets the element of row (cycle - r): the skew
        inside = (row >= 0) & (row < rows_in)
        valid[:, 0] = inside
        moving[:, 0] = np.where(inside, a_MR[row.clip(0, rows_in - 1), lanes], 0)
        above = np.vstack([np.zeros((1, width), dtype=sums.dtype), sums[:-1]])
        sums = above + moving * w_RC
        busy += int(valid.sum())
        for column in np.flatnonzero(valid[-1]):
            out_MC[cycle - (height - 1) - column, column] = sums[-1, column]
            left += 1
        cycle += 1
    return Trace(out_MC, cycle, busy)


def run(bench: Workbench) -> Outcome:
    import numpy as np

    generator = np.random.default_rng(0)
    size = bench.pick(32, 8)
    shapes = [(1, size, size), (size, size, size), (4 * size, size, size), (3, size, size // 2)]
    wrong = off = 0
    shares = []
    for rows_in, height, width in shapes:
        bench.step(f"{rows_in} rows through {height} x {width}")
        a_MR = generator.integers(-8, 8, (rows_in, height))
        w_RC = generator.integers(-8, 8, (height, width))
        trace = simulate(a_MR, w_RC)
        wrong += int((trace.product != a_MR @ w_RC).sum())
        off += abs(trace.cycles - cycles_of(rows_in, height, width))
        share = trace.busy / (trace.cycles * height * width)
        shares.append(abs(share - utilisation(rows_in, height, width)))
    batches = [2**power for power in range(13)]
    curves = {
        f"{side} x {side}": [(float(m), utilisation(m, side, side)) for m in batches]
        for side in (32, 128, 256)
    }
    return Outcome(
        checks=_checks(wrong, off, shares),
        plots=[
            Plot(
                title=Words("Rows that keep an array busy", "喂满阵列需要的行数"),
                x=Words("rows of activations", "激活的行数"),
                y=Words("utilisation", "利用率"),
                lines=curves,
                log_x=True,
                limit=("every cell multiplies", 1.0),
            )
        ],
        notes=[
            Words(
                f"A 128 x 128 array needs {_rows_for(0.9, 128)} rows for 90%: one decode row uses "
                f"{utilisation(1, 128, 128):.2%} of it.",
                f"128×128 阵列要 {_rows_for(0.9, 128)} 行才能到 90%：解码的一行只用到 "
                f"{utilisation(1, 128, 128):.2%}。",
            )
        ],
    )


def _checks(wrong: int, off: int, shares: list[float]) -> list[Check]:
    return [
        Check(
            what=Words("wrong numbers in all products", "所有乘积中的错误个数"),
            predicted=0.0,
            measured=float(wrong),
            unit="",
        ),
        Check(
            what=Words("cycles beside the formula m + r + c - 2", "与公式 m + r + c − 2 的周期差"),
            predicted=0.0,
            measured=float(off),
            unit="cycles",
        ),
        Check(
            what=Words(
                "utilisation beside m / (m + r + c - 2), largest gap",
                "利用率与 m / (m + r + c − 2) 的最大差",
            ),
            predicted=1e-12,
            measured=max(shares),
            unit="",
            kind="at_most",
        ),
    ]


def _rows_for(share: float, side: int) -> int:
    """m / (m + 2 side - 2) >= share."""
    return -(-int(share * (2 * side - 2) * 1000) // int((1 - share) * 1000))


LAB = described(__file__, run)
