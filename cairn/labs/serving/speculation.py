"""Can several tokens come out of one pass without changing a single one of them?

The shipped model continues a text with repetitions; guesses come from the text itself (prompt lookup), and one pass
over them costs little more than one token, because decode reads the same weights either way.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._speculate import Told, expected_tokens, keep, speculate
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Generator

TEXT = (
    "Tom has a red ball. Ann has a red ball. Tom has a blue ball. Ann has a blue ball. Tom has a green ball. Ann "
    "has a green ball. Tom has a"
)


@one_thread()
def run(bench: Workbench) -> Outcome:
    from cairn.models.runnable import open_model

    bench.step("loading cairn-tiny")
    opened = open_model("cairn-tiny")
    model = opened.load("cpu", "float32").model
    assert opened.tokenizer is not None
    prompt = opened.tokenizer.encode(TEXT)
    count = bench.pick(64, 32)
    bench.step("plain decoding")
    plain = speculate(model, prompt, count, 0)
    told = {}
    for most in bench.pick((1, 2, 4, 8), (1, 4)):
        bench.step(f"up to {most} guesses a pass")
        told[most] = speculate(model, prompt, count, most)
    measured = [(float(most), per_pass(one)) for most, one in told.items()]
    foreseen = [(float(most), foreseen_per_pass(told[1], most)) for most in told]
    return Outcome(
        checks=[
            *_checks(plain, told[4], dict(foreseen)[4.0]),
            _sampled(bench.pick(20_000, 5_000)),
        ],
        plots=[
            Plot(
                title=Words("Tokens of one pass", "每次前向的 token 数"),
                x=Words("guesses a pass", "每次猜测数"),
                y=Words("tokens", "token 数"),
                lines={"measured": measured, "1 + a + a^2 + ...": foreseen},
            )
        ],
        table=_table(plain, told),
    )


def per_pass(told: Told) -> float:
    """Tokens of a pass; the prompt's own gives one and is not counted."""
    return (len(told.tokens) - 1) / (told.passes - 1)


def foreseen_per_pass(single: Told, most: int) -> float:
    """From single guesses: how often there was something to guess, and how often it was right."""
    alpha = single.accepted / max(single.guessed, 1)
    share = single.guessed / (single.passes - 1)
    return 1 - share + share * expected_tokens(alpha, most)


def _checks(plain: Told, four: Told, foreseen: float) -> list[Check]:
    return [
        Check(
            what=Words("tokens that differ from plain decoding", "与普通解码不同的 token 数"),
            predicted=0,
            measured=sum(a != b for a, b in zip(four.tokens, plain.tokens, strict=True)),
            unit="tokens",
        ),
        Check(
            what=Words(
                "tokens a pass with four guesses, from the acceptance of single ones",
                "每次前向得到的 token 数（4 个猜测），由单个猜测的接受率预测",
            ),
            predicted=foreseen,
            measured=per_pass(four),
            unit="tokens",
            within=0.3,
        ),
    ]


def _sampled(trials: int) -> Check:
    import torch

    return Check(
        what=Words(
            "distance of sampled tokens to the target's distribution",
            "采样结果与目标分布的总变差距离",
        ),
        predicted=0.03,
        measured=_distance(torch.Generator().manual_seed(5), trials),
        unit="",
        kind="at_most",
    )


def _table(plain: Told, told: dict[int, Told]) -> Table:
    return Table(
        columns=[
            Words("guesses", "猜测数"),
            Words("passes", "前向次数"),
            Words("accepted", "接受率"),
            Words("tokens a pass", "每次前向 token 数"),
            Words("same text", "文本相同"),
        ],
        rows=[
            [
                most,
                one.passes,
                one.accepted / max(one.guessed, 1),
                per_pass(one),
                "yes" if one.tokens == plain.tokens else "no",
            ]
            for most, one in {0: plain, **told}.items()
        ],
    )


def _distance(draw: "Generator", trials: int) -> float:
    """Half the summed difference between what `keep` gives, with a bad draft, and the target."""
    import torch

    target_V = torch.tensor([0.5, 0.25, 0.15, 0.1])
    draft_V = torch.tensor([0.1, 0.2, 0.3, 0.4])
    guesses = torch.multinomial(draft_V, trials, replacement=True, generator=draw).tolist()
    chances = torch.rand(trials, 2, generator=draw).tolist()
    found_V = torch.zeros(4)
    for token, (chance, again) in zip(guesses, chances, strict=True):
        found_V[keep(draft_V, target_V, token, chance, again)] += 1 / trials
    return float((found_V - target_V).abs().sum() / 2)


LAB = Lab(
    name="speculation",
    area="serving",
    title=Words("Speculative decoding: guess, then check", "投机解码：先猜后验"),
    hypothesis=Words(
        "Guessing changes no token; a pass yields 1 + a + ... + a^k tokens when a single guess is right with chance "
        "a; and with the right acceptance rule a sampled token has the target's distribution even if the draft is "
        "bad.",
        "猜测不改变任何 token；若单个猜测以概率 a 正确，则每次前向产出 1 + a + ... + a^k 个 token；用正确的接受规则，"
        "即使草稿很差，采样分布也等于目标分布。",
    ),
    run=run,
    causes=(
        Words(
            "guesses are not independent: in a repetition all are right, elsewhere all are wrong",
            "猜测之间不独立：重复处全对，其他处全错",
        ),
        Words("a short text: few passes decide the rate", "文本太短，样本太少"),
    ),
    code=(
        "cairn/labs/serving/_speculate.py:speculate",
        "cairn/models/attend.py:Cached",
        "cairn/models/generate.py:Generation",
    ),
    reading=(
        "Fast Inference from Transformers via Speculative Decoding (2023)",
        "Accelerating Large Language Model Decoding with Speculative Sampling (2023)",
    ),
    questions=(
        Question(
            Words(
                "Why does checking k guesses cost about as much as one token?",
                "为什么验证 k 个猜测和生成一个 token 的代价差不多？",
            ),
            Words(
                "At small batch a pass is bound by reading the weights once; k + 1 rows instead of one stay left of "
                "the ridge. At large batch the arithmetic is busy and speculation stops paying.",
                "小批量时一次前向受读权重限制，k+1 行仍在拐点左侧。大批量时算力已满，投机就不划算。",
            ),
        ),
        Question(
            Words(
                "When is prompt lookup the right draft?", "什么时候适合用 prompt lookup 作草稿？"
            ),
            Words(
                "When answers repeat their input: editing code, summaries, extraction, JSON. It costs nothing; for "
                "free text a small draft model or extra heads accept more.",
                "输出大量重复输入时：改代码、摘要、抽取、JSON。它几乎零成本；自由文本则小草稿模型或额外的头接"
                "受率更高。",
            ),
        ),
        Question(
            Words(
                "What happens to the KV cache of a guess that was wrong?",
                "猜错的 token 写入的 KV 怎么办？",
            ),
            Words(
                "The sequence's length is set back to the last right token, and the next pass writes over it; "
                "nothing is copied.",
                "把序列长度退回到最后一个正确的 token，下一次前向直接覆盖，不需要拷贝。",
            ),
        ),
    ),
    seconds=5.0,
)
