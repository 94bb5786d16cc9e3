"""Texts of many lengths become vectors: how much of a batch is padding, and does packing change a vector?

    padded   [text one ......][pad]      every text is as long as the longest of its batch
             [two][pad ...........]
    packed   [text one ......][two]      tokens side by side; attention keeps texts apart

The real queue makes the batches by a budget of tokens, and the real encoder computes both forms.
"""

import random
from typing import NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.encoder.spec import EncoderSpec
from cairn.models.spec import ModelSpec

SPEC = EncoderSpec(
    ModelSpec(
        family="bert",
        vocab=512,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=4,
        head_dim=16,
        intermediate=128,
        context=512,
        tied=True,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        activation="gelu",
        positions="learned",
    ),
    token_types=2,
)
BUDGETS = (512, 1024, 2048, 4096, 8192)


class Waiting(NamedTuple):
    """A text in the queue; it has a number in place of words."""

    number: int
    tokens: int
    priority: int = 0


def batches_of(lengths: list[int], budget: int) -> list[list[int]]:
    """Lengths of the texts of each batch, as the server's queue makes them."""
    from cairn.serve.encoder_batch import TextQueue

    queue: TextQueue[Waiting] = TextQueue()
    for number, length in enumerate(lengths):
        queue.add(Waiting(number, length))
    batches = []
    while len(queue):
        batches.append([text.tokens for text in queue.take(budget, 10_000)])
    return batches


def padded_tokens(batches: list[list[int]]) -> int:
    """What is computed where every text is as long as the longest of its batch."""
    return sum(len(batch) * max(batch) for batch in batches)


def largest_difference(lengths: list[int]) -> float:
    """Between the vectors of texts that are packed into one batch, and of each alone."""
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.encoder.attend import Bidirectional
    from cairn.models.encoder.model import Encoder
    from cairn.models.encoder.pool import pooled
    from cairn.models.weights import fill_random

    model = Encoder(SPEC, ModelBuild("meta", torch.float32, fused=True))
    fill_random(model, model.slots(), torch.device("cpu"), 0)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, SPEC.shape.vocab, (length,), generator=draw) for length in lengths]

    def vectors(batch: list[torch.Tensor]) -> torch.Tensor:
        attend = Bidirectional([len(text) for text in batch])
        hidden_TD = model(torch.cat(batch), attend.positions_T(), attend)
        return pooled(hidden_TD, attend.lengths, ["mean"] * len(batch))

    with torch.inference_mode():
        together, alone = vectors(texts), torch.cat([vectors([text]) for text in texts])
    return float((together - alone).abs().max())


@one_thread()
def run(bench: Workbench) -> Outcome:
    draw = random.Random(5)
    # Tokens of prompts of chats: log-normal around 60, with a long tail.
    lengths = [min(512, max(3, int(draw.lognormvariate(4.1, 0.9)))) for _ in range(2048)]
    total = sum(lengths)
    rows: list[list[str | float | int]] = []
    line = []
    for budget in BUDGETS:
        bench.step(f"batches of {budget} tokens")
        batches = batches_of(lengths, budget)
        ratio = padded_tokens(batches) / total
        line.append((float(budget), ratio))
        rows.append([budget, len(batches), total, padded_tokens(batches), ratio])
    bench.step("packed and alone")
    difference = largest_difference([40, 3, 120, 7])
    packed = sum(map(sum, batches_of(lengths, 2048)))
    return Outcome(
        checks=_checks(lengths, dict(line), packed, difference),
        plots=[
            Plot(
                title=Words(
                    "Tokens computed with padding, over those of the texts",
                    "带填充时计算的 token 与文本 token 之比",
                ),
                x=Words("budget of a batch, tokens", "每批 token 预算"),
                y=Words("x", "倍"),
                lines={"padded": line},
                log_x=True,
                limit=("packed", 1.0),
            )
        ],
        table=Table(
            columns=[
                Words("budget", "预算"),
                Words("batches", "批数"),
                Words("tokens, packed", "紧凑 token 数"),
                Words("tokens, padded", "填充后 token 数"),
                Words("ratio", "比值"),
            ],
            rows=rows,
        ),
    )


def _checks(
    lengths: list[int], ratios: dict[float, float], packed: int, difference: float
) -> list[Check]:
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    return [
        Check(
            what=Words("tokens computed with packed batches", "紧凑批次计算的 token 数"),
            predicted=sum(lengths),
            measured=packed,
            unit="tokens",
        ),
        Check(
            what=Words(
                "padding of large batches: the longest text over the mean",
                "大批次的填充倍数：最长文本比平均长度",
            ),
            predicted=longest / mean,
            measured=ratios[8192.0],
            unit="x",
            within=0.2,
        ),
        Check(
            what=Words(
                "padding of small batches is less than that of large ones", "小批次的填充少于大批次"
            ),
            predicted=ratios[8192.0],
            measured=ratios[512.0],
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words(
                "largest difference of a vector, packed or alone", "紧凑与单独计算的向量最大差异"
            ),
            predicted=1e-5,
            measured=difference,
            unit="",
            kind="at_most",
        ),
    ]


LAB = described(__file__, run)
