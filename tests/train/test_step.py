"""One step: accumulation, normalisation, clipping and veto, each against plain arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from plain_model import PlainModel
from tiny_runs import Same, losses, recipe, state_of, steps, weights

from cairn.models.attend import PackedDocuments
from cairn.train.config import Data, Optim, Precision
from cairn.train.data.batch import IGNORED
from cairn.train.data.source import microbatch
from cairn.train.random_tokens import RandomTokens
from cairn.train.step import clip_factor, train_step


def test_microbatches_add_up_to_the_batch():
    runs = []
    for size in (4, 2, 1):
        data = Data(sources=["random"], sequence=32, sequences=4, microbatch=size)
        prepared = state_of(recipe(data=data))
        found = losses(steps(prepared, 4))
        runs.append((found, weights(prepared)))
    for found, after in runs[1:]:
        assert found == pytest.approx(runs[0][0], rel=1e-5)
        for name, value in after.items():
            torch.testing.assert_close(value, runs[0][1][name], rtol=1e-4, atol=1e-5)


class Uneven(RandomTokens):
    """Sample i has loss on i + 1 tokens only: a mean of means would weigh them wrongly."""

    def batch(self, number):
        batch = super().batch(number)
        targets = batch.targets_T.clone()
        targets[number + 1 :] = IGNORED
        return batch._replace(targets_T=targets)


def test_the_loss_is_the_mean_over_all_valid_tokens():
    data = Data(sources=["random"], sequence=32, sequences=4, microbatch=1)
    prepared = state_of(recipe(data=data))
    source = Uneven(64, 32)
    model = PlainModel(prepared.state.spec).model  # of the same seed
    whole = microbatch(source, range(4))
    hidden = model(whole.tokens_T, whole.positions_T, PackedDocuments(whole.lengths))
    expected = F.cross_entropy(model.logits(hidden), whole.targets_T, ignore_index=IGNORED)
    result = steps(prepared, 1, source)[0]
    assert result.valid.item() == 1 + 2 + 3 + 4
    torch.testing.assert_close(result.loss, expected.detach())


def test_a_step_without_a_token_to_learn_has_no_loss_and_changes_nothing():
    prepared = state_of(recipe(optim=Optim(weight_decay=0.1)))
    batch = prepared.corpus.source.batch(0)
    before = weights(prepared)
    empty = batch._replace(targets_T=torch.full_like(batch.targets_T, IGNORED))
    result = train_step(prepared.state, [empty])
    assert result.loss.isnan()  # 0 would look like a model that knows everything
    assert result.valid.item() == 0
    for name, value in weights(prepared).items():
        assert torch.equal(value, before[name])


def test_clipping_shortens_and_never_lengthens():
    assert clip_factor(torch.tensor(4.0), 1.0).item() == pytest.approx(0.25, rel=1e-5)
    assert clip_factor(torch.tensor(0.5), 1.0).item() == 1
    assert clip_factor(torch.tensor(9.0), 0.0).item() == 1
    assert clip_factor(torch.tensor(float("inf")), 1.0).isnan()


def test_the_clipped_update_is_torchs():
    """One step of SGD-like size: the same norm and factor as torch's own clipping."""
    prepared = state_of(recipe())
    model = PlainModel(prepared.state.spec).model  # of the same seed
    batch = microbatch(prepared.corpus.source, range(4))
    hidden = model(batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths))
    F.cross_entropy(model.logits(hidden), batch.targets_T).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    torch.testing.assert_close(steps(prepared, 1)[0].norm, expected.detach())


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_step_that_is_not_finite_changes_nothing(kind):
    prepared = state_of(recipe(precision=Precision(kind=kind)))
    steps(prepared, 2)
    with torch.no_grad():
        prepared.state.parallel.parameters()["norm.weight"][0] = float("nan")
        for role, tensors in prepared.state.optimizer.tensors().items():
            if role == "master":
                tensors["norm.weight"][0] = float("nan")
    before = weights(prepared)
    roles = prepared.state.optimizer.tensors()
    states = {r: {n: t.clone() for n, t in ts.items()} for r, ts in roles.items()}
    result = steps(prepared, 1)[0]
    assert not result.loss.isfinite()
    for name, value in weights(prepared).items():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)
    for role, tensors in prepared.state.optimizer.tensors().items():
        for name, value in tensors.items():
            torch.testing.assert_close(value, states[role][name], equal_nan=True, rtol=0, atol=0)


def test_training_learns_what_repeats():
    prepared = state_of(recipe())
    found = losses(steps(prepared, 30, Same(64, 32)))
    assert found[-1] < 0.5 * found[0]
