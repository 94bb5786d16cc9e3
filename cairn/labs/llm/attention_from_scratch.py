"""Attention in five lines, three masks, and the memory that the plain form takes.

decoder: each token sees itself and the past     encoder: everything     cross: every token of another sequence
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 32


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.models.attend import Rule, attention

    generator = torch.Generator().manual_seed(0)
    length = bench.pick(512, 128)
    q = torch.randn(length, HEADS, SIZE, generator=generator)
    k, v = (torch.randn(length, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    bench.step("causal, against the model's own")
    causal = torch.ones(length, length).tril().bool()
    ours = attention(q, k, v, Rule(0, SIZE**-0.5))
    difference = (plain_attention(q, k, v, causal) - ours).abs().max().item()
    bench.step("a decoder's past, an encoder's future")
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[-1], changed_v[-1] = 9.0, 9.0
    past = (attention(q, changed_k, changed_v, Rule(0, SIZE**-0.5)) - ours)[:-1].abs().max().item()
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
            ["decoder-only", "past / 过去", "yes / 是"],
            ["encoder", "all / 全部", "no / 否"],
            ["encoder-decoder", "past + source / 过去 + 源序列", "both / 两者"],
        ],
    )


def plain_attention(q: "Tensor", k: "Tensor", v: "Tensor", sees: "Tensor") -> "Tensor":
    """softmax(q k^T / sqrt(size)) v, a group of query heads for each key head."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return (weights @ v.transpose(0, 1)).transpose(0, 1)


LAB = Lab(
    name="attention-from-scratch",
    area="llm",
    title=Words(
        "Attention from scratch; decoder, encoder, cross", "从零写注意力：decoder、encoder 与 cross"
    ),
    hypothesis=Words(
        "Five lines of softmax(QK^T/√d)V with a mask equal the model's attention; a "
        "causal mask makes earlier outputs independent of later tokens, which is what "
        "allows a KV cache; an encoder's do depend on them.",
        "五行带掩码的 softmax(QKᵀ/√d)V 与模型的注意力一致；因果掩码使先前的输出与后来的"
        " token 无关，这正是 KV cache 成立的原因；encoder 则不是。",
    ),
    run=run,
    causes=(
        Words("a mask that is one off", "掩码差了一位"),
        Words("heads grouped in another order than the keys", "query 头的分组顺序与 key 不一致"),
    ),
    code=(
        "cairn/models/attend.py:attention",
        "cairn/models/transformer.py:Transformer",
        "cairn/models/experts.py:ExpertLayer",
        "cairn/labs/llm/attention_from_scratch.py:plain_attention",
    ),
    reading=(
        "Attention Is All You Need (2017)",
        "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head "
        "Checkpoints (2023)",
    ),
    questions=(
        Question(
            Words("Why divide by the root of the head size?", "为什么要除以头维度的平方根？"),
            Words(
                "The dot product of two random vectors of size d has variance d; without the "
                "division the softmax saturates and gradients vanish.",
                "两个 d 维随机向量的点积方差为 d；不除的话 softmax 会饱和，梯度消失。",
            ),
        ),
        Question(
            Words(
                "Why can a decoder cache keys and values and an encoder cannot?",
                "为什么 decoder 可以缓存 KV 而 encoder 不行？",
            ),
            Words(
                "With a causal mask what was computed for a token never changes when tokens "
                "are added; in an encoder every layer's output for every token does.",
                "有因果掩码时，新增 token 不会改变已有 token 的计算结果；在 encoder 中每一层每"
                "个 token 的输出都会变。",
            ),
        ),
        Question(
            Words(
                "What does grouping 32 query heads over 8 key heads save?",
                "32 个 query 头共享 8 个 key 头能省什么？",
            ),
            Words(
                "Three quarters of the KV cache and of the bytes read in each decode step; the "
                "FLOPs of attention stay.",
                "省四分之三的 KV cache 和每步 decode 读取的字节；注意力的 FLOP 不变。",
            ),
        ),
    ),
    seconds=1.0,
)
