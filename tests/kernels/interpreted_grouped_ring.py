"""The grouped product of many tokens in Gluon, emulated: what it computes, and that its barriers are right."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401
import gluon_emulator  # isort: skip  # noqa: F401

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.experts.grouped_matmul import SWIGLU, grouped_matmul_reference
from cairn.kernels.experts.grouped_ring import grouped_ring, row_tiles, unfit
from cairn.kernels.experts.matrices import quantize_experts
from cairn.kernels.experts.sort_pairs import sort_pairs
from cairn.kernels.quantize.quantize import quantize


def routed(sizes):
    """Pairs of one choice each; the last tokens visit nobody."""
    chosen = torch.cat([torch.full((size,), expert) for expert, size in enumerate(sizes)])
    chosen = torch.cat((chosen[torch.randperm(len(chosen))], torch.tensor([-1, -1])))
    return sort_pairs(chosen.int()[:, None], len(sizes))


def test_the_list_of_tiles():
    sizes = [130, 0, 64, 1, 128]
    pairs = routed(sizes)
    tiles = row_tiles(pairs.ends_E, pairs.total).view(-1, 4)
    ends = pairs.ends_E.tolist()
    wanted = [
        [expert, first, ends[expert]]
        for expert, size in enumerate(sizes)
        for first in range(ends[expert] - size, ends[expert], 128)
    ]
    assert tiles[0, 0] == len(wanted)
    assert tiles[1 : len(wanted) + 1, :3].tolist() == wanted


@pytest.mark.parametrize("gather", [True, False])
def test_padding_alone(gather, monkeypatch):
    pairs, empty = routed([0, 0]), torch.empty

    def wild(*size, **how):
        """What memory has where nothing was written to it: as a list of tiles, rows that do not exist."""
        made = empty(*size, **how).fill_(7)
        return made if made.is_floating_point() else made.copy_(torch.arange(len(made)) * 2**20)

    monkeypatch.setattr(torch, "empty", wild)
    w, x = torch.zeros(2, 256, 128).bfloat16(), torch.zeros(pairs.total, 128).bfloat16()
    y = grouped_ring(x, w, pairs, gather=gather, swiglu=gather)
    assert (y == 7).all()


@pytest.mark.parametrize("float8", [True, False], ids=["float8", "bfloat16"])
@pytest.mark.parametrize("swiglu", [True, False], ids=["gathered and gated", "in order"])
@pytest.mark.parametrize("sizes", [[130, 0, 64, 70], [0, 300]], ids=["ragged", "one expert"])
def test_rows_of_every_expert(float8, swiglu, sizes):
    torch.manual_seed(0)
    pairs = routed(sizes)
    count, inner, height = len(sizes), 768 if float8 else 384, 512
    w = (torch.randn(count, height, inner) * inner**-0.5).bfloat16()
    x = torch.randn(pairs.total, inner).bfloat16()
    w, x = (quantize_experts(w), quantize(x)) if float8 else (w, x)
    assert unfit(w) is None
    y = grouped_ring(x, w, pairs, gather=swiglu, swiglu=swiglu)
    exact = grouped_matmul_reference(x, w, pairs, gather=swiglu, gating=SWIGLU if swiglu else None)
    real = int(pairs.ends_E[-1])
    assert relative_error(y[:real], exact[:real]) < 1e-2
