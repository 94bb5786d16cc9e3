"""How good is a model, and how sure are we? Bits per byte against a packer, and the error bar of a score.

random weights: loss = ln(vocabulary)      accuracy p over n questions: standard error sqrt(p (1 - p) / n)
"""

import math
import zlib
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.models.transformer import Transformer


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    untrained = _tiny.build(_tiny.small_spec())
    with torch.no_grad():
        start = _tiny.answer_loss(untrained, _tiny.all_sums()).item()
    bench.step("cairn-tiny reads stories")
    packed, ours = bits_per_byte(bench.pick(24, 6))
    spread, predicted = _bootstrap(bench.pick(4000, 800))
    return Outcome(
        checks=[*_losses(start, packed, ours), _error_bar(predicted, spread)],
        table=Table(
            columns=[Words("reader", "读者"), Words("bits per byte", "每字节比特")],
            rows=[["uniform", 8.0], ["zlib -9", packed], ["cairn-tiny", ours]],
        ),
        notes=[
            Words(
                "70% of 100 questions means 70 ± 9 points at 95%: two models that are 3 points "
                "apart cannot be told apart by it.",
                "100 题中 70% 意味着 95% 置信区间约 70 ± 9 分：相差 3 分的两个模型无法用它区分。",
            )
        ],
    )


def bits_per_byte(stories: int) -> tuple[float, float]:
    """Of fresh stories, packed by zlib, and as the shipped model guesses them."""
    from cairn.models.runnable import open_model
    from cairn.train.data.stories import story

    opened = open_model("cairn-tiny")
    model, tokenizer = opened.load(device="cpu", dtype="float32").model, opened.tokenizer
    if tokenizer is None:
        raise RuntimeError("the shipped model has lost its tokenizer")
    texts = [story(99, number) for number in range(stories)]
    size = sum(len(text.encode()) for text in texts)
    packed = 8 * len(zlib.compress("\n".join(texts).encode(), 9))
    return packed / size, sum(_bits(model, tokenizer.encode(text)) for text in texts) / size


def _losses(start: float, packed: float, ours: float) -> list[Check]:
    return [
        Check(
            what=Words(
                "loss of an untrained model: ln of the vocabulary",
                "未训练模型的损失：词表大小的 ln",
            ),
            predicted=math.log(_tiny.VOCABULARY),
            measured=start,
            unit="nats",
            within=0.15,
        ),
        Check(
            what=Words(
                "bits per byte of cairn-tiny on fresh stories, against zlib",
                "cairn-tiny 在新故事上的每字节比特数，对比 zlib",
            ),
            predicted=packed,
            measured=ours,
            unit="bits/byte",
            kind="at_most",
        ),
    ]


def _error_bar(predicted: float, spread: float) -> Check:
    return Check(
        what=Words("standard error of 70% right answers of 100", "100 题答对 70% 时的标准误"),
        predicted=predicted,
        measured=spread,
        unit="",
        within=0.1,
    )


def _bits(model: "Transformer", tokens: list[int]) -> float:
    """What it takes to write the text down when this model guesses the next token."""
    import torch

    from cairn.models.attend import PackedDocuments
    from cairn.train.objective import token_losses

    row = torch.tensor(tokens)
    attend = PackedDocuments([len(tokens)])
    with torch.no_grad():
        scores = model.logits(model(row, attend.positions_T(), attend))
    first = math.log2(scores.shape[-1])  # nothing was read before the first token
    return token_losses(scores[:-1], row[1:]).sum().item() / math.log(2) + first


def _bootstrap(rounds: int, share: float = 0.7, count: int = 100) -> tuple[float, float]:
    import random

    dice = random.Random(0)
    answers = [1] * int(share * count) + [0] * (count - int(share * count))
    scores = [sum(dice.choices(answers, k=count)) / count for _ in range(rounds)]
    mean = sum(scores) / rounds
    spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / (rounds - 1))
    return spread, math.sqrt(share * (1 - share) / count)


LAB = described(__file__, run)
