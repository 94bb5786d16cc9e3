"""A whole training step through our kernels, forward and backward, in the interpreter, beside the plain form."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import msgspec
import pytest
import torch
from plain_model import PlainModel, named_gradients

from cairn.models.presets import preset
from cairn.train.data.batch import make_batch
from cairn.train.fused_forward import Varlen
from cairn.train.objective import Objective
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize

SPEC = msgspec.structs.replace(
    preset("tiny-qwen3"), hidden=64, layers=1, heads=2, kv_heads=1, head_dim=64, intermediate=96,
    vocab=96,
)  # fmt: skip


def batch_of(lengths):
    tokens = torch.randint(SPEC.vocab, (sum(lengths),))
    return make_batch(tokens, tokens.roll(-1), lengths, [0])


@pytest.mark.parametrize(("recompute", "lengths"), [("none", [16, 16]), ("selective", [20, 9])])
def test_gradients_equal_those_of_the_plain_model(recompute, lengths, monkeypatch):
    batch = batch_of(lengths)
    monkeypatch.setenv("CAIRN_KERNELS", "all=reference")
    expected, plain = named_gradients(PlainModel(SPEC, 3), [batch], None, len(batch.tokens_T))
    monkeypatch.delenv("CAIRN_KERNELS")
    parallel = parallelize(
        SPEC, Mesh.alone(), seed=3, attend=Varlen, recompute=recompute, fused_context=64
    )
    loss = Objective(SPEC, fused=True)
    found, grads = named_gradients(parallel, [batch], loss, len(batch.tokens_T))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, grad in plain.items():
        torch.testing.assert_close(grads[name], grad, rtol=2e-3, atol=2e-4, msg=name)
