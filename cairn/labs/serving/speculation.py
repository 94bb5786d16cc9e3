"""Can several tokens come out of one pass without changing a single one of them?

The shipped model continues a text with repetitions; guesses come from the text itself (prompt lookup), and one pass
over them costs little more than one token, because decode reads the same weights either way.
"""

from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._speculate import Decoding, expected_tokens, keep, speculate
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Generator

    from cairn.models.runnable import OpenModel

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
    by_drafts = {}
    for most in bench.pick((1, 2, 4, 8), (1, 4)):
        bench.step(f"up to {most} guesses a pass")
        by_drafts[most] = speculate(model, prompt, count, most)
    measured = [(float(most), per_pass(one)) for most, one in by_drafts.items()]
    foreseen = [(float(most), foreseen_per_pass(by_drafts[1], most)) for most in by_drafts]
    bench.step("the same through the engine")
    served = {most: serve(opened, prompt, count, most) for most in (1, 4)}
    return Outcome(
        checks=[
            *_checks(plain, by_drafts[4], dict(foreseen)[4.0]),
            *_served_checks(plain, served),
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
        table=_table(plain, by_drafts),
    )


class Served(NamedTuple):
    """What the engine made of the prompt with its own n-gram drafter."""

    tokens: list[int]
    length: float  # tokens of a step that verified drafts
    rate: float  # of drafts that were tried, those that held


def serve(opened: "OpenModel", prompt: list[int], count: int, most: int) -> Served:
    from cairn.labs.serving._engine import ask
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start_with

    config = EngineConfig(
        model="cairn-tiny",
        device="cpu",
        weights="float",
        num_gpu_blocks_override=64,
        speculate="ngram",
        draft_tokens=most,
    )
    engine = start_with(opened, opened.load("cpu", "float32"), config, sole=True).engine
    request = ask(0, prompt, count)
    engine.add(request)
    engine.run()
    assert engine.scheduler.speculation is not None
    counts = engine.scheduler.speculation.counts
    return Served(request.outputs, counts.length, counts.accepted / max(counts.drafted, 1))


def _served_checks(plain: Decoding, served: dict[int, Served]) -> list[Check]:
    """From the acceptance of single drafts, the length of a run of four."""
    return [
        Check(
            what=Words(
                "tokens of the engine with drafts that differ from plain decoding",
                "引擎使用草稿时与普通解码不同的 token 数",
            ),
            predicted=0,
            measured=sum(a != b for a, b in zip(served[4].tokens, plain.tokens, strict=True)),
            unit="tokens",
        ),
        Check(
            what=Words(
                "tokens of an engine step that verifies four drafts, from single ones",
                "引擎一步验证 4 个草稿得到的 token 数，由单个草稿的接受率预测",
            ),
            predicted=expected_tokens(served[1].rate, 4),
            measured=served[4].length,
            unit="tokens",
            within=0.3,
        ),
    ]


def per_pass(decoding: Decoding) -> float:
    """Tokens of a pass; the prompt's own gives one and is not counted."""
    return (len(decoding.tokens) - 1) / (decoding.passes - 1)


def foreseen_per_pass(single: Decoding, most: int) -> float:
    """From single guesses: how often there was something to guess, and how often it was right."""
    alpha = single.accepted / max(single.guessed, 1)
    share = single.guessed / (single.passes - 1)
    return 1 - share + share * expected_tokens(alpha, most)


def _checks(plain: Decoding, four: Decoding, foreseen: float) -> list[Check]:
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


def _table(plain: Decoding, by_drafts: dict[int, Decoding]) -> Table:
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
            for most, one in {0: plain, **by_drafts}.items()
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


LAB = described(__file__, run)
