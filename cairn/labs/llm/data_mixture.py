"""Mix three corpora 70 : 25 : 5 and drop what is there twice: is each prefix of the stream mixed as it should be?"""

import hashlib

from cairn.labs.lab import Check, Lab, Lines, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

WEIGHTS = {"web": 0.70, "code": 0.25, "maths": 0.05}


def run(bench: Workbench) -> Outcome:
    import random

    from cairn.train.data.blend import Pattern

    count = bench.pick(20_000, 4_000)
    pattern = Pattern(list(WEIGHTS.values()))
    seen = [0] * len(WEIGHTS)
    worst, drawn_worst, lines = 0.0, 0.0, {"our pattern": [], "drawn at random": []}
    dice, drawn = random.Random(0), [0] * len(WEIGHTS)
    bench.step("walking through the stream")
    for number in range(count):
        seen[pattern.locate(number)[0]] += 1
        drawn[dice.choices(range(len(WEIGHTS)), list(WEIGHTS.values()))[0]] += 1
        off = _furthest(seen, number + 1)
        worst, drawn_worst = max(worst, off), max(drawn_worst, _furthest(drawn, number + 1))
        if number % (count // 100) == 0:
            lines["our pattern"].append((float(number), off))
            lines["drawn at random"].append((float(number), _furthest(drawn, number + 1)))
    kept, planted, documents = _without_copies(bench.pick(3000, 600))
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "samples by which any prefix is off its weights", "任意前缀偏离权重的样本数"
                ),
                predicted=2.0,
                measured=worst,
                unit="samples",
                kind="at_most",
            ),
            Check(
                what=Words(
                    "documents left after exact copies were dropped", "去除完全重复后剩下的文档"
                ),
                predicted=documents - planted,
                measured=kept,
                unit="documents",
            ),
        ],
        plots=[_plot(lines)],
        table=_table(seen),
        notes=[_note(drawn_worst)],
    )


def _plot(lines: Lines) -> Plot:
    return Plot(
        title=Words("How far a prefix is off its weights", "前缀与权重的偏差"),
        x=Words("samples", "样本数"),
        y=Words("samples off", "偏差（样本）"),
        lines=lines,
    )


def _table(seen: list[int]) -> Table:
    return Table(
        columns=[Words("corpus", "语料"), Words("weight", "权重"), Words("samples", "样本数")],
        rows=[
            [name, weight, got] for (name, weight), got in zip(WEIGHTS.items(), seen, strict=True)
        ],
    )


def _note(drawn_worst: float) -> Words:
    return Words(
        f"Drawing each sample at random was off by up to {drawn_worst:.0f} samples: the "
        f"standard deviation grows with the square root of the count.",
        f"随机抽样的偏差最多达到 {drawn_worst:.0f} 个样本：标准差随样本数的平方根增长。",
    )


def _furthest(seen: list[int], total: int) -> float:
    return max(
        abs(got - weight * total) for got, weight in zip(seen, WEIGHTS.values(), strict=True)
    )


def _without_copies(count: int) -> tuple[int, int, int]:
    """Stories with every tenth planted again, spaced differently; a hash of the bare words finds them."""
    from cairn.train.data.stories import story

    documents = [story(3, number) for number in range(count)]
    originals = {_fingerprint(text) for text in documents}
    planted = ["  ".join(text.split(" ")).upper() for text in documents[::10]]
    everything = documents + planted
    left = {_fingerprint(text) for text in everything}
    return len(left), len(planted) + count - len(originals), len(everything)


def _fingerprint(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=16).digest()


LAB = Lab(
    name="data-mixture",
    area="llm",
    title=Words("Cleaning, mixture, curriculum", "数据清洗、配比与课程"),
    hypothesis=Words(
        "A deterministic pattern keeps every prefix of the training stream within two "
        "samples of its weights, where random draws wander off by the square root of "
        "the count; and hashing normalised text finds exactly the planted copies.",
        "确定性的混合模式使训练流的任意前缀与权重相差不超过两个样本，而随机抽样的偏差随"
        "样本数平方根增长；对规范化文本做哈希能恰好找出植入的重复。",
    ),
    run=run,
    causes=(
        Words("weights that whole parts cannot express exactly", "权重无法用整数份精确表示"),
        Words("two different documents with the same words", "两篇不同文档恰好用词相同"),
    ),
    code=(
        "cairn/train/data/blend.py:Pattern",
        "cairn/train/data/shuffle.py",
        "cairn/train/data/stories.py:story",
    ),
    reading=(
        "The Pile: An 800GB Dataset of Diverse Text for Language Modeling (2020)",
        "Deduplicating Training Data Makes Language Models Better (2022)",
        "DoReMi: Optimizing Data Mixtures Speeds Up Language Model Pretraining (2023)",
    ),
    questions=(
        Question(
            Words(
                "Why must the mixture be exact for every prefix and not only on average?",
                "为什么配比要对任意前缀精确，而不仅仅是平均？",
            ),
            Words(
                "A run may stop, resume on other ranks, or change its blend at any step; with "
                "a pure function of the sample number each of these sees the same stream, and "
                "rare sources are not missing for thousands of steps.",
                "训练可能在任何一步停止、换 rank 恢复或改变配比；若混合是样本编号的纯函数，这些"
                "情况都看到同一个数据流，稀有语料也不会几千步都不出现。",
            ),
        ),
        Question(
            Words("What does deduplication change?", "去重改变了什么？"),
            Words(
                "Copies are trained on more often than their weight says, are memorised and "
                "leak into the evaluation; removing them lowers memorisation and usually the "
                "loss at equal tokens.",
                "重复内容的实际训练次数超过其权重，会被背下来并泄漏到评测；去掉后记忆减少，在同"
                "样 token 数下损失通常更低。",
            ),
        ),
        Question(
            Words(
                "What is a curriculum in this picture?", "在这个框架里，课程（curriculum）是什么？"
            ),
            Words(
                "Weights that change with the step: for instance web text first, mathematics "
                "and code with a higher weight while the learning rate falls.",
                "随步数变化的权重：例如先用网页文本，在学习率下降阶段提高数学与代码的比例。",
            ),
        ),
    ),
    seconds=3.0,
)
