"""Train a BPE tokenizer: what does a larger vocabulary buy, and does any text change on the way there and back?"""

from itertools import pairwise

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

SIZES = (320, 448, 640, 896)  # each 1.4 times the one before; these stories have no more


def run(bench: Workbench) -> Outcome:
    from cairn.train.data.stories import story
    from cairn.train.data.tokenizer_trainer import byte_tokenizer, train_tokenizer

    texts = [story(1, number) for number in range(bench.pick(600, 150))]
    fresh = [story(2, number) for number in range(50)] + ["naïve café 北京 \U0001f680 \t\n  x"]
    size = sum(len(text.encode()) for text in fresh)
    rows, line, lost, asked = [], [], 0, []
    for vocab in (None, *bench.pick(SIZES, SIZES[:3])):
        bench.step(f"vocabulary {vocab or 'of bytes'}")
        tokenizer = byte_tokenizer() if vocab is None else train_tokenizer(texts, vocab, fewer=True)
        coded = [tokenizer.encode(text) for text in fresh]
        lost += sum(tokenizer.decode(ids) != text for ids, text in zip(coded, fresh, strict=True))
        tokens = sum(map(len, coded))
        known = tokenizer.vocab_size
        rows.append([known, tokens, size / tokens, known * 64])
        line.append((float(known), size / tokens))
        if vocab is not None:
            asked.append((vocab, known))
    gains = [after / before for (_, before), (_, after) in pairwise(line)]
    return Outcome(
        checks=_checks(lost, asked, gains),
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


def _checks(lost: int, asked: list[tuple[int, int]], gains: list[float]) -> list[Check]:
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
            measured=max(known / vocab for vocab, known in asked),
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


LAB = Lab(
    name="tokenizer",
    area="llm",
    title=Words("Training a tokenizer", "训练分词器"),
    hypothesis=Words(
        "Byte-level BPE loses no text whatever, and a larger vocabulary packs more "
        "bytes into a token with falling returns, while the embedding grows in "
        "proportion.",
        "字节级 BPE 对任何文本都无损；词表越大每个 token 装的字节越多，但收益递减，而嵌"
        "入表按比例变大。",
    ),
    run=run,
    causes=(
        Words(
            "a corpus so small that the frequent pairs ran out before the vocabulary was full",
            "语料太小，词表未满时高频对就已用完",
        ),
        Words("text that is unlike the training text", "测试文本与训练文本差异太大"),
    ),
    code=("cairn/train/data/tokenizer_trainer.py:train_tokenizer", "cairn/models/tokenizer.py"),
    reading=(
        "Neural Machine Translation of Rare Words with Subword Units (2016)",
        "Language Models are Unsupervised Multitask Learners (2019)",
    ),
    questions=(
        Question(
            Words(
                "Why byte-level BPE rather than characters?", "为什么用字节级 BPE 而不是字符级？"
            ),
            Words(
                "256 base symbols cover every text in every script, so there is no unknown "
                "token, and frequent words still become one token.",
                "256 个基本符号覆盖任何文字，没有未知词；高频词仍会合成一个 token。",
            ),
        ),
        Question(
            Words(
                "What does a tokenizer change about the cost of serving?",
                "分词器如何影响推理成本？",
            ),
            Words(
                "Tokens per text: a tokenizer with 1.3x the bytes per token needs 1.3x fewer "
                "decode steps and KV entries, at the price of a larger head. For small models "
                "the head can be most of the weights.",
                "决定每段文本的 token 数：每 token 字节数多 1.3 倍，decode 步数与 KV 条目就少 "
                "1.3 倍，代价是更大的输出层；小模型里输出层可能占大部分参数。",
            ),
        ),
        Question(
            Words(
                "Two models have perplexity 8 and 10. Which is better?",
                "两个模型困惑度分别是 8 和 10，哪个更好？",
            ),
            Words(
                "Unknown if their tokenizers differ: perplexity is per token. Compare bits per "
                "byte.",
                "若分词器不同则无法判断：困惑度是按 token 计的，应比较每字节比特数（bits per "
                "byte）。",
            ),
        ),
    ),
    seconds=5.0,
)
