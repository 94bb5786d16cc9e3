"""How does a TPU multiply matrices without caches? A weight-stationary systolic array, one cycle at a time.

        [w w w w]      weights stay; a row of activations enters from the left, one cycle later per lane (skewed);
    a ->[w w w w]      partial sums move down; a finished sum falls out at the bottom.
        [w w w w]      the next tile's weights shift down through shadow registers meanwhile: r cycles for r rows
         |     |

    one tile      m + r + c - 2 cycles for m rows
    many tiles    the next one begins when m rows have entered and r rows of weights have been shifted: max(m, r) each

So up to r rows cost no more than one: the array waits for weights, as every decoder with a small batch does. The
matrices are the shipped model's own, in int8, through this project's quantiser; sums are exact integers.
"""

import math
from typing import Any, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

SIDE = 32  # rows and columns of cells


class Trace(NamedTuple):
    product: Any  # [m, c]
    cycles: int  # from the first operand entering to the last sum leaving
    largest: int  # magnitude of any partial sum in any register


class Layer(NamedTuple):
    """A matrix over tiles."""

    product: Any  # [m, n]
    cycles: int
    largest: int


def simulate(a_MR: Any, w_RC: Any) -> Trace:
    """Every register of the array, cycle after cycle, until all sums have left it."""
    import numpy as np

    rows_in, height = a_MR.shape
    width = w_RC.shape[1]
    moving = np.zeros((height, width), dtype=np.int64)  # activations, going right
    valid = np.zeros((height, width), dtype=bool)
    sums = np.zeros((height, width), dtype=np.int64)  # partial sums, going down
    out_MC = np.zeros((rows_in, width), dtype=np.int64)
    cycle = outputs = largest = 0
    lanes = np.arange(height)
    while outputs < rows_in * width:
        moving[:, 1:], valid[:, 1:] = moving[:, :-1].copy(), valid[:, :-1].copy()
        row = cycle - lanes  # lane r gets the element of row (cycle - r): the skew
        inside = (row >= 0) & (row < rows_in)
        valid[:, 0] = inside
        moving[:, 0] = np.where(inside, a_MR[row.clip(0, rows_in - 1), lanes], 0)
        above = np.vstack([np.zeros((1, width), dtype=np.int64), sums[:-1]])
        sums = above + moving * w_RC
        largest = max(largest, int(np.abs(sums).max()))
        for column in np.flatnonzero(valid[-1]):
            out_MC[cycle - (height - 1) - column, column] = sums[-1, column]
            outputs += 1
        cycle += 1
    return Trace(out_MC, cycle, largest)


def over_tiles(a_MK: Any, w_KN: Any, side: int) -> Layer:
    """The whole matrix, tile after tile. A tile starts when the one before it lets go of its first cells."""
    import numpy as np

    rows_in = len(a_MK)
    out_MN = np.zeros((rows_in, w_KN.shape[1]), dtype=np.int64)
    starts, weights_ready, end, largest = 0, side, 0, 0
    for k in range(0, w_KN.shape[0], side):
        for n in range(0, w_KN.shape[1], side):
            begin = max(starts, weights_ready)
            trace = simulate(a_MK[:, k : k + side], w_KN[k : k + side, n : n + side])
            out_MN[:, n : n + side] += trace.product  # the accumulators below the array
            largest = max(largest, trace.largest, int(np.abs(out_MN).max()))
            starts = begin + rows_in  # its rows have entered
            weights_ready = begin + side  # the shadow registers are filled again
            end = begin + trace.cycles
    return Layer(out_MN, end, largest)


