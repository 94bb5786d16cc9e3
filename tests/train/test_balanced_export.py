"""A run whose experts are balanced by a bias: the bias is exported, read back, and serving routes with it."""

import msgspec
import pytest
import torch
from tiny_runs import loop, recipe

from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.checkpoint_names import source
from cairn.models.experts import ExpertLayer
from cairn.train.checkpoint.export import export_newest
from cairn.train.config import Checkpoint, Data, Model, Schedule
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Balance


def config(folder, steps, **changes):
    fields = dict(
        steps=steps,
        model=Model(preset="tiny-moe"),
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=2),
        balance=Balance(bias=0.05),
        schedule=Schedule(kind="constant"),
        checkpoint=Checkpoint(every=3, export=False),
    )
    return recipe(folder, **(fields | changes))


def routers(model):
    layers = [m.feed_forward for m in model.layers if isinstance(m.feed_forward, ExpertLayer)]
    return [layer.router for layer in layers]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    one = loop(config(folder, 6))
    one.run()
    export_newest(folder, folder / "model", None)
    return one.state, folder


def test_the_exported_model_routes_as_the_trained_one(run):
    state, folder = run
    loaded = open_checkpoint(folder / "model").load("cpu", torch.float32)
    trained = [router.bias_E for router in state.parallel.routers.values()]
    assert all(bias_E.abs().max() > 0 for bias_E in trained)
    for mine, theirs in zip(routers(loaded), trained, strict=True):
        torch.testing.assert_close(
            mine.bias_E.float(), theirs.detach().float(), rtol=1e-2, atol=1e-3
        )
    batch = one_batch(state)
    hidden_TD = loaded(batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths))
    from cairn.train.heads import HiddenStates

    (found,) = state.parallel.forward([batch], HiddenStates())
    torch.testing.assert_close(hidden_TD, found["hidden"], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for router in routers(loaded):
            router.bias_E.zero_()
    without_TD = loaded(batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths))
    assert not torch.allclose(without_TD, hidden_TD, rtol=1e-4, atol=1e-4)


def one_batch(state):
    from cairn.train.random_tokens import RandomTokens

    return RandomTokens(state.spec.vocab, 32).batch(99)


def test_its_name_is_that_of_deepseek():
    found = source("qwen3_moe", "layers.3.feed_forward.router.bias").tensor
    assert found == "model.layers.3.mlp.gate.e_score_correction_bias"


def test_a_run_goes_on_from_its_own_export(run, tmp_path):
    """Imported with its bias, and steered further."""
    state, folder = run
    model = Model(checkpoint=folder / "model")
    begun = loop(config(tmp_path / "more", 2, model=model)).state
    before = [r.bias_E.detach().clone() for r in state.parallel.routers.values()]
    after = [r.bias_E.detach() for r in begun.parallel.routers.values()]
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def test_a_resumed_run_keeps_the_bias(run, tmp_path):
    _, folder = run
    part = config(tmp_path / "part", 3)
    loop(part).run()
    again = loop(msgspec.structs.replace(part, steps=6))
    again.run()
    losses = [record.loss for record in read_log(tmp_path / "part")]
    assert losses == [record.loss for record in read_log(folder)]
