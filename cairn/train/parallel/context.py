"""Context parallel: every rank some tokens of each sequence; keys and values travel.

    Ring      keys and values go round the ring; each rank adds up what its queries see of them (arXiv:2310.01889)
    Ulysses   tokens are exchanged for heads: each rank sees all tokens of some heads (arXiv:2309.14509)

Under a causal mask the last tokens see most. So that all ranks have the same work, a ring cuts the tokens into 2 * cp
chunks and gives each rank one from the front and one from the back:

    cp 2     rank 0: chunks 0 3      rank 1: chunks 1 2

Both are an `Attend`: the model does not know. Documents are those of the whole microbatch; a token sees its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.attend import Attend, AttentionRule, PackedDocuments
from cairn.train.parallel.collectives import all_to_all, size_of
from cairn.train.parallel.layout import Attention
from cairn.train.parallel.mesh import Group
from cairn.train.parallel.ring_blocks import (
    Block,
    Chunk,
    backward_block,
    block_of,
    forward_block,
    merge,
)
from cairn.train.parallel.ring_kernels import backward_kernel, fits, forward_kernel
from cairn.train.shared_prefix_attention import Prefixed

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch


def chunks_of(rank: int, size: int, kind: Attention) -> list[int]:
    """Token chunks of a rank, in order."""
    return [rank, 2 * size - 1 - rank] if kind == "ring" else [rank]


def indices(tokens: int, rank: int, size: int, kind: Attention) -> Tensor:
    """Indices of a rank's tokens in the microbatch."""
    count = 2 * size if kind == "ring" else size
    if tokens % count:
        raise ConfigError(
            f"{tokens} tokens of a microbatch % {count} = {tokens % count}, with cp {size} and {kind}",
            hint=f"make the tokens of a microbatch a multiple of {count}",
        )
    width = tokens // count
    spans = [torch.arange(c * width, (c + 1) * width) for c in chunks_of(rank, size, kind)]
    return torch.cat(spans)


def local_batch(batch: "Batch", group: Group, kind: Attention) -> "Batch":
    """This rank's tokens and their streams; `lengths` and `cu_seqlens` stay those of the whole microbatch."""
    if group is None:
        return batch
    rank, size = dist.get_rank(group), size_of(group)
    here_T = indices(len(batch.tokens_T), rank, size, kind).to(batch.tokens_T.device)
    return batch.at(here_T)


