"""Decode over latent rows in Gluon, emulated: what it computes, and that its barriers are right."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401
import gluon_emulator  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.paged.latent_attention import Latents, _added_up, latent_attention_reference
from cairn.kernels.paged.latent_gluon import FEW_HEADS, MANY_HEADS, decode, output, unfit

PAGE, RANK, ROTATED = 16, 128, 64


def call_of(lengths: list[int], heads: int) -> Latents:
    """Rows behind the end of a sequence are zeros, as in a pool that nobody has written to."""
    pages = [-(-length // PAGE) for length in lengths]
    cache = torch.zeros(sum(pages) + 1, PAGE, 1, RANK + ROTATED, dtype=torch.bfloat16)
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    free = (torch.randperm(sum(pages)) + 1).int().tolist()
    for sequence, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        tables[sequence, :count] = torch.tensor([free.pop() for _ in range(count)])
        for token in range(length):
            cache[tables[sequence, token // PAGE], token % PAGE] = torch.randn(RANK + ROTATED)
    q_THE = torch.randn(len(lengths), heads, RANK + ROTATED).bfloat16()
    return Latents(q_THE, cache, tables, torch.tensor(lengths).int(), None, 1, 0.1, RANK)


@pytest.mark.parametrize(
    ("lengths", "heads", "plan"),
    [
        ([200, 0, 16, 70], 6, FEW_HEADS),
        ([300], 16, FEW_HEADS._replace(block=32, buffers=2)),
        ([150, 1], 64, MANY_HEADS),
    ],
    ids=["few heads", "in parts", "many heads"],
)
def test_rows_of_pages(lengths, heads, plan):
    torch.manual_seed(0)
    call = call_of(lengths, heads)
    assert unfit(call.q_THE, call.cache, RANK, 1, None) is None
    out, lse = output(call, plan)
    decode(call, out, lse, plan)
    found = _added_up(out, lse, torch.bfloat16) if len(out) > 1 else out[0]
    assert relative_error((found,), (latent_attention_reference(call),)) < 1e-2
