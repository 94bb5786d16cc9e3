"""Attention of documents that go on where another document of the batch ends: a prompt is there once, with its answers.

    tokens      P P P | a a | b b b                     P's are computed once, forward and backward
    keys        P P P | P P P a a | P P P b b b         the rows of keys and values that each document sees

Only rows of keys and values are repeated, which are small beside everything else of a layer; their gradients come back
to the one prompt as a sum, always in the same order. An `Attend` for any device, with gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.attention.attention import attention
from cairn.kernels.attention.attention_problem import WIDTHS
from cairn.models.attend import AttentionRule
from cairn.models.attend import attention as plain_attention
from cairn.train.data.batch import NONE, Batch


class Repeats(NamedTuple):
    """Mapping from key rows to tokens; pure, on the host."""

    tokens_N: Tensor  # of each row of keys, its token
    once_O: Tensor  # tokens that have one row
    row_O: Tensor  # and where it is
    often_P: Tensor  # tokens that have several rows
    rows_PC: Tensor  # and where they are
    counts_PC: Tensor  # whether there is such a row: tokens have more or fewer of them
    lengths: list[int]  # keys of each document

    def to(self, device: torch.device) -> "Repeats":
        *tensors, lengths = self
        moved = [cast(Tensor, one).to(device, non_blocking=True) for one in tensors]
        return Repeats._make([*moved, lengths])


def repeats_of(lengths: Sequence[int], prefixes: Sequence[int]) -> Repeats:
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)]
    rows: list[Tensor] = []
    places: dict[int, list[int]] = {}  # where the rows of each document begin
    at = 0
    for document, prefix in enumerate(prefixes):
        for part in (document,) if prefix == NONE else (prefix, document):
            places.setdefault(part, []).append(at)
            rows.append(spans[part])
            at += lengths[part]
    often = [document for document, begins in places.items() if len(begins) > 1]
    single = [document for document, begins in places.items() if len(begins) == 1]
    most = max((len(places[document]) for document in often), default=1)

    def rows_of(document: int) -> Tensor:
        begins = torch.tensor(places[document] + [-1] * (most - len(places[document])))
        found_CT = begins[:, None] + torch.arange(lengths[document])
        return torch.where(begins[:, None] < 0, -1, found_CT).t()

    none = torch.zeros(0, dtype=torch.long)
    rows_PC = torch.cat([none.view(0, most), *map(rows_of, often)])
    return Repeats(
        torch.cat(rows),
        torch.cat([none, *(spans[document] for document in single)]),
        torch.cat([none, *(places[one][0] + torch.arange(lengths[one]) for one in single)]),
        torch.cat([none, *(spans[document] for document in often)]),
        rows_PC.clamp(min=0),
        rows_PC >= 0,
        [
            n + (0 if prefix == NONE else lengths[prefix])
            for n, prefix in zip(lengths, prefixes, strict=True)
        ],
    )


class Prefixed:
    """Each document sees its prefix and itself; `attend` of a training step."""

    def __init__(self, batch: Batch) -> None:
        device = batch.tokens_T.device
        self.repeats = repeats_of(batch.lengths, batch.prefixes).to(device)
        self.lengths, self.keys = batch.lengths, self.repeats.lengths
        self.cu_seqlens = batch.cu_seqlens
        self.cu_seqlens_k = torch.tensor([0, *self.keys]).cumsum(0).int().to(device)
        self.device, self.by_kernels = device, device.type == "cuda"

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        k_NKC, v_NKC = (_Repeated.apply(x_TKC, self.repeats) for x_TKC in (k_TKC, v_TKC))
        if not self.by_kernels or q_THC.shape[-1] not in WIDTHS:
            keys = zip(k_NKC.split(self.keys), v_NKC.split(self.keys), strict=True)
            documents = zip(q_THC.split(self.lengths), keys, strict=True)
            return torch.cat([plain_attention(q, *both, rule) for q, both in documents])
        out = attention(
            q_THC,
            k_NKC,
            v_NKC,
            self.cu_seqlens,
            max_length=max(self.lengths),
            window=rule.window,
            softcap=rule.softcap,
            scale=rule.scale,
            sinks_H=rule.sinks_H,
            cu_seqlens_k=self.cu_seqlens_k,
            max_length_k=max(self.keys),
        )
        return cast(Tensor, out)

    def lengths_T(self) -> Tensor:
        counts = torch.tensor(self.keys).repeat_interleave(torch.tensor(self.lengths))
        return counts.to(self.device)


class _Repeated(torch.autograd.Function):
    """Rows of tokens, some of them several times. Backward adds in a fixed order; torch's own would not on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_TKC: Tensor, repeats: Repeats) -> Tensor:  # type: ignore[override]
        ctx.repeats, ctx.shape = repeats, x_TKC.shape
        return x_TKC.index_select(0, repeats.tokens_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        g_NKC, repeats = grads[0], ctx.repeats
        dx_TKC = g_NKC.new_empty(ctx.shape)
        dx_TKC[repeats.once_O] = g_NKC[repeats.row_O]
        wide = torch.promote_types(g_NKC.dtype, torch.float32)
        copies_PCKC = g_NKC[repeats.rows_PC].to(wide) * repeats.counts_PC[..., None, None]
        dx_TKC[repeats.often_P] = copies_PCKC.sum(1).to(g_NKC.dtype)
        return dx_TKC, None
