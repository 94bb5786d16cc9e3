"""bfloat16, float16 and fp8 on several ranks: as near to one process as rounding in another order allows.

    bound   |gradient of many ranks - of one process| / |of one process|, of each tensor and of all together

One process rounds as well: beside the truth in float64 the ranks may be off by what it is, times a small factor.
"""

import functools

import pytest
import torch
from forked import run_ranks
from plain_model import PlainModel, named_gradients
from spread_training import SEED, batches, spec_of

from cairn.train.objective import Objective
from cairn.train.parallel.layout import Layout, Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize
from cairn.train.products import make_products

SPEC = spec_of("tiny-qwen3", hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=96, layers=4)
COUNT, TOKENS, VALID = 4, 32, 64.0
LAYOUTS = {
    "dp": (Layout(dp=2), Strategy()),
    "fsdp": (Layout(fsdp=2), Strategy()),
    "zero2": (Layout(dp=2), Strategy(zero=2)),
    "tp-sp": (Layout(tp=2), Strategy(sequence_parallel=True)),
    "pp": (Layout(pp=2), Strategy()),
    "ring": (Layout(cp=2), Strategy()),
}
# Unit roundoff of the type, times what four layers and another order of sums make of it.
BOUNDS = {torch.bfloat16: 8 * 2.0**-9, torch.float16: 8 * 2.0**-12}
SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**10}


def one_rank(rank, world, layout, options, dtype, fused, fp8="none"):
    parallel = parallelize(
        SPEC,
        Mesh.join(layout),
        options,
        dtype=dtype,
        seed=SEED,
        fused_context=TOKENS if fused else None,
        products=make_products(fp8),
    )
    each = COUNT // parallel.data_ranks
    mine = batches(SPEC, 0, COUNT, TOKENS)[parallel.data_rank * each :][:each]
    scale = SCALE.get(dtype, 1.0)
    valid = torch.tensor(VALID / scale)
    share = parallel.forward_backward(mine, Objective(SPEC, chunk=8), valid, scale)
    gradients = parallel.named_state(parallel.gradients())
    found = {name: (p.tensor.double() / scale, p.offsets) for name, p in gradients.items()}
    return float(parallel.sum_over_data(share)) / scale, found


def together(results):
    """The whole tensors, from the ranks' rectangles."""
    whole = {name: torch.zeros(slot.shape, dtype=torch.float64) for name, slot in slots().items()}
    for _, found in results:
        for name, (part, offsets) in found.items():
            here = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            whole[name][here] = part
    return results[0][0], whole


@functools.cache
def slots():
    return {slot.name: slot for slot in PlainModel(SPEC).slots}


@functools.cache
def alone(dtype, fused, fp8="none"):
    return together([one_rank(0, 1, Layout(), Strategy(), dtype, fused, fp8)])


@functools.cache
def truth(dtype):
    """In float64, from the weights as the type holds them."""
    oracle = PlainModel(SPEC, SEED)
    oracle.model.to(dtype).double()
    every = batches(SPEC, 0, COUNT, TOKENS)
    return named_gradients(oracle, every, None, VALID)


def apart(mine, theirs):
    """The largest relative difference of a tensor, and that of all as one vector."""
    gaps = {name: (mine[name] - theirs[name]).norm() for name in theirs}
    sizes = {name: theirs[name].norm() for name in theirs}
    worst = max(float(gaps[name] / sizes[name]) for name in theirs)
    total = torch.stack(list(gaps.values())).norm() / torch.stack(list(sizes.values())).norm()
    return worst, float(total)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sixteen_bits_on_many_ranks(name, dtype):
    layout, options = LAYOUTS[name]
    fused = name in ("tp-sp", "pp", "fsdp")
    loss, gradients = together(run_ranks(2, one_rank, layout, options, dtype, fused))
    expected, single = alone(dtype, fused)
    exact, true = truth(dtype)
    bound = BOUNDS[dtype]
    assert loss == pytest.approx(expected, rel=bound)
    assert loss == pytest.approx(float(exact), rel=bound)
    worst, total = apart(gradients, single)
    assert total < bound, (worst, total)
    assert worst < 4 * bound, (worst, total)
    assert apart(gradients, true)[1] < 1.5 * max(apart(single, true)[1], bound / 8)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("name", "kind", "fused"),
    [
        ("fsdp", "row", True),
        ("tp-sp", "tensor", True),
        ("pp", "row", False),
        ("dp", "tensor", False),
    ],
)
def test_fp8_on_many_ranks(name, kind, fused):
    """Where weights are whole the products are those of one process; where they are cut, so are the scales."""
    layout, options = LAYOUTS[name]
    args = (layout, options, torch.float32, fused, kind)
    loss, gradients = together(run_ranks(2, one_rank, *args))
    expected, single = alone(torch.float32, fused, kind)
    exact, true = truth(torch.float32)
    assert loss != pytest.approx(float(exact), rel=1e-6)  # it was fp8
    assert loss == pytest.approx(expected, rel=1e-4 if layout.tp == 1 else 5e-2)
    if layout.tp == 1:
        assert apart(gradients, single)[1] < 1e-4
    assert apart(gradients, true)[1] < 1.3 * apart(single, true)[1]
