"""Blocks of ring attention: queries against keys, with the statistics to combine blocks.

    out = softmax(q k^T) v,   lse = log(sum(exp(q k^T)))        of a block
    two blocks:  out = (out1 * e^lse1 + out2 * e^lse2) / (e^lse1 + e^lse2)

Documents lie side by side, so two chunks of a microbatch share at most one: the one that crosses the border between
them. A block is therefore a chunk against itself (causal, with its documents), or a rectangle that sees all of itself:

    chunk 1   c c d d       chunk 2   d d d e           the d of 2 against the d of 1, and nothing else

Two forms that agree: plain torch, in float32, with window and soft-cap; and our kernels, on a GPU. No messages here.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.models.attend import AttentionRule


class Chunk(NamedTuple):
    """Consecutive tokens of a microbatch: where they stand and which documents they belong to."""

    number: int
    first: int  # index of the first token
    documents_N: Tensor
    lengths: list[int]  # tokens of each document, as far as they are in here
    low: int  # the first and the last document
    high: int
    ends_N: Tensor  # where documents begin and end in here, for the kernels: 0 and sums of `lengths`, int32

    @staticmethod
    def of(number: int, first: int, documents_N: Tensor, device: torch.device) -> "Chunk":
        numbers, counts = documents_N.unique_consecutive(return_counts=True)
        ends_N = F.pad(counts.cumsum(0), (1, 0)).int().to(device)
        low, high = int(numbers[0]), int(numbers[-1])
        return Chunk(number, first, documents_N.to(device), counts.tolist(), low, high, ends_N)

    def __len__(self) -> int:  # type: ignore[override]
        return sum(self.lengths)


class Block(NamedTuple):
    """Queries that meet keys: rows of either that take part, and how they see each other."""

    rows: slice  # of the queries' chunk
    keys: slice  # of the keys' chunk
    q: Chunk
    k: Chunk
    diagonal: bool  # a chunk against itself


def block_of(q: Chunk, k: Chunk, window: int) -> Block | None:
    """The visible block of a query chunk and a key chunk; None if nothing is visible."""
    if k.number == q.number:
        return Block(slice(0, len(q)), slice(0, len(k)), q, k, diagonal=True)
    if k.number > q.number or k.high < q.low:
        return None
    if window and q.first - (k.first + len(k) - 1) >= window:
        return None
    return Block(slice(0, q.lengths[0]), slice(len(k) - k.lengths[-1], len(k)), q, k, False)


def forward_block(
    q_SHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, block: Block, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output [S, H, C] and log-sum-exp [S, H] of the block's rows, float32."""
    scores_KGSN = _scores(q_SHC, k_NKC, block, rule)
    lse_KGS = scores_KGSN.logsumexp(-1)
    weights_KGSN = (scores_KGSN - _finite(lse_KGS)[..., None]).exp()
    out_KGSC = weights_KGSN @ _keys(v_NKC)
    return _by_token(out_KGSC), lse_KGS.flatten(0, 1).t()


def merge(out_SHC: Tensor, lse_SH: Tensor, more_SHC: Tensor, more_SH: Tensor) -> None:
    """Adds a block to what there is, in place."""
    both_SH = torch.logaddexp(lse_SH, more_SH)
    safe_SH = _finite(both_SH)
    out_SHC.mul_((lse_SH - safe_SH).exp()[..., None])
    out_SHC.add_(more_SHC * (more_SH - safe_SH).exp()[..., None])
    lse_SH.copy_(both_SH)


def backward_block(
    q_SHC: Tensor,
    k_NKC: Tensor,
    v_NKC: Tensor,
    g_SHC: Tensor,
    out_SHC: Tensor,
    lse_SH: Tensor,
    block: Block,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, float32. `out` and `lse` are those of the whole rows, not of the block."""
    groups = q_SHC.shape[1] // k_NKC.shape[1]
    delta_SH = (g_SHC.float() * out_SHC.float()).sum(-1)
    scores_KGSN = _scores(q_SHC, k_NKC, block, rule)
    lse_KGS, delta_KGS = (x.t().unflatten(0, (-1, groups)) for x in (lse_SH, delta_SH))
    weights_KGSN = (scores_KGSN - _finite(lse_KGS)[..., None]).exp()
    g_KGSC, v_K1NC = _queries(g_SHC, groups), _keys(v_NKC)
    dv_KNC = (weights_KGSN.transpose(-1, -2) @ g_KGSC).sum(1)
    ds_KGSN = weights_KGSN * (g_KGSC @ v_K1NC.transpose(-1, -2) - delta_KGS[..., None])
    if rule.softcap:  # masked scores are -inf, and their weights 0
        tanh_KGSN = (scores_KGSN / rule.softcap).nan_to_num(neginf=0.0)
        ds_KGSN = ds_KGSN * (1.0 - tanh_KGSN.square())
    ds_KGSN = ds_KGSN * rule.scale
    dq_KGSC = ds_KGSN @ _keys(k_NKC)
    dk_KNC = (ds_KGSN.transpose(-1, -2) @ _queries(q_SHC, groups)).sum(1)
    return _by_token(dq_KGSC), dk_KNC.transpose(0, 1), dv_KNC.transpose(0, 1)


def _scores(q_SHC: Tensor, k_NKC: Tensor, block: Block, rule: AttentionRule) -> Tensor:
    groups = q_SHC.shape[1] // k_NKC.shape[1]
    scores_KGSN = (_queries(q_SHC, groups) @ _keys(k_NKC).transpose(-1, -2)) * rule.scale
    if rule.softcap:
        scores_KGSN = rule.softcap * torch.tanh(scores_KGSN / rule.softcap)
    mask_SN = _mask(block, rule.window)
    return scores_KGSN if mask_SN is None else scores_KGSN.masked_fill(~mask_SN, float("-inf"))


def _mask(block: Block, window: int) -> Tensor | None:
    """Attention mask [S, N]; None if all keys are visible."""
    if not block.diagonal and not window:
        return None
    device = block.q.documents_N.device
    at_S1 = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None] + block.q.first
    at_N = torch.arange(block.keys.start, block.keys.stop, device=device) + block.k.first
    mask_SN = at_N <= at_S1
    if block.diagonal:
        mask_SN &= block.q.documents_N[:, None] == block.k.documents_N
    return mask_SN & (at_N > at_S1 - window) if window else mask_SN


def _queries(x_SHC: Tensor, groups: int) -> Tensor:
    """[K, G, S, C]: heads in groups that share a key head."""
    return x_SHC.float().transpose(0, 1).unflatten(0, (-1, groups))


def _keys(x_NKC: Tensor) -> Tensor:
    return x_NKC.float().transpose(0, 1)[:, None]  # [K, 1, N, C]


def _by_token(x_KGSC: Tensor) -> Tensor:
    return x_KGSC.flatten(0, 1).transpose(0, 1)


def _finite(lse: Tensor) -> Tensor:
    """A row that sees nothing has -inf; e^(-inf - 0) is the 0 that it counts for."""
    return lse.masked_fill(lse.isneginf(), 0.0)
