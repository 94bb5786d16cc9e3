"""A ring's blocks by our attention kernels: no scores in memory. The same two functions as in `ring_blocks`.

A block's backward is the kernels' own, given the output and log-sum-exp of the whole rows instead of the block's: then
exp(score - lse) is the weight that the key has among all keys of the ring.
"""

from torch import Tensor

from cairn.kernels.attention.attention import attention, attention_gradients
from cairn.kernels.attention.attention_problem import WIDTHS, Problem, checked_problem
from cairn.models.attend import AttentionRule
from cairn.train.parallel.ring_blocks import Block


def fits(q_SHC: Tensor, v_NKC: Tensor, block: Block, rule: AttentionRule) -> bool:
    """The kernels run on a GPU, with values as wide as keys, and no window where all keys come before all queries."""
    wide = q_SHC.shape[-1] in WIDTHS and v_NKC.shape[-1] == q_SHC.shape[-1]
    return q_SHC.is_cuda and wide and (block.diagonal or not rule.window)


def forward_kernel(
    q_SHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, block: Block, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    lengths, most_q, most_k = _lengths(block)
    window = rule.window if block.diagonal else 0
    out_SHC, lse_HS = attention(
        q_SHC,
        k_NKC,
        v_NKC,
        lengths,
        max_length=most_q,
        max_length_k=most_k,
        causal=block.diagonal,
        window=window,
        softcap=rule.softcap,
        scale=rule.scale,
        return_lse=True,
    )
    return out_SHC.float(), lse_HS.t()


def backward_kernel(
    q_SHC: Tensor,
    k_NKC: Tensor,
    v_NKC: Tensor,
    g_SHC: Tensor,
    out_SHC: Tensor,
    lse_SH: Tensor,
    block: Block,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(q_SHC, k_NKC, v_NKC, block, rule)
    dq_SHC, dk_NKC, dv_NKC, _ = attention_gradients(
        g_SHC, q_SHC, k_NKC, v_NKC, None, out_SHC.contiguous(), lse_SH.t().contiguous(), problem
    )
    return dq_SHC.float(), dk_NKC.float(), dv_NKC.float()


def _problem(
    q_SHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, block: Block, rule: AttentionRule
) -> Problem:
    lengths, most_q, most_k = _lengths(block)
    window = rule.window if block.diagonal else 0
    return checked_problem(
        q_SHC,
        k_NKC,
        v_NKC,
        lengths,
        None,
        most_q,
        most_k,
        block.diagonal,
        window,
        rule.softcap,
        rule.scale,
    )


def _lengths(block: Block) -> tuple[Tensor | None, int, int]:
    """Document offsets and the maximum queries and keys of a document; None for all queries against all keys."""
    if not block.diagonal:
        return None, block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    longest = max(block.q.lengths)
    return block.q.ends_N, longest, longest
