"""Pages moved within a cache and between caches, in the interpreter."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch

from cairn.kernels.paged.kv_blocks import copy_blocks, move_pages_reference, swap_blocks
from cairn.kernels.tuned import trying


def cache(pages=7, dtype=torch.bfloat16):
    return torch.randn(3, pages, 4, 2, 6).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("pairs", [[[0, 3], [5, 1], [-1, 2], [4, -1], [2, 6]], [[0, 1]], []])
def test_copy(pairs, dtype):
    dtype_ok = dtype != torch.float8_e4m3fn
    found = cache(dtype=dtype) if dtype_ok else torch.randn(3, 7, 4, 2, 8).to(dtype)
    wanted = found.clone()
    pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    with trying("kv_blocks", "within", {"block": 8, "warps": 1, "programs": 4}):
        copy_blocks(found, pairs, impl="triton")
    move_pages_reference(wanted, wanted, pairs)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_swap_into_a_cache_that_keeps_pages_together():
    near, host = cache(), torch.zeros(4, 3, 4, 2, 6, dtype=torch.bfloat16)
    pairs = torch.tensor([[6, 0], [1, 3], [-1, 1]], dtype=torch.int32)
    swap_blocks(near, host.transpose(0, 1), pairs, impl="triton")
    assert torch.equal(host[0], near[:, 6])
    assert torch.equal(host[3], near[:, 1])
    assert not host[1:3].any()
    back = torch.zeros_like(near)
    swap_blocks(host.transpose(0, 1), back, pairs[:, [1, 0]].contiguous(), impl="triton")
    assert torch.equal(back[:, [6, 1]], near[:, [6, 1]])
