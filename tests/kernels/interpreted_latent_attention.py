"""Attention over latent rows, in the interpreter: decode in parts, prefill behind a prefix, padding."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.paged.latent_attention import (
    Latents,
    latent_attention,
    latent_attention_reference,
)

PAGE, RANK, ROTATED = 16, 24, 8


def call_of(queries: list[int], lengths: list[int], heads: int, dtype: torch.dtype) -> Latents:
    """Cache rows that belong to nobody are NaN, and so would be whatever read them."""
    pages = [-(-length // PAGE) for length in lengths]
    cache = torch.full((sum(pages) + 2, PAGE, 1, RANK + ROTATED), torch.nan, dtype=dtype)
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    free = (torch.randperm(sum(pages)) + 1).int().tolist()
    for sequence, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        tables[sequence, :count] = torch.tensor([free.pop() for _ in range(count)])
        for token in range(length):
            cache[tables[sequence, token // PAGE], token % PAGE] = torch.randn(RANK + ROTATED)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    rows = sum(queries) + 3 if max(queries) > 1 else len(queries)  # three rows of padding
    q_THE = torch.randn(rows, heads, RANK + ROTATED).to(dtype)
    bounds = starts if max(queries) > 1 else None
    count = torch.tensor(lengths, dtype=torch.int32)
    return Latents(q_THE, cache, tables, count, bounds, max(queries), 0.3, RANK)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("queries", "lengths", "heads"),
    [([1, 1, 1], [70, 0, 16], 6), ([1], [200], 16), ([5, 1, 20], [33, 17, 20], 4)],
    ids=["decode", "in parts", "mixed"],
)
def test_rows_of_pages(queries, lengths, heads, dtype, tolerance):
    torch.manual_seed(0)
    call = call_of(queries, lengths, heads, dtype)
    found = latent_attention(
        call.q_THE, call.cache, call.block_tables, call.lengths, call.starts,
        rank=RANK, max_query=call.max_query, scale=call.scale, impl="triton",
    )  # fmt: skip
    assert relative_error((found,), (latent_attention_reference(call),)) < tolerance
