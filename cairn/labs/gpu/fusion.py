"""Why does a fused operation win though it computes the same? It touches memory less often.

    reference   (x - mean), squares, mean, product, weight, bias: each a pass over memory, there and back
    fused       a row is read, everything happens to it, it is written: 2 passes

The bytes of the reference are counted while it runs, those of the fused form are our kernel's stated cost. On a GPU
times stand in that ratio. On a CPU the same function is called on pieces that stay in the cache, as a fused loop would:
its passes then are cheap but not free, so the gain lies between one and the ratio of the bytes.
"""

from cairn.labs.gpu._one_thread import one_thread
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

PIECE = 64  # rows: 256 KiB of each intermediate result


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.layernorm import cost, layernorm, layernorm_reference
    from cairn.labs.gpu._traffic import Traffic

    rows, columns = (16384, 4096) if bench.on_gpu else bench.pick((8192, 1024), (4096, 1024))
    x = torch.randn(rows, columns, device=bench.device)
    weight, bias = (torch.randn(columns, device=bench.device) for _ in range(2))
    bench.step("counting the bytes of the plain form")
    with Traffic() as traffic:
        plain = layernorm_reference(x, weight, bias, 1e-5)

    def in_one() -> torch.Tensor:
        if bench.on_gpu:
            return layernorm(x, weight, bias)
        y = torch.empty_like(x)
        for first in range(0, rows, PIECE):
            part = slice(first, first + PIECE)
            y[part] = layernorm_reference(x[part], weight, bias, 1e-5)
        return y

    fused = in_one()
    least = cost(rows, columns, element_bytes=4).bytes
    with one_thread():
        bench.step("the plain form")
        slow = bench.time(lambda: layernorm_reference(x, weight, bias, 1e-5), budget_ms=900).p10_s
        bench.step("the fused form")
        fast = bench.time(in_one, budget_ms=600).p10_s
    return Outcome(
        checks=[
            *_gain(bench, traffic.bytes / least, slow / fast),
            Check(
                what=Words("largest difference of the results", "结果的最大差"),
                predicted=1e-4,
                measured=float((plain - fused).abs().max()),
                unit="",
                kind="at_most",
            ),
        ],
        table=Table(
            columns=[
                Words("form", "形式"),
                Words("operations", "算子数"),
                Words("MiB moved", "搬运 MiB"),
                Words("ms", "ms"),
                Words("GB/s", "GB/s"),
            ],
            rows=[
                [
                    "plain",
                    len(traffic.operations),
                    traffic.bytes / 2**20,
                    slow * 1e3,
                    traffic.bytes / slow / 1e9,
                ],
                ["fused", 1, least / 2**20, fast * 1e3, least / fast / 1e9],
            ],
        ),
        notes=[
            Words(
                "Operations of the plain form: " + ", ".join(traffic.operations),
                "未融合形式的算子：" + "、".join(traffic.operations),
            )
        ],
    )


def _gain(bench: Workbench, by_bytes: float, measured: float) -> list[Check]:
    what = Words("plain over fused, time", "未融合与融合的耗时比")
    if bench.on_gpu:
        return [Check(what=what, predicted=by_bytes, measured=measured, unit="x", within=0.5)]
    most = Words("and never more than the ratio of bytes", "且不会超过字节之比")
    return [
        Check(what=what, predicted=1.25, measured=measured, unit="x", kind="at_least"),
        Check(
            what=most, predicted=by_bytes, measured=measured, unit="x", kind="at_most", within=0.1
        ),
    ]


LAB = Lab(
    name="fusion",
    area="gpu",
    title=Words("Fusion: fewer trips to memory", "算子融合：少跑几趟内存"),
    hypothesis=Words(
        "A layer norm written as separate operations moves several times the bytes of the fused form, and "
        "takes longer by about that ratio, though the arithmetic is the same.",
        "把 layer norm 写成多个独立算子，搬运的字节是融合形式的数倍，耗时也大约按这个比例增加，"
        "尽管运算量相同。",
    ),
    run=run,
    causes=(
        Words(
            "intermediate results stayed in the last-level cache and were cheaper than counted",
            "中间结果留在末级缓存里，比计数的便宜",
        ),
        Words(
            "fresh buffers: each large result costs page faults or allocator time beside its bytes",
            "新缓冲区：每个大的中间结果还有缺页或分配器开销",
        ),
    ),
    code=(
        "cairn/kernels/layernorm.py:layernorm",
        "cairn/kernels/layernorm.py:cost",
        "cairn/kernels/rmsnorm.py:add_rmsnorm",
        "cairn/labs/gpu/_traffic.py:Traffic",
    ),
    reading=(
        "Data Movement Is All You Need: A Case Study on Optimizing Transformers (2021)",
        "The Deep Learning Compiler: A Comprehensive Survey (2020)",
    ),
    questions=(
        Question(
            Words(
                "Which operations fuse well, and which do not?", "哪些算子适合融合，哪些不适合？"
            ),
            Words(
                "Elementwise chains, row reductions and epilogues of products: the data is already in "
                "registers. Two large products do not: the second needs whole rows of the first, which do "
                "not fit on chip.",
                "逐元素链、行归约和矩阵乘的 epilogue 适合：数据已在寄存器里。两个大矩阵乘不适合："
                "第二个要用第一个的整行，片上放不下。",
            ),
        ),
        Question(
            Words(
                "What is the best speedup that fusing a chain of k elementwise operations can give?",
                "融合 k 个逐元素算子最多能快多少？",
            ),
            Words(
                "Each reads and writes N numbers: 2kN becomes 2N, so k times, as long as memory is the limit "
                "and nothing else needs the intermediate results; plus k - 1 launches saved.",
                "每个算子读写 N 个数：2kN 变成 2N，即 k 倍，前提是受访存限制且没人要中间结果；另外省下 k − 1 "
                "次启动。",
            ),
        ),
        Question(
            Words(
                "Why does attention need more than fusing elementwise operations?",
                "为什么注意力的融合不只是逐元素融合？",
            ),
            Words(
                "Softmax needs a whole row before the second product can start. Online softmax makes the "
                "reduction incremental; only then can both products and the softmax share one pass.",
                "softmax 要有整行才能开始第二个乘法；online softmax 把归约变成增量式，两个乘法与 softmax "
                "才能在一趟里完成。",
            ),
        ),
    ),
    seconds=3.0,
)
