"""How can attention be exact without ever holding a row of scores? Softmax over blocks, joined by two numbers.

    block of keys -> (result, log-sum-exp)  --merge-->  the result over all keys, whatever the blocks were

The lab cuts the keys into blocks, attends to each of them alone and joins the parts with the function that our
kernels use for shared prefixes and rings. Then it feeds scores that overflow a naive softmax.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

HEADS, COLUMNS = 4, 64
EPSILON = 2.0**-24  # half a step of float32 next to one


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    queries, keys = bench.pick((64, 1024), (64, 512))
    keys = bench.setting("keys", keys)
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


LAB = described(__file__, run)
