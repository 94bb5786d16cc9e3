"""Reinforcement learning over one copy of the weights: what the engine samples is what the trainer trains."""

import math

import msgspec
import pytest
import torch
from tiny_align import tiny

from cairn.align.config import Algorithm, Rollout, Task
from cairn.align.objective import Mismatch, PolicyObjective, Watched
from cairn.align.policy import Policy, Sampled
from cairn.align.rollout import Trajectory, batches_of, documents_of, roll_out
from cairn.align.rollout_batches import read_rounds
from cairn.align.run import align, prepare
from cairn.align.tasks import Problem
from cairn.core.errors import ConfigError, DataError
from cairn.train.config import Adapter, Data, Objective
from cairn.train.data.batch import IGNORED
from cairn.train.heads import TargetLogProbs
from cairn.train.parallel.layout import Layout
from cairn.train.rules.policy import PolicyGradient
from cairn.train.step import train_step


@pytest.fixture
def lively(tmp_path):
    """A policy with an adapter, whose engine and trainer share everything."""
    config = tiny(
        tmp_path / "r", adapter=Adapter(rank=4), data=Data(sequence=48, sequences=8, microbatch=4)
    )
    prepared = prepare(config)
    state = prepared.state
    state.loss = PolicyObjective(state.spec, config)
    policy = Policy(state, prepared.corpus.tokenizer, 8, 48)
    return config, state, policy


def trainers_logp(state, groups):
    """By the trainer's own forward, for every sampled token."""
    flat = [one for group in groups for one in group]
    documents = documents_of([[one._replace(reward=float(at)) for at, one in enumerate(flat)]],
                             msgspec.structs.replace(state.config, algorithm=Algorithm()))  # fmt: skip
    batches = batches_of(documents, 4, 0, 0)
    found = state.parallel.forward(batches, TargetLogProbs(state.spec))
    return (
        [
            values["logp"][batch.targets_T != IGNORED]
            for values, batch in zip(found, batches, strict=True)
        ],
        [batch.extra["old"][batch.targets_T != IGNORED] for batch in batches],
        batches,
    )


def test_engine_and_trainer_agree_before_and_after_an_update(lively):
    config, state, policy = lively
    for turn in range(3):
        policy.updated(turn)
        groups = roll_out(
            policy, config, 0, 1
        )  # the same problem, so that stale pages would be found
        trained, sampled, batches = trainers_logp(state, groups)
        assert sum(map(len, sampled)) == sum(len(one.sampled.tokens) for one in groups[0])
        for a, b in zip(trained, sampled, strict=True):
            assert (a - b).abs().max() < 2e-5
        before = [p.detach().clone() for p in state.parallel.parameters().values()]
        train_step(state, batches)
        after = list(state.parallel.parameters().values())
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    held = {p.data_ptr() for p in state.parallel.stages[0].parameters()}
    assert {p.data_ptr() for p in policy.model.parameters()} == held  # one copy


def test_rollouts_repeat(lively):
    config, _, policy = lively
    first, again = (roll_out(policy, config, 8, 1) for _ in range(2))
    assert [one.sampled.tokens for one in first[0]] == [one.sampled.tokens for one in again[0]]
    assert len({tuple(one.sampled.tokens) for one in first[0]}) > 1


def trajectory(reward, tokens=(5, 6)):
    sampled = Sampled(list(tokens), [-0.5] * len(tokens), 0, True)
    return Trajectory(Problem("p", "s", "k"), [1, 2, 3], sampled, "text", reward)


