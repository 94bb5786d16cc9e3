"""Train a BPE tokenizer: what does a larger vocabulary buy, and does any text change on the way there and back?"""

from itertools import pairwise

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

SIZES = (320, 448, 640, 896)  # each 1.4 times the one before; these stories have no more


def run(bench: Workbench) -> Outcome:
    from cairn.train.data.stories import story
    from cairn.train.data.tokenizer_trainer import byte_tokenizer, train_tokenizer

    texts = [story(1, number) for number in range(bench.setting("stories", bench.pick(600, 150)))]
    fresh = [story(2, number) for number in range(50)] + ["naïve café 北京 \U0001f680 \t\n  x"]
    size = sum(len(text.encode()) for text in fresh)
    rows, line, lost, sizes = [], [], 0, []
    for vocab in (None, *bench.pick(SIZES, SIZES[:3])):
        bench.step(f"vocabulary {vocab or 'of bytes'}")
        tokenizer = byte_tokenizer() if vocab is None else train_tokenizer(texts, vocab, fewer=True)
        coded = [tokenizer.encode(text) for text in fresh]
        lost += sum(tokenizer.decode(ids) != text for ids, text in zip(coded, fresh, strict=True))
        tokens = sum(map(len, coded))
        learned = tokenizer.vocab_size
        rows.append([learned, tokens, size / tokens, learned * 64])
        line.append((float(learned), size / tokens))
        if vocab is not None:
            sizes.append((vocab, learned))
    gains = [after / before for (_, before), (_, after) in pairwise(line)]
    return Outcome(
        checks=_checks(lost, sizes, gains),
        plots=[
            Plot(
                title=Words("Bytes per token", "每 token 字节数"),
                x=Words("vocabulary", "词表大小"),
                y=Words("bytes per token", "字节/token"),
                lines={"stories": line},
            )
        ],
        table=Table(
            columns=[
                Words("vocabulary", "词表"),
                Words("tokens", "token 数"),
                Words("bytes per token", "字节/token"),
                Words("embedding of width 64", "宽 64 的嵌入参数"),
            ],
            rows=rows,
        ),
    )


def _checks(lost: int, sizes: list[tuple[int, int]], gains: list[float]) -> list[Check]:
    return [
        Check(
            what=Words("texts changed by encode and decode", "编码再解码后发生变化的文本数"),
            predicted=0,
            measured=lost,
            unit="texts",
        ),
        Check(
            what=Words(
                "the size of the vocabulary stays within what was asked",
                "词表大小不超过所要求的",
            ),
            predicted=1.0,
            measured=max(learned / vocab for vocab, learned in sizes),
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words(
                "bytes per token grow with each larger vocabulary",
                "词表每增大一次，每 token 字节数都增加",
            ),
            predicted=1.1,
            measured=min(gains),
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words(
                "gain of a step over that of the one before, at most",
                "一步的收益与前一步之比（最多）",
            ),
            predicted=1.0,
            measured=max(later / earlier for earlier, later in pairwise(gains)),
            unit="x",
            kind="at_most",
        ),
    ]


LAB = described(__file__, run)
