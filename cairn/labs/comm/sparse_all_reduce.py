"""How many bytes does an all-reduce need when most blocks are zero? Predicted by chance, then counted.

    density d on n ranks:  a block has to reach its owner from each rank that has it        d
                           and its sum goes to everybody if anyone had it          1 - (1-d)^n

Real ranks of this project's backend exchange bitmaps first and then only the blocks that are not zero (OmniReduce's
idea). The sums must be those of a dense all-reduce.
"""

from cairn.labs.comm._timed import times_us
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

RANKS, BLOCK = 2, 256
DENSITIES = (0.05, 0.1, 0.2, 0.4)


def reduced(
    rank: int, count: int, blocks: int, densities: tuple[float, ...], repeats: int
) -> list[tuple[float, int, float, float]]:
    """For each density: share of the bytes, wrong elements, microseconds sparse and dense."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    found = []
    for density in densities:
        torch.manual_seed(1000 + rank)
        keep = (torch.rand(blocks, 1) < density).float()
        mine = torch.randint(-8, 8, (blocks, BLOCK)).float() * keep  # whole numbers: sums are exact
        shares: list[float] = []
        work = mine.flatten().clone()

        def sparse(work: torch.Tensor = work, shares: list[float] = shares) -> None:
            group.sparse_all_reduce(work, BLOCK, 1.0, shares.append).wait()  # type: ignore[union-attr]

        sparse()
        expected = mine.flatten().clone()
        dist.all_reduce(expected)
        wrong = int((work != expected).sum())
        fresh = mine.flatten().clone()
        quick = min(times_us(lambda f=fresh, s=sparse: s(f.clone()), repeats))
        dense = min(times_us(lambda f=fresh: dist.all_reduce(f.clone()), repeats))
        found.append((shares[0], wrong, quick, dense))
    return found


def share(density: float, ranks: int) -> float:
    """Bytes of a rank as a share of a dense all-reduce's; an owner's own blocks count as received."""
    away = (ranks - 1) / ranks
    return (density + away * (1 - (1 - density) ** ranks)) / (2 * away)


def run(bench: Workbench) -> Outcome:
    blocks = bench.pick(8192, 4096)
    densities = bench.pick(DENSITIES, DENSITIES[1:3])
    bench.step(f"{RANKS} ranks, {blocks} blocks, {len(densities)} densities")
    found = run_ranks(RANKS, reduced, blocks, densities, bench.pick(4, 2), backend="cairn")
    first = found[0]
    predicted = [share(density, RANKS) for density in densities]
    return Outcome(
        checks=[
            Check(
                what=Words("elements that differ from a dense sum", "与稠密求和不同的元素数"),
                predicted=0,
                measured=sum(wrong for rank in found for _, wrong, _, _ in rank),
                unit="elements",
            ),
            *[
                Check(
                    what=Words(f"bytes at density {density:g}", f"密度 {density:g} 时的字节比例"),
                    predicted=expected,
                    measured=row[0],
                    unit="of dense",
                    within=0.3,
                )
                for density, expected, row in zip(densities, predicted, first, strict=True)
            ],
        ],
        plots=[
            Plot(
                title=Words("Bytes of a sparse all-reduce", "稀疏 all-reduce 的字节数"),
                x=Words("density of blocks", "非零块密度"),
                y=Words("share of dense", "占稠密的比例"),
                lines={
                    "predicted": list(zip(densities, predicted, strict=True)),
                    "counted": [(d, row[0]) for d, row in zip(densities, first, strict=True)],
                },
                limit=("dense", 1.0),
            )
        ],
        table=_table(densities, predicted, first),
        notes=[
            Words(
                "in shared memory bytes are cheap, so time gains little here; between hosts at "
                "200 Mbit/s and a density "
                "of 5% this backend was 7.5 times as fast (docs/comm.md)",
                "共享内存里字节便宜，所以这里时间收益小；在 200 Mbit/s 的主机间、密度 5% 时本后"
                "端快 7.5 倍（见 docs/comm.md）",
            )
        ],
    )


def _table(
    densities: tuple[float, ...],
    predicted: list[float],
    first: list[tuple[float, int, float, float]],
) -> Table:
    return Table(
        columns=[
            Words("density", "密度"),
            Words("predicted share", "预测比例"),
            Words("counted share", "实际比例"),
            Words("sparse us", "稀疏 us"),
            Words("dense us", "稠密 us"),
        ],
        rows=[
            [density, expected, row[0], row[2], row[3]]
            for density, expected, row in zip(densities, predicted, first, strict=True)
        ],
    )


LAB = Lab(
    name="sparse-all-reduce",
    area="comm",
    title=Words("Not sending zeros", "不发送零块"),
    hypothesis=Words(
        "At density d on n ranks a block-sparse all-reduce moves about (d + 1 - (1-d)^n) / 2 "
        "of a dense one's bytes (for "
        "large n), and gives the same sums.",
        "n 个 rank、块密度 d 时，块稀疏 all-reduce 的字节数约为稠密的 (d + 1 - (1-d)^n) / 2（n "
        "较大时），且求和结果完全相同。",
    ),
    run=run,
    causes=(
        Words(
            "few blocks: the number that chance left non-zero is off its mean, and the busiest rank counts",
            "块数少：随机非零块数偏离均值，而统计的是最忙的 rank",
        ),
        Words(
            "blocks of real gradients are correlated between ranks, so their union is smaller",
            "真实梯度的非零块在各 rank 间相关，并集更小",
        ),
    ),
    code=(
        "cairn/comm/backend/sparse.py:sparse_all_reduce",
        "cairn/comm/schedule/sparse.py:sparse_all_reduce",
    ),
    reading=(
        "Efficient Sparse Collective Communication and its Application to Accelerate Distributed Deep Learning (2021)",
        "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training (2018)",
    ),
    questions=(
        Question(
            Words(
                "Where do gradients with many zero blocks come from?", "哪里会出现大量零块的梯度？"
            ),
            Words(
                "Embedding tables, of which a batch touches few rows; experts that got no "
                "token; and top-k compression.",
                "embedding 表（一个 batch 只碰到少数行）、没有 token 的专家，以及 top-k 压缩后的梯度。",
            ),
        ),
        Question(
            Words(
                "Why does the union of blocks limit the gain on many ranks?",
                "rank 多时为什么收益受限于并集？",
            ),
            Words(
                "The sum is non-zero wherever any rank was: 1 - (1-d)^n goes to 1. At d = 5% "
                "and 64 ranks 96% of the blocks "
                "come back dense.",
                "只要有一个 rank 非零，和就非零：1-(1-d)^n 趋近 1。d=5%、64 个 rank 时结果已有 96% 的块非零。",
            ),
        ),
        Question(
            Words("Why send blocks and not single elements?", "为什么按块而不是按元素发送？"),
            Words(
                "An index for each element doubles the bytes and scatters memory accesses; a "
                "bitmap of blocks of 256 costs "
                "one bit for a kilobyte and every block is a straight copy.",
                "逐元素要带索引，字节翻倍且访存分散；256 元素一块的位图每 KB 只要 1 bit，而且每块都是连续拷贝。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=4.0,
)