@pytest.mark.parametrize(
    ("kind", "advantages", "weights"),
    [
        ("dr_grpo", [0.5, -0.5], [1 / 12, 1 / 12]),
        ("rloo", [1.0, -1.0], [1 / 2, 1 / 4]),
        ("grpo", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)], [1 / 2, 1 / 4]),
        ("dapo", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)], [1 / 3, 1 / 3]),
    ],
)
def test_credit(kind, advantages, weights):
    """Groups that are all alike are left out; of the others every answer has its advantage and weight."""
    config = tiny(None, algorithm=Algorithm(kind=kind), rollout=Rollout(group=2, max_tokens=12))
    groups = [
        [trajectory(1.0), trajectory(0.0, (7, 8, 9, 10))],
        [trajectory(1.0), trajectory(1.0)],
    ]
    made = documents_of(groups, config)
    assert [float(one.extra["advantage"][3]) for one in made] == pytest.approx(advantages)
    assert [float(one.extra["weight"][3]) for one in made] == pytest.approx(weights)
    assert made[1].targets_T.tolist() == [IGNORED, IGNORED, 7, 8, 9, 10, IGNORED]
    assert made[1].extra["old"].tolist() == [0, 0, -0.5, -0.5, -0.5, -0.5, 0]


def test_right_answers_are_imitated():
    """Without a log-probability of the engine the rule is cross entropy."""
    watch = Mismatch()
    logp_T = torch.tensor([-1.0, -2.0])
    streams = {
        "old": torch.tensor([math.nan, math.nan]),
        "advantage": torch.ones(2),
        "weight": torch.full((2,), 0.5),
    }
    _, slope_T = Watched(PolicyGradient(), watch)(logp_T, streams)
    assert slope_T.tolist() == [-0.5, -0.5]
    assert watch.read() == (0.0, 0.0)


def test_a_run_leaves_a_page_and_a_model(tmp_path):
    """Right answers first, then rollouts; whatever they are worth, engine and trainer agree."""
    config = tiny(tmp_path / "r", steps=6, warm_up=3, warm_up_until=1.0)
    found = align(config, log_line=lambda line: None)
    rounds = read_rounds(tmp_path / "r")
    assert [one.step for one in rounds] == [3, 4, 5]
    assert rounds[0].mismatch is None
    assert all(one.mismatch < 1e-4 for one in rounds[1:])
    assert 0 <= found.last <= 1
    assert "Reward" in (tmp_path / "r" / "align.html").read_text()
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["gspo", "cispo"])
def test_other_algorithms_take_steps_off_policy(tmp_path, kind, monkeypatch):
    def by_first_token(tokenizer, config, problem, prompt, sampled):
        return Trajectory(problem, prompt, sampled, "", float(sampled.tokens[0] % 2))

    monkeypatch.setattr("cairn.align.rollout.judged", by_first_token)
    config = tiny(
        tmp_path / "r",
        steps=4,
        warm_up=0,
        algorithm=Algorithm(kind=kind),
        data=Data(sequence=48, sequences=16, microbatch=8),
        rollout=Rollout(group=8, max_tokens=12, updates=2),
        task=Task(held_out=4, every=0),
    )
    found = align(config, log_line=lambda line: None)
    rounds = read_rounds(tmp_path / "r")
    assert [one.step for one in rounds] == [0, 2]  # each is learnt from twice
    assert rounds[0].informative == 4
    assert rounds[1].mismatch < 1e-4
    assert found.finished.outcome.last_loss is not None


def test_mistakes(tmp_path):
    config = tiny(tmp_path / "r")
    for changes, why in (
        ({"parallel": Layout(dp=2)}, "2 processes"),
        ({"rollout": Rollout(group=7)}, "no multiple"),
        ({"objective": Objective(kind="orpo")}, "cairn tune"),
        ({"rollout": Rollout(max_tokens=48)}, "no room"),
        ({"algorithm": Algorithm(kl=0.1)}, "stay close to"),
    ):
        with pytest.raises(ConfigError, match=why):
            msgspec.structs.replace(config, **changes)
    with pytest.raises(DataError, match=r"--data\.sequence"):
        align(tiny(tmp_path / "x", warm_up=0, data=Data(sequence=16, sequences=8, microbatch=8)))
