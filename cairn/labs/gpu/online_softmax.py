"""How can attention be exact without ever holding a row of scores? Softmax over blocks, joined by two numbers.

    block of keys -> (result, log-sum-exp)  --merge-->  the result over all keys, whatever the blocks were

The lab cuts the keys into blocks, attends to each of them alone and joins the parts with the function that our
kernels use for shared prefixes and rings. Then it feeds scores that overflow a naive softmax.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

HEADS, COLUMNS = 4, 64
EPSILON = 2.0**-24  # half a step of float32 next to one


def run(bench: Workbench) -> Outcome:
    import torch

    queries, keys = bench.pick((128, 2048), (64, 512))
    generator = torch.Generator().manual_seed(0)
    q_THC, k_NHC, v_NHC = (
        torch.randn(rows, HEADS, COLUMNS, generator=generator).to(bench.device)
        for rows in (queries, keys, keys)
    )
    whole = _attend(q_THC.double(), k_NHC.double(), v_NHC.double()).out_THC
    rows, errors = [], []
    for block in (keys, 512, 128, 37, 16):
        bench.step(f"attention over blocks of {block} keys")
        joined = _by_blocks(q_THC, k_NHC, v_NHC, block)
        error = float((joined.double() - whole).abs().max())
        held = queries * HEADS * min(block, keys) * 4
        rows.append([min(block, keys), -(-keys // block), held / 1024, error])
        errors.append(error)
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "largest error over all ways to cut the keys", "各种切分方式下的最大误差"
                ),
                # Sums of `keys` products, each rounded: sqrt(keys) roundings of numbers near one.
                predicted=8 * EPSILON * keys**0.5,
                measured=max(errors),
                unit="",
                kind="at_most",
            ),
            *_naive_overflows(bench),
        ],
        table=Table(
            columns=[
                Words("keys in a block", "每块的 key 数"),
                Words("merges", "合并次数"),
                Words("KiB of scores held", "同时保存的分数 KiB"),
                Words("largest error", "最大误差"),
            ],
            rows=rows,
        ),
    )


def _attend(q_THC: Any, k_NHC: Any, v_NHC: Any) -> Any:
    """Attention over some keys, with the log-sum-exp that lets it be joined with others."""
    import torch

    from cairn.kernels.attention.merge_state import State

    scores_HTN = torch.einsum("thc,nhc->htn", q_THC, k_NHC) * COLUMNS**-0.5
    lse_HT = scores_HTN.logsumexp(-1)
    weights_HTN = (scores_HTN - lse_HT[..., None]).exp()
    return State(torch.einsum("htn,nhc->thc", weights_HTN, v_NHC), lse_HT.T)


def _by_blocks(q_THC: Any, k_NHC: Any, v_NHC: Any, block: int) -> Any:
    from cairn.kernels.attention.merge_state import merge_state_reference

    state = _attend(q_THC, k_NHC[:block], v_NHC[:block])
    for first in range(block, len(k_NHC), block):
        part = slice(first, first + block)
        state = merge_state_reference(state, _attend(q_THC, k_NHC[part], v_NHC[part]))
    return state.out_THC


def _naive_overflows(bench: Workbench) -> list[Check]:
    """exp(89) is beyond float32. Without the maximum subtracted, a row with such a score is lost."""
    import torch

    bench.step("scores above 88")
    scores = torch.linspace(-100.0, 100.0, 201, device=bench.device)
    naive = scores.exp() / scores.exp().sum()
    online = (scores - scores.logsumexp(-1)).exp()
    return [
        Check(
            what=Words(
                "NaNs of a softmax that subtracts nothing", "不减最大值的 softmax 产生的 NaN"
            ),
            # Infinity over infinity: every score of which exp overflows, ln(float32 max) = 88.72.
            predicted=float(sum(s > 88.72 for s in range(-100, 101))),
            measured=float(naive.isnan().sum()),
            unit="",
        ),
        Check(
            what=Words("NaNs of the online form", "online 形式产生的 NaN"),
            predicted=0.0,
            measured=float(online.isnan().sum()),
            unit="",
        ),
    ]


LAB = Lab(
    name="online-softmax",
    area="gpu",
    title=Words("Online softmax: exact attention in blocks", "Online softmax：分块的精确注意力"),
    hypothesis=Words(
        "However the keys are cut into blocks, joining the parts by their log-sum-exps gives full attention "
        "to rounding error, while only one block of scores exists at a time.",
        "无论 key 如何切块，用 log-sum-exp 合并各块结果都等于完整注意力（只差舍入误差），"
        "而同一时刻只存在一块分数。",
    ),
    run=run,
    causes=(
        Words(
            "products ran in TF32 or bf16 instead of float32",
            "矩阵乘用了 TF32 或 bf16 而不是 float32",
        ),
        Words("a block was joined twice or left out", "某个块被重复合并或遗漏"),
    ),
    code=(
        "cairn/kernels/attention/merge_state.py:merge_state_reference",
        "cairn/kernels/attention/attention_forward.py",
        "cairn/kernels/paged/cascade.py:cascade_attention",
    ),
    reading=(
        "Online normalizer calculation for softmax (2018)",
        "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness (2022)",
    ),
    questions=(
        Question(
            Words(
                "Which two numbers per row make a partial softmax mergeable?",
                "每行保留哪两个数，就能合并部分 softmax？",
            ),
            Words(
                "The running maximum and the sum of exponentials relative to it, or both in one: the "
                "log-sum-exp. Old results are rescaled by exp(old - new).",
                "当前最大值和相对它的指数和；两者可合成一个 log-sum-exp。旧结果乘以 exp(旧 − 新) 重新缩放。",
            ),
        ),
        Question(
            Words(
                "FlashAttention does more FLOPs than plain attention in backward. Why is it faster?",
                "FlashAttention 反向的 FLOP 更多，为什么反而更快？",
            ),
            Words(
                "Plain attention writes and reads T x T scores through HBM and is bound by that traffic; "
                "recomputing the scores on chip from q and k costs FLOPs that tensor cores have to spare.",
                "普通注意力要在 HBM 中读写 T×T 的分数，受带宽限制；在片上由 q、k 重算分数只花费 Tensor Core "
                "富余的算力。",
            ),
        ),
        Question(
            Words("Where else is the same merge used?", "同样的合并还用在哪里？"),
            Words(
                "Split-K decode (keys cut over SMs), cascade attention behind a shared prefix, and ring "
                "attention, where blocks of keys arrive from other ranks.",
                "Split-K 解码（把 key 切给多个 SM）、共享前缀的 cascade attention，以及 key 块来自其他 rank "
                "的 ring attention。",
            ),
        ),
    ),
    seconds=1.5,
)
