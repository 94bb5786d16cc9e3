"""Mix three corpora 70 : 25 : 5 and drop what is there twice: is each prefix of the stream mixed as it should be?"""

import hashlib

from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

WEIGHTS = {"web": 0.70, "code": 0.25, "maths": 0.05}


def run(bench: Workbench) -> Outcome:
    import random

    from cairn.train.data.blend import Pattern

    count = bench.setting("samples", bench.pick(20_000, 4_000))
    pattern = Pattern(list(WEIGHTS.values()))
    counts = [0] * len(WEIGHTS)
    worst, drawn_worst, lines = 0.0, 0.0, {"our pattern": [], "drawn at random": []}
    dice, random_counts = random.Random(0), [0] * len(WEIGHTS)
    bench.step("walking through the stream")
    for number in range(count):
        counts[pattern.locate(number)[0]] += 1
        random_counts[dice.choices(range(len(WEIGHTS)), list(WEIGHTS.values()))[0]] += 1
        off = _furthest(counts, number + 1)
        worst, drawn_worst = max(worst, off), max(drawn_worst, _furthest(random_counts, number + 1))
        if number % (count // 100) == 0:
            lines["our pattern"].append((float(number), off))
            lines["drawn at random"].append((float(number), _furthest(random_counts, number + 1)))
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
        table=_table(counts),
        notes=[_note(drawn_worst)],
    )


def _plot(lines: Lines) -> Plot:
    return Plot(
        title=Words("How far a prefix is off its weights", "前缀与权重的偏差"),
        x=Words("samples", "样本数"),
        y=Words("samples off", "偏差（样本）"),
        lines=lines,
    )


def _table(counts: list[int]) -> Table:
    return Table(
        columns=[Words("corpus", "语料"), Words("weight", "权重"), Words("samples", "样本数")],
        rows=[
            [name, weight, count]
            for (name, weight), count in zip(WEIGHTS.items(), counts, strict=True)
        ],
    )


def _note(drawn_worst: float) -> Words:
    return Words(
        f"Drawing each sample at random was off by up to {drawn_worst:.0f} samples: the "
        f"standard deviation grows with the square root of the count.",
        f"随机抽样的偏差最多达到 {drawn_worst:.0f} 个样本：标准差随样本数的平方根增长。",
    )


def _furthest(counts: list[int], total: int) -> float:
    return max(
        abs(count - weight * total) for count, weight in zip(counts, WEIGHTS.values(), strict=True)
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


LAB = described(__file__, run)
