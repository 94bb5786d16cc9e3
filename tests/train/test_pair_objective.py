"""Preference losses through the whole head against a formula over logits, and a run that learns to prefer."""

import torch
import torch.nn.functional as F

from cairn.models.adapter.attach import adapter_off, attach
from cairn.models.adapter.folder import adapter_slots
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.presets import preset
from cairn.models.weights import fill_random, random_model
from cairn.train.data.batch import Document, join, pack
from cairn.train.heads import TargetLogProbs
from cairn.train.objective import IGNORED
from cairn.train.pair_objective import PairObjective
from cairn.train.rules.dpo import DPO
from cairn.train.rules.ipo import IPO
from cairn.train.rules.orpo import ORPO
from cairn.train.rules.reward import Reward
from cairn.train.rules.simpo import SimPO

SPEC = preset("tiny-qwen3")


def batch_of(generator):
    """Two samples of a pair with different lengths, whose first three tokens are the prompt, and padding."""
    samples = []
    for number, lengths in enumerate(((7, 9), (6, 8))):
        documents = []
        for side, length in enumerate(lengths):
            tokens_T = torch.randint(1, 50, (length,), generator=generator)
            targets_T = torch.cat([tokens_T[1:], torch.tensor([IGNORED])])
            targets_T[:2] = IGNORED
            documents.append(Document(tokens_T, targets_T, {"side": torch.full((length,), side)}))
        sample = pack(documents, 18, 0, [number])
        sample.extra["side"][sum(lengths) :] = 2
        samples.append(sample)
    return join(samples)


def adapted():
    model = random_model(SPEC, ModelBuild("cpu", torch.float32), 0).requires_grad_(False)
    made = attach(model, SPEC, AdapterSpec(rank=4, alpha=16), ModelBuild("meta", torch.float32))
    fill_random(model, adapter_slots(model), "cpu", 0)
    return model, [parameter for one in made for parameter in one.parameters()]


def hidden_of(model, batch):
    return model(batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths, "cpu"))


def logp_of(model, hidden_TD, batch):
    return TargetLogProbs(SPEC)(hidden_TD, model.head or model.embedding, batch)["logp"]


def test_loss_and_gradient_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(generator)
    batch.extra["reference"] = -torch.rand(len(batch.tokens_T), generator=generator)
    model = random_model(SPEC, ModelBuild("cpu", torch.float32), 0)
    hidden_TD = hidden_of(model, batch).detach().requires_grad_()
    vocabulary = model.head or model.embedding
    logp_TV = F.log_softmax(model.logits(hidden_TD), -1)
    counts_T = batch.targets_T != IGNORED
    picked_T = logp_TV.gather(1, batch.targets_T.clamp(min=0)[:, None])[:, 0]
    gain_T = (picked_T - batch.extra["reference"]) * counts_T
    sums = [part.sum() for part in gain_T.split(batch.lengths)]
    expected = -F.logsigmoid(0.5 * torch.stack([sums[0] - sums[1], sums[3] - sums[4]])).mean()
    (gradient,) = torch.autograd.grad(expected, hidden_TD)
    found = PairObjective(SPEC, DPO(0.5))(hidden_TD, vocabulary, batch, torch.tensor(2.0))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, hidden_TD)[0], gradient)


def test_an_answer_is_preferred_by_what_its_rule_compares():
    """A longer answer is always the less likely one; IPO, ORPO and SimPO compare means over tokens, as TRL does."""
    batch = batch_of(torch.Generator().manual_seed(0))
    batch.extra["side"] = torch.where(batch.extra["side"] < 2, 1 - batch.extra["side"], 2)
    batch.extra["reference"] = torch.zeros(len(batch.tokens_T))
    model = random_model(SPEC, ModelBuild("cpu", torch.float32), 0)
    hidden_TD = hidden_of(model, batch).detach()
    logp_T = logp_of(model, hidden_TD, batch)
    counts_T = batch.targets_T != IGNORED
    logps = [part.sum() for part in (logp_T * counts_T).split(batch.lengths)]
    means = [a / b.sum() for a, b in zip(logps, counts_T.split(batch.lengths), strict=True)]
    of_sums, of_means = (sum(float(x[at + 1] > x[at]) for at in (0, 3)) / 2 for x in (logps, means))
    assert of_sums != of_means
    for rule in (DPO(), IPO(), ORPO(), SimPO()):
        objective = PairObjective(SPEC, rule)
        objective(hidden_TD, model.head or model.embedding, batch, torch.tensor(2.0))
        expected = of_means if rule.per_token else of_sums
        assert objective.metrics() == {"preferred": expected}, rule


def test_a_reward_model_heeds_the_margin_of_each_pair():
    batch = batch_of(torch.Generator().manual_seed(0))
    batch.extra["margin"] = torch.tensor([0.0, 3.0]).repeat_interleave(18)
    model = random_model(SPEC, ModelBuild("cpu", torch.float32), 0)
    hidden_TD = hidden_of(model, batch).detach()
    logp_T = logp_of(model, hidden_TD, batch)
    sums = [part.sum() for part in logp_T.split(batch.lengths)]
    won = torch.stack([sums[0] - sums[1], sums[3] - sums[4] - 3.0])
    found = PairObjective(SPEC, Reward())(
        hidden_TD, model.head or model.embedding, batch, torch.tensor(2.0)
    )
    torch.testing.assert_close(found, -F.logsigmoid(won).mean())


def test_an_adapter_learns_to_prefer_and_its_base_is_the_reference():
    batch = batch_of(torch.Generator().manual_seed(1))
    model, parameters = adapted()
    with torch.no_grad(), adapter_off(model):
        batch.extra["reference"] = logp_of(model, hidden_of(model, batch), batch)
    objective, optimizer = PairObjective(SPEC, DPO(0.5)), torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(12):
        loss = objective(
            hidden_of(model, batch), model.head or model.embedding, batch, torch.tensor(2.0)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - 0.6931) < 1e-3  # ln 2: policy and reference agree at first
    assert losses[-1] < 0.2