class Ring:
    """Ring attention of a microbatch."""

    def __init__(self, group: Group, lengths: Sequence[int], device: torch.device | str) -> None:
        self.group, self.lengths, self.device = group, list(lengths), torch.device(device)
        self.rank, self.size = dist.get_rank(group), size_of(group)
        tokens = sum(self.lengths)
        width = tokens // (2 * self.size)
        counts = torch.tensor(self.lengths)
        documents_T = torch.arange(len(self.lengths)).repeat_interleave(counts)
        self._chunks = [
            Chunk.of(c, c * width, documents_T[c * width : (c + 1) * width], self.device)
            for c in range(2 * self.size)
        ]

    def chunks(self, rank: int) -> list[Chunk]:
        return [self._chunks[c] for c in chunks_of(rank, self.size, "ring")]

    def lengths_T(self) -> Tensor:
        here = torch.cat([chunk.documents_N for chunk in self.chunks(self.rank)])
        return torch.tensor(self.lengths, device=self.device)[here]

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        return _RingAttention.apply(q_THC, k_TKC, v_TKC, rule.sinks_H, self, rule)

    def exchange(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts to pass tensors to the next rank; the call that is returned waits for the previous one's."""
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        previous = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        tensors = [x.contiguous() for x in tensors]
        coming = [torch.empty_like(x) for x in tensors]
        ops = []
        for leaving, arriving in zip(tensors, coming, strict=True):
            ops.append(dist.P2POp(dist.isend, leaving, following, self.group))
            ops.append(dist.P2POp(dist.irecv, arriving, previous, self.group))
        handles = dist.batch_isend_irecv(ops)

        def wait() -> list[Tensor]:
            for handle in handles:
                handle.wait()
            del tensors[:]  # they had to live until now
            return coming

        return wait


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        sinks_H: Tensor | None,
        ring: Ring,
        rule: AttentionRule,
    ) -> Tensor:
        kv = [k_TKC, v_TKC]  # of latent attention, keys are wider than values
        out_THC = v_TKC.new_zeros(*q_THC.shape[:2], v_TKC.shape[-1], dtype=torch.float32)
        lse_TH = torch.full(q_THC.shape[:2], float("-inf"), device=q_THC.device)
        for step in range(ring.size):
            arrival = ring.exchange(kv) if step + 1 < ring.size else None
            for rows, keys, block in _meetings(ring, step, rule.window):
                form = forward_kernel if fits(q_THC, kv[1], block, rule) else forward_block
                more = form(q_THC[rows], kv[0][keys], kv[1][keys], block, rule)
                merge(out_THC[rows], lse_TH[rows], *more)
            if arrival is not None:
                kv = arrival()
        if sinks_H is not None:  # one more key of every row, which no value belongs to
            merge(out_THC, lse_TH, torch.zeros_like(out_THC), sinks_H.float().expand_as(lse_TH))
        out_THC = out_THC.to(q_THC.dtype)
        ctx.save_for_backward(q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_TH)
        ctx.ring, ctx.rule = ring, rule
        return out_THC

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of keys and values travel with them, one step behind, and come home one step later.

        They are waited for when the gradients of the next blocks are there to be added, so that both ways overlap.
        """
        q_THC, k_TKC, v_TKC, sinks_H, out_THC, lse_TH = ctx.saved_tensors
        ring, rule, (g_THC,) = ctx.ring, ctx.rule, gradients
        kv = [k_TKC, v_TKC]
        dq_THC = torch.zeros_like(q_THC, dtype=torch.float32)
        coming: Callable[[], list[Tensor]] | None = None
        for step in range(ring.size):
            arrival = ring.exchange(kv) if step + 1 < ring.size else None
            dkv = [torch.zeros_like(x, dtype=torch.float32) for x in kv]
            for rows, keys, block in _meetings(ring, step, rule.window):
                form = backward_kernel if fits(q_THC, kv[1], block, rule) else backward_block
                dq, dk, dv = form(
                    q_THC[rows],
                    kv[0][keys],
                    kv[1][keys],
                    g_THC[rows],
                    out_THC[rows],
                    lse_TH[rows],
                    block,
                    rule,
                )
                dq_THC[rows] += dq
                dkv[0][keys] += dk
                dkv[1][keys] += dv
            if coming is not None:
                dkv = [own.add_(before) for own, before in zip(dkv, coming(), strict=True)]
            coming = ring.exchange(dkv)
            if arrival is not None:
                kv = arrival()
        assert coming is not None
        dkv = coming()
        dtype, d_sinks_H = q_THC.dtype, _sinks_gradient(sinks_H, g_THC, out_THC, lse_TH)
        return dq_THC.to(dtype), dkv[0].to(dtype), dkv[1].to(dtype), d_sinks_H, None, None


def _sinks_gradient(
    sinks_H: Tensor | None, g_THC: Tensor, out_THC: Tensor, lse_TH: Tensor
) -> Tensor | None:
    if sinks_H is None:
        return None
    share_TH = (sinks_H.float() - lse_TH).exp()
    delta_TH = (g_THC.float() * out_THC.float()).sum(-1)
    return -(share_TH * delta_TH).sum(0).to(sinks_H.dtype)


def _meetings(ring: Ring, step: int, window: int) -> Iterator[tuple[slice, slice, Block]]:
    """My two chunks of queries against the two chunks of keys that are here in this step: local rows of each."""
    for i, q in enumerate(ring.chunks(ring.rank)):
        for j, k in enumerate(ring.chunks((ring.rank - step) % ring.size)):
            block = block_of(q, k, window)
            if block is not None:
                yield _moved(block.rows, i * len(q)), _moved(block.keys, j * len(k)), block


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


class Ulysses:
    """Ulysses attention of a microbatch: heads instead of tokens are sharded over the ranks."""

    def __init__(self, group: Group, inner: Attend, lengths: Sequence[int]) -> None:
        """`inner`: attention over all tokens of the microbatch, for however many heads."""
        self.group, self.inner, self.lengths = group, inner, list(lengths)
        self.rank, self.size = dist.get_rank(group), size_of(group)

    def lengths_T(self) -> Tensor:
        return self.inner.lengths_T().chunk(self.size)[self.rank]

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        if rule.sinks_H is not None:
            sinks_H = rule.sinks_H.chunk(self.size)[self.rank]
            rule = msgspec.structs.replace(rule, sinks_H=sinks_H)
        q, k, v = (_TokensForHeads.apply(x, self.group) for x in (q_THC, k_TKC, v_TKC))
        return _HeadsForTokens.apply(self.inner(q, k, v, rule), self.group)


def heads_in(x_THC: Tensor, group: Group) -> Tensor:
    """[T / n, H, C] -> [T, H / n, C]."""
    parts = x_THC.unflatten(1, (size_of(group), -1)).transpose(0, 1)  # [n, T / n, H / n, C]
    return all_to_all(parts.flatten(0, 1), group)


def heads_out(x_THC: Tensor, group: Group) -> Tensor:
    """[T, H / n, C] -> [T / n, H, C]."""
    parts = all_to_all(x_THC, group).unflatten(0, (size_of(group), -1))
    return parts.transpose(0, 1).flatten(1, 2)


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THC: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return heads_in(x_THC, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return heads_out(gradients[0], ctx.group), None


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THC: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return heads_out(x_THC, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return heads_in(gradients[0], ctx.group), None


def attend_for(
    batch: "Batch",
    group: Group,
    kind: Attention,
    inner: "Callable[[Batch], Attend] | None" = None,
) -> Attend:
    """Attention over a whole microbatch for a rank that has a part of it; `inner` is the attention of a single rank."""
    device = batch.tokens_T.device
    if batch.prefixes:
        if group is not None:
            raise ValueError("documents with prefixes are not split over ranks")
        return Prefixed(batch)
    if group is not None and kind == "ring":
        return Ring(group, batch.lengths, device)
    alone = PackedDocuments(batch.lengths, device) if inner is None else inner(batch)
    return alone if group is None else Ulysses(group, alone, batch.lengths)
