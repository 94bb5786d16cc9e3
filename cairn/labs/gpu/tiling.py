"""How much does a matrix product read? As much as its tiles are small.

    tile of b x b in fast memory:   2 n^3 / b numbers read       b = 1: every operand from memory, each time
                                                                 b = n: each once, 2 n^2

A cache is played with an exact count: an LRU of tiles that counts what it has to fetch. Then the real thing: the rows
of a product one at a time (the other matrix streams past for each of them) against a block of rows at once.
"""

from collections import OrderedDict

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


def fetched(n: int, tile: int) -> int:
    """Numbers of a and b fetched for an n x n product by tiles, with room for one tile of each."""
    cache: OrderedDict[tuple[str, int, int], None] = OrderedDict()
    count = 0
    tiles = n // tile
    for i in range(tiles):
        for j in range(tiles):
            for k in range(tiles):
                for key in (("a", i, k), ("b", k, j)):
                    if key not in cache:
                        count += tile * tile
                    cache[key] = None
                    cache.move_to_end(key)
                    if len(cache) > 2:
                        cache.popitem(last=False)
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

    rows = 32
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
        alone = bench.time(one_by_one, budget_ms=500, at_least=3).p10_s
        bench.step("all rows at once")
        together = bench.time(lambda: x @ w, budget_ms=500, at_least=3).p10_s
    return alone, together, rows


LAB = described(__file__, run)
