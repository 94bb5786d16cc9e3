"""Attention in five lines, three masks, and the memory that the plain form takes.

decoder: each token sees itself and the past     encoder: everything     cross: every token of another sequence
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 32


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.models.attend import AttentionRule, attention

    generator = torch.Generator().manual_seed(0)
    length = bench.size("length")
    q = torch.randn(length, HEADS, SIZE, generator=generator)
    k, v = (torch.randn(length, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    bench.step("causal, against the model's own")
    causal = torch.ones(length, length).tril().bool()
    ours = attention(q, k, v, AttentionRule(0, SIZE**-0.5))
    difference = (plain_attention(q, k, v, causal) - ours).abs().max().item()
    bench.step("a decoder's past, an encoder's future")
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[-1], changed_v[-1] = 9.0, 9.0
    past = (
        (attention(q, changed_k, changed_v, AttentionRule(0, SIZE**-0.5)) - ours)[:-1]
        .abs()
        .max()
        .item()
    )
    everything = torch.ones(length, length).bool()
    future = plain_attention(q, changed_k, changed_v, everything) - plain_attention(
        q, k, v, everything
    )
    cross = plain_attention(q, k[: length // 2], v[: length // 2], everything[:, : length // 2])
    sizes = (512, 2048, 8192, 32768)
    line = [(float(n), HEADS * n * n * 4 / 2**20) for n in sizes]
    return Outcome(
        checks=_checks(difference, past, future, length, cross),
        plots=[
            Plot(
                title=Words("Memory of the scores, four heads", "注意力分数占用的内存（4 个头）"),
                x=Words("tokens", "token 数"),
                y=Words("MiB", "MiB"),
                lines={
                    "plain": line,
                    "online softmax": [(float(n), HEADS * n * 8 / 2**20) for n in sizes],
                },
                log_x=True,
                log_y=True,
            )
        ],
        table=_table(),
    )


def _checks(
    difference: float, past: float, future: "Tensor", length: int, cross: "Tensor"
) -> list[Check]:
    return [
        Check(
            what=Words(
                "largest difference of five lines and the model's attention",
                "五行实现与模型注意力的最大差异",
            ),
            predicted=1e-5,
            measured=difference,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "decoder: change of earlier outputs when the last token changes",
                "decoder：改变最后一个 token 对之前输出的影响",
            ),
            predicted=0.0,
            measured=past,
            unit="",
        ),
        Check(
            what=Words(
                "encoder: the same change is seen by the first token",
                "encoder：第一个 token 能看到这一改变",
            ),
            predicted=1e-4,
            measured=future[0].abs().max().item(),
            unit="",
            kind="at_least",
        ),
        Check(
            what=Words(
                "cross attention: outputs, one for each query",
                "交叉注意力：每个 query 一个输出",
            ),
            predicted=length,
            measured=len(cross),
            unit="rows",
        ),
    ]


def _table() -> Table:
    return Table(
        columns=[
            Words("architecture", "架构"),
            Words("who sees whom", "可见范围"),
            Words("reusable KV cache", "可复用的 KV cache"),
        ],
        rows=[
            ["decoder-only", "earlier tokens", "yes"],
            ["encoder", "all", "no"],
            ["encoder-decoder", "earlier tokens, source", "both"],
        ],
    )


def plain_attention(q: "Tensor", k: "Tensor", v: "Tensor", sees: "Tensor") -> "Tensor":
    """softmax(q k^T / sqrt(size)) v, a group of query heads for each key head."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return (weights @ v.transpose(0, 1)).transpose(0, 1)


LAB = described(__file__, run)
