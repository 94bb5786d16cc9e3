"""How much does a matrix product read? As much as its tiles are small.

    tile of b x b in fast memory:   2 n^3 / b numbers read       b = 1: every operand from memory, each time
                                                                 b = n: each once, 2 n^2

A cache is played with an exact count: an LRU of tiles that counts what it has to fetch. Then the real thing: the rows
of a product one at a time (the other matrix streams past for each of them) against a block of rows at once.
"""

from collections import OrderedDict

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


def fetched(n: int, tile: int) -> int:
    """Numbers of a and b fetched for an n x n product by tiles, with room for one tile of each."""
    held: OrderedDict[tuple[str, int, int], None] = OrderedDict()
    count = 0
    tiles = n // tile
    for i in range(tiles):
        for j in range(tiles):
            for k in range(tiles):
                for key in (("a", i, k), ("b", k, j)):
                    if key not in held:
                        count += tile * tile
                    held[key] = None
                    held.move_to_end(key)
                    if len(held) > 2:
                        held.popitem(last=False)
    return count


def predicted_fetches(n: int, tile: int) -> int:
    return 2 * n**3 // tile


def run(bench: Workbench) -> Outcome:
    n = bench.pick(64, 32)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < n]
    bench.step("a cache of two tiles")
    counted = {size: fetched(n, size) for size in sizes}
    off = sum(abs(counted[size] - predicted_fetches(n, size)) for size in sizes)
    alone, together, rows = _rows_alone_and_together(bench)
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "numbers fetched beside 2 n^3 / b, all tile sizes",
                    "各 tile 大小的读取量与 2n³/b 之差",
                ),
                predicted=0.0,
                measured=float(off),
                unit="numbers",
            ),
            Check(
                what=Words(
                    f"{rows} rows at once over one at a time, speed",
                    f"{rows} 行一起与逐行计算的速度比",
                ),
                # One at a time reads the matrix for each row: at most `rows` times the bytes, and at
                # least a few times the time wherever a core multiplies faster than memory delivers.
                predicted=1.5,
                measured=alone / together,
                unit="x",
                kind="at_least",
            ),
        ],
        plots=[
            Plot(
                title=Words("Traffic by tile size", "tile 大小与访存量"),
                x=Words("tile side", "tile 边长"),
                y=Words("numbers read per useful number", "每个有用数的读取次数"),
                lines={
                    "2 n^3 / b": [(float(s), predicted_fetches(n, s) / (2 * n * n)) for s in sizes],
                    "counted": [(float(s), counted[s] / (2 * n * n)) for s in sizes],
                },
                log_x=True,
                log_y=True,
                limit=("each number once", 1.0),
            )
        ],
    )


def _rows_alone_and_together(bench: Workbench) -> tuple[float, float, int]:
    """Seconds of y = x w for all rows, with a w that no cache holds."""
    import torch

    rows = 64
    inner, columns = bench.pick((4096, 4096), (2048, 4096))
    if bench.on_gpu:
        inner, columns = 8192, 8192
    w = torch.randn(inner, columns, device=bench.device)
    x = torch.randn(rows, inner, device=bench.device)

    def one_by_one() -> None:
        for row in range(rows):
            x[row] @ w

    with one_thread():
        bench.step("rows one at a time")
        alone = bench.time(one_by_one, budget_ms=800, at_least=3).p10_s
        bench.step("all rows at once")
        together = bench.time(lambda: x @ w, budget_ms=800, at_least=3).p10_s
    return alone, together, rows


LAB = Lab(
    name="tiling",
    area="gpu",
    title=Words("Tiling: why a product reads so little", "Tiling：矩阵乘为什么只读这么少"),
    hypothesis=Words(
        "With tiles of b x b in fast memory an n x n product fetches exactly 2 n^3 / b numbers, and "
        "computing rows together is faster than one at a time because the other matrix passes once.",
        "快速存储中放 b×b 的 tile 时，n×n 矩阵乘恰好读取 2n³/b 个数；多行一起算比逐行快，"
        "因为另一矩阵只流过一次。",
    ),
    run=run,
    causes=(
        Words(
            "the matrix fitted into the last-level cache, so streaming it again was cheap",
            "矩阵放得进末级缓存，重复读取并不贵",
        ),
        Words(
            "a library that repacks its operand for every product of several rows",
            "数学库在多行乘法时每次都重新打包操作数",
        ),
    ),
    code=(
        "cairn/kernels/tiles.py:Tiles",
        "cairn/kernels/matmul/matmul.py:matmul",
        "cairn/labs/gpu/tiling.py:fetched",
    ),
    reading=(
        "I/O Complexity: The Red-Blue Pebble Game (1981)",
        "Anatomy of High-Performance Matrix Multiplication (2008)",
    ),
    questions=(
        Question(
            Words(
                "How large must a tile be to leave the memory-bound side?",
                "tile 要多大才能脱离访存受限？",
            ),
            Words(
                "A b x b tile does 2b^3 FLOP for 2b^2 numbers: b FLOP per number, b/2 per byte in bf16. On "
                "an H200 (ridge about 200 FLOP/byte at L2 or HBM) that asks for b around 128 to 256.",
                "b×b 的 tile 用 2b² 个数做 2b³ FLOP：每个数 b FLOP，bf16 下每字节 b/2。H200 的拐点约 200 "
                "FLOP/字节，因此 b 取 128～256。",
            ),
        ),
        Question(
            Words(
                "Why does our kernel walk tiles in groups of rows?",
                "我们的内核为什么按行组遍历 tile？",
            ),
            Words(
                "132 programs in flight touch 8 rows x 17 columns of tiles instead of 1 x 132: 25 operand "
                "strips instead of 133 pass through the L2 cache.",
                "132 个在飞的程序覆盖 8 行×17 列的 tile，而不是 1×132：经过 L2 的操作数条带从 133 条降到 25 "
                "条。",
            ),
        ),
        Question(
            Words("Which limits stop tiles from growing?", "什么限制了 tile 继续变大？"),
            Words(
                "Shared memory for the operand stages (227 KiB per block), registers for the accumulator "
                "(128 x 256 float32 is half an SM's file), and too few tiles to fill all SMs.",
                "操作数流水需要的 shared memory（每块 227 KiB）、累加器占的寄存器（128×256 个 float32 是半个 "
                "SM 的寄存器堆），以及 tile 太少填不满 SM。",
            ),
        ),
    ),
    seconds=5.0,
)
