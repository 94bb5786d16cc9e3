"""Which way a small all-reduce on GPUs goes: by size, type and ranks, with a reason."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.comm.gpu.symmetric import MOST_BYTES, ONE_SHOT_BYTES, way


@given(st.integers(0, 2 * MOST_BYTES), st.integers(2, 16))
def test_larger_messages_never_go_back_to_one_shot(nbytes, ranks):
    order = ("one_shot", "two_shot", "library")
    here, larger = (way(size, torch.bfloat16, ranks)[0] for size in (nbytes, 2 * nbytes + 1))
    assert order.index(here) <= order.index(larger)
    assert all(way(nbytes, torch.bfloat16, ranks))


def test_the_limits():
    assert way(ONE_SHOT_BYTES, torch.float32, 2)[0] == "one_shot"
    assert way(ONE_SHOT_BYTES, torch.float32, 8)[0] == "two_shot"
    assert way(MOST_BYTES + 1, torch.float32, 8)[0] == "library"
    assert way(16, torch.int64, 2)[0] == "library"
