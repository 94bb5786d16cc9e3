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
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
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
    rows, seconds, kept = [], {}, {}
    for pitch in (4096, 4096 + PAD):
        bench.step(f"columns of a matrix with {pitch} floats in a row")
        matrix = np.ones((ROWS, pitch), dtype=np.float32)
        columns = [matrix[:, column] for column in range(COLUMNS)]

        walk = lambda columns=columns: [column.sum() for column in columns]  # noqa: E731
        seconds[pitch] = bench.time(walk, device="cpu", budget_ms=400).p10_s
        kept[pitch] = lines_kept(cache, pitch * 4, ROWS)
        rows.append([pitch, kept[pitch], ROWS, seconds[pitch] / ROWS / COLUMNS * 1e9])
    plain, padded = seconds
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "share of a column's lines that the padded form keeps",
                    "加 padding 后一列能留在缓存的缓存行比例",
                ),
                predicted=min(1.0, cache.sets * cache.ways / ROWS),
                measured=kept[padded] / ROWS,
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


LAB = Lab(
    name="shape-cliff",
    area="gpu",
    title=Words("Shape cliffs: one column more or less", "形状悬崖：多一列少一列"),
    hypothesis=Words(
        "Speed does not follow size: a power-of-two pitch makes a CPU's cache sets collide, and an odd inner "
        "size takes a GPU's wide loads and TMA away; one line of padding is cheaper than either.",
        "速度并不跟着规模走：2 的幂的行距会让 CPU 缓存组冲突，奇数的内维会让 GPU 失去宽 load 和 TMA；补一行 "
        "padding 比两者都便宜。",
    ),
    run=run,
    causes=(
        Words(
            "a cache with hashed sets or a prefetcher that hides the misses",
            "缓存的组经过哈希，或预取掩盖了未命中",
        ),
        Words(
            "a library that pads or copies unaligned operands by itself",
            "数学库自己对未对齐的操作数做了填充或拷贝",
        ),
    ),
    code=(
        "cairn/kernels/tiles.py:tma_obstacle",
        "cairn/kernels/matmul/matmul.py:matmul",
        "cairn/labs/gpu/shape_cliff.py:lines_kept",
    ),
    reading=(
        "What Every Programmer Should Know About Memory (2007)",
        "NVIDIA Deep Learning Performance Guide: Matrix Multiplication Background (2023)",
    ),
    questions=(
        Question(
            Words(
                "Why is a vocabulary of 50257 padded to 50304?", "词表 50257 为什么要补到 50304？"
            ),
            Words(
                "50304 is a multiple of 64 (and 128): rows of logits and of the head start aligned, tiles "
                "divide evenly, and the tensor-core path applies; the 0.1% of extra work is far less than "
                "the cliff.",
                "50304 是 64（也是 128）的倍数：logits 与 head 的行对齐、tile 整除，可以走 Tensor Core；0.1% "
                "的额外计算远小于掉下悬崖的损失。",
            ),
        ),
        Question(
            Words("What is a conflict miss?", "什么是冲突未命中？"),
            Words(
                "A miss although the cache has room elsewhere: more lines that are in use map to one set "
                "than it has ways. A pitch of sets x line bytes puts a whole column into one set.",
                "缓存别处还有空间但仍未命中：映射到同一组的活跃行数超过路数。行距等于“组数×行大小”时，"
                "整列都落进一个组。",
            ),
        ),
        Question(
            Words("Which alignment does TMA ask for?", "TMA 要求怎样的对齐？"),
            Words(
                "Addresses and row strides that are multiples of 16 bytes: 8 elements of bf16. Our matmul "
                "checks it and leaves other shapes to cuBLAS.",
                "地址与行步长都是 16 字节的倍数，即 8 个 bf16。我们的 matmul 会检查，不满足就交给 cuBLAS。",
            ),
        ),
    ),
    seconds=2.0,
)
