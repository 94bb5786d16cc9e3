"""Decode over latent rows on a GPU: the Gluon form is near the reference, in parts, with short and empty sequences."""

import pytest

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.latent_attention import random_call
from cairn.kernels.paged.latent_attention import latent_attention, latent_attention_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("impl", "float8"), [("gluon", False), ("triton", False), ("triton", True)]
)
@pytest.mark.parametrize(
    ("sequences", "length", "heads"), [(5, 1000, 16), (1, 3000, 12), (200, 90, 16), (5, 300, 128)]
)
def test_rows_of_pages(sequences, length, heads, impl, float8):
    call = random_call(sequences, length, heads, float8=float8)
    call.lengths[-1] = 17
    if sequences > 2:
        call.lengths[1] = 0
    found = latent_attention(
        call.q_THE, call.cache, call.block_tables, call.lengths,
        rank=call.rank, max_query=1, scale=call.scale, impl=impl,
    )  # fmt: skip
    assert relative_error((found,), (latent_attention_reference(call),)) < 1e-2
