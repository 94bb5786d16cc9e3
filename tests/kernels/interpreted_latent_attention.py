"""Attention over latent rows, in the interpreter: decode in parts, prefill behind a prefix, padding, float8 rows."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.paged.latent_attention import (
    Latents,
    latent_attention,
    latent_attention_reference,
)
from cairn.kernels.paged.latent_float8 import unfit
from cairn.kernels.paged.latent_layout import RowLayout
from cairn.kernels.paged.latent_rows import FP8, latent_write, packed_rows, unpacked_rows

PAGE, RANK, ROTATED = 16, 24, 8
FLOAT8 = RowLayout(RANK, ROTATED, float8=True)


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


def in_float8(call: Latents) -> Latents:
    """The same rows in a float8 cache; bytes of rows that belong to nobody are NaN in every type."""
    stored = torch.full((*call.cache.shape[:3], FLOAT8.columns), 255, dtype=torch.uint8).view(FP8)
    slots = torch.arange(len(stored) * PAGE)
    rows_NE = call.cache.flatten(0, 2)
    latent_write(
        rows_NE, torch.where(rows_NE.isnan().any(-1), -1, slots), stored, RANK, impl="triton"
    )
    return call._replace(cache=stored)


@pytest.mark.parametrize(
    ("queries", "lengths", "heads"),
    [([1, 1, 1], [70, 0, 16], 6), ([5, 1, 20], [33, 17, 20], 4)],
    ids=["decode", "mixed"],
)
def test_rows_in_float8(queries, lengths, heads):
    torch.manual_seed(0)
    call = call_of(queries, lengths, heads, torch.bfloat16)
    packed = in_float8(call)
    found = latent_attention(
        packed.q_THE, packed.cache, packed.block_tables, packed.lengths, packed.starts,
        rank=RANK, max_query=packed.max_query, scale=packed.scale, impl="triton",
    )  # fmt: skip
    assert relative_error((found,), (latent_attention_reference(packed),)) < 1e-2
    assert 1e-3 < relative_error((found,), (latent_attention_reference(call),)) < 6e-2


@pytest.mark.parametrize("heads", [6, 32])
def test_rows_of_several_scales(heads):
    """By products of the columns of each scale."""
    torch.manual_seed(0)
    rank, rotated, lengths = 256, 16, [70, 0, 17]
    layout = RowLayout(rank, rotated, float8=True)
    cache = torch.full((18, PAGE, 1, layout.columns), 255, dtype=torch.uint8).view(FP8)
    tables = torch.randperm(18).view(3, 6).int()
    known = [
        tables[b, t // PAGE] * PAGE + t % PAGE for b, n in enumerate(lengths) for t in range(n)
    ]
    rows = torch.randn(len(known), rank + rotated) * torch.logspace(-1, 1, rank + rotated)
    latent_write(rows.bfloat16(), torch.stack(known).int(), cache, rank, impl="reference")
    q_THE = (torch.randn(3, heads, rank + rotated) / 4).bfloat16()
    call = Latents(q_THE, cache, tables, torch.tensor(lengths).int(), None, 1, 0.05, rank)
    assert unfit(call) is None
    found = latent_attention(
        q_THE, cache, tables, call.lengths, rank=rank, max_query=1, scale=0.05, impl="triton"
    )
    assert relative_error((found,), (latent_attention_reference(call),)) < 1e-2


@pytest.mark.parametrize("float8", [False, True])
def test_rows_are_stored_as_the_reference_does(float8):
    torch.manual_seed(0)
    rows_TE = torch.randn(5, RANK + ROTATED).bfloat16()
    rows_TE[1, :RANK] = 0
    slots = torch.tensor([17, 0, -1, 31, 40]).int()
    columns = RowLayout(RANK, ROTATED, float8).columns
    caches = []
    for impl in ("triton", "reference"):
        shape = (3, PAGE, 1, columns)
        cache = torch.zeros(shape, dtype=torch.uint8 if float8 else torch.bfloat16)
        latent_write(rows_TE, slots, cache.view(FP8) if float8 else cache, RANK, impl=impl)
        caches.append(cache)
    assert torch.equal(*caches)
    assert not caches[0].flatten(0, 1)[[i for i in range(48) if i not in slots.tolist()]].any()


def test_a_float8_row_of_deepseek_has_656_bytes():
    layout = RowLayout(512, 64, float8=True)
    assert layout.columns == 656
    rows = torch.randn(7, 576).bfloat16() * torch.logspace(-3, 3, 7)[:, None].bfloat16()
    back = unpacked_rows(packed_rows(rows, layout), layout, torch.bfloat16)
    assert torch.equal(back[:, 512:], rows[:, 512:])
    assert (back - rows)[:, :512].abs().max() <= rows.abs().max() / 16
    assert relative_error((back,), (rows.float(),)) < 4e-2