def run(bench: Workbench) -> Outcome:
    import numpy as np

    bench.step("weights and activations of cairn-tiny in int8")
    x_MK, w_KN = real_matrices(4 * SIDE, bench.pick(4, 2) * SIDE)
    counts = bench.pick((1, 4, SIDE, 4 * SIDE), (1, SIDE, 2 * SIDE))
    layers = {}
    for rows_in in counts:
        bench.step(f"{rows_in} rows through {SIDE} x {SIDE} cells")
        layers[rows_in] = over_tiles(x_MK[:rows_in], w_KN, SIDE)
    wrong = sum(int((one.product != x_MK[:m] @ w_KN).sum()) for m, one in layers.items())
    last = layers[counts[-1]]
    foreseen = foreseen_largest(x_MK[: counts[-1]], w_KN)
    tiles = math.prod(-(-size // SIDE) for size in w_KN.shape)
    return Outcome(
        checks=[
            _exact(wrong),
            *_cycles(layers, tiles, counts),
            _bits(foreseen, float(last.largest)),
        ],
        plots=[_plot(layers, tiles)],
        table=_table(layers, tiles),
        notes=_notes(int(np.abs(w_KN).max()), w_KN.shape[0]),
    )


def real_matrices(rows: int, columns: int) -> tuple[Any, Any]:
    """Activations [rows, K] and weights [K, columns] of a layer's first matrix, each by its own largest value."""
    import numpy as np

    from cairn.compress.calibration import token_ids, windows
    from cairn.compress.layer_by_layer import walk
    from cairn.models.runnable import open_model

    opened = open_model("cairn-tiny")
    assert opened.tokenizer is not None
    ids = token_ids(None, opened.tokenizer, opened.spec.vocab)
    model = opened.load("cpu", "float32").model
    site = next(walk(model, windows(ids, 128, "the labs")[:2], hessian=False)).sites[0]
    x_MK = site.inputs.sample_MK[:rows].float().numpy()
    w_KN = site.matrix.read().float().t()[:, :columns].numpy()
    return tuple(np.round(one * 127 / np.abs(one).max()).astype(np.int64) for one in (x_MK, w_KN))  # type: ignore[return-value]


def foreseen_largest(x_MK: Any, w_KN: Any) -> float:
    """Of sums of K products with random signs: their deviation, times how far the largest of so many lies out."""
    import numpy as np

    deviation = math.sqrt(x_MK.shape[1] * float(np.mean(x_MK**2)) * float(np.mean(w_KN**2)))
    return deviation * math.sqrt(2 * math.log(len(x_MK) * w_KN.shape[1]))


def cycles_of(rows_in: int, tiles: int, side: int) -> int:
    """Weights first; then a tile every max(m, r) cycles; at last the sums of the last one leave."""
    return side + (tiles - 1) * max(rows_in, side) + rows_in + 2 * side - 2


def _exact(wrong: int) -> Check:
    return Check(
        what=Words("wrong numbers in all products", "所有乘积中的错误个数"),
        predicted=0.0,
        measured=float(wrong),
        unit="",
        simulated=True,
    )


def _cycles(layers: dict[int, Layer], tiles: int, counts: tuple[int, ...]) -> list[Check]:
    return [
        Check(
            what=Words(
                f"cycles of {SIDE} rows over those of one row", f"{SIDE} 行与 1 行的周期之比"
            ),
            predicted=1.0,
            measured=layers[SIDE].cycles / layers[1].cycles,
            unit="x",
            within=0.1,
            simulated=True,
        ),
        Check(
            what=Words(f"cycles of {counts[-1]} rows", f"{counts[-1]} 行的周期数"),
            predicted=cycles_of(counts[-1], tiles, SIDE),
            measured=layers[counts[-1]].cycles,
            unit="cycles",
            simulated=True,
        ),
    ]


def _bits(foreseen: float, largest: float) -> Check:
    """Real activations are no coin tosses: the estimate is good to a bit, not to a percent."""
    return Check(
        what=Words("bits that the accumulators need", "累加器需要的位数"),
        predicted=math.log2(foreseen) + 1,
        measured=math.log2(largest) + 1,
        unit="bits",
        within=0.12,
        simulated=True,
    )


def _plot(layers: dict[int, Layer], tiles: int) -> Plot:
    counts = [2**power for power in range(9)]
    return Plot(
        title=Words("Cycles for each row", "每行所需周期"),
        x=Words("rows of activations", "激活的行数"),
        y=Words("cycles per row", "周期/行"),
        lines={
            "predicted": [(float(m), cycles_of(m, tiles, SIDE) / m) for m in counts],
            "counted": [(float(m), one.cycles / m) for m, one in layers.items()],
        },
        log_x=True,
        log_y=True,
        limit=("every cell multiplies", float(tiles)),
    )


def _table(layers: dict[int, Layer], tiles: int) -> Table:
    return Table(
        columns=[
            Words("rows", "行数"),
            Words("cycles", "周期"),
            Words("cells that multiply", "做乘法的单元比例"),
        ],
        rows=[[m, one.cycles, m * tiles / one.cycles] for m, one in layers.items()],
    )


def _notes(largest_weight: int, inner: int) -> list[Words]:
    worst = math.log2(127 * largest_weight * inner) + 1
    return [
        Words(
            f"The worst case of {inner} products of int8 needs {worst:.0f} bits; hardware keeps 32.",
            f"{inner} 个 int8 乘积的最坏情况需要 {worst:.0f} 位；硬件用 32 位。",
        )
    ]


LAB = described(__file__, run)
