"""Why is a slightly larger matrix sometimes much faster, or slower? Alignment and sets.

    GPU   bf16 product with K = 4096 against 4097: rows no longer start at multiples of 16 bytes, so no TMA and no
          wide loads; far more is lost than the share of padding that tiles explain
    CPU   walking down columns with a row pitch of a power of two: their lines fall into few sets of the cache and
          push each other out, though the cache is large enough; one line of padding heals it

The sets are computed from the cache's own geometry.
"""

from pathlib import Path
from typing import NamedTuple

from cairn.hw.sysfs import read_int
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

GEOMETRY = Path("/sys/devices/system/cpu/cpu0/cache/index0")
ROWS = 512  # lines of one column: half of a usual first-level cache
COLUMNS = 16  # that share these lines
PAD = 16  # floats: one line of 64 bytes


class Cache(NamedTuple):
    """First-level data cache; the defaults are a common one, where the system does not say."""

    sets: int = 64
    ways: int = 8
    line: int = 64


def read_cache(folder: Path = GEOMETRY) -> Cache:
    files = ("number_of_sets", "ways_of_associativity", "coherency_line_size")
    found = [read_int(folder / name) for name in files]
    return Cache(*(value or usual for value, usual in zip(found, Cache(), strict=True)))


def lines_kept(cache: Cache, pitch_bytes: int, rows: int) -> int:
    """Of the lines that one column touches, how many the cache can hold at once."""
    used: dict[int, int] = {}
    for row in range(rows):
        place = row * pitch_bytes // cache.line % cache.sets
        used[place] = used.get(place, 0) + 1
    return sum(min(count, cache.ways) for count in used.values())


def run(bench: Workbench) -> Outcome:
    return _products(bench) if bench.on_gpu else _columns(bench)


def _columns(bench: Workbench) -> Outcome:
    import numpy as np

    cache = read_cache()
    rows, seconds, lines_cached = [], {}, {}
    for pitch in (4096, 4096 + PAD):
        bench.step(f"columns of a matrix with {pitch} floats in a row")
        matrix = np.ones((ROWS, pitch), dtype=np.float32)
        columns = [matrix[:, column] for column in range(COLUMNS)]

        walk = lambda columns=columns: [column.sum() for column in columns]  # noqa: E731
        seconds[pitch] = bench.time(walk, device="cpu", budget_ms=400).p10_s
        lines_cached[pitch] = lines_kept(cache, pitch * 4, ROWS)
        rows.append([pitch, lines_cached[pitch], ROWS, seconds[pitch] / ROWS / COLUMNS * 1e9])
    plain, padded = seconds
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "share of a column's lines that the padded form keeps",
                    "加 padding 后一列能留在缓存的缓存行比例",
                ),
                predicted=min(1.0, cache.sets * cache.ways / ROWS),
                measured=lines_cached[padded] / ROWS,
                unit="",
                within=0.15,
            ),
            Check(
                what=Words(
                    "the same sum with a power of two over one line more",
                    "2 的幂行距与多一条缓存行的耗时比",
                ),
                # Every access but the kept ones misses, against one in 16: anything clearly above noise.
                predicted=1.4,
                measured=seconds[plain] / seconds[padded],
                unit="x",
                kind="at_least",
            ),
        ],
        table=Table(
            columns=[
                Words("floats in a row", "每行 float 数"),
                Words("lines that stay", "能留住的缓存行"),
                Words("lines of a column", "一列的缓存行"),
                Words("ns per number", "每个数 ns"),
            ],
            rows=rows,
        ),
    )


def _products(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.matmul.matmul import LARGE
    from cairn.kernels.tiles import tma_obstacle

    points, seconds, refused = [], {}, {}
    for k in (4032, 4095, 4096, 4097, 4104, 4160):
        bench.step(f"product with K = {k}")
        a, b = (torch.randn(4096, k, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
        seconds[k] = bench.time(lambda a=a, b=b: a @ b.T).median_s
        refused[k] = tma_obstacle("a", a) is not None
        points.append((float(k), 2.0 * 4096 * 4096 * k / seconds[k] / 1e12))
    tiles = -(-4097 // LARGE.block_k) / (4096 // LARGE.block_k)  # padding of K alone
    return Outcome(
        checks=[
            Check(
                what=Words("odd K refused by TMA (1 = yes)", "奇数 K 不能用 TMA（1 = 是）"),
                predicted=1.0,
                measured=float(refused[4097] and not refused[4096]),
                unit="",
            ),
            Check(
                what=Words(
                    "K = 4097 over 4096, beyond what tiles explain",
                    "K = 4097 比 4096 慢的倍数，超出 tile 填充",
                ),
                predicted=1.15 * tiles,
                measured=seconds[4097] / seconds[4096],
                unit="x",
                kind="at_least",
            ),
        ],
        plots=[
            Plot(
                title=Words("The cliff", "悬崖"),
                x=Words("K", "K"),
                y=Words("TFLOP/s", "TFLOP/s"),
                lines={"4096 x 4096 x K": points},
            )
        ],
    )


LAB = described(__file__, run)
