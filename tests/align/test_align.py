"""Reinforcement learning over one copy of the weights: what the engine samples is what the trainer trains."""

import json
import math
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tiny_align import tiny

from cairn.align.chat_server import ChatServer
from cairn.align.config import UNUSED, Algorithm, Align, Rollout, Task
from cairn.align.consistent import NOW, check_covered, scored
from cairn.align.objective import Mismatch, PolicyObjective, Watched, gspo_streams
from cairn.align.policy import Policy, Sampled, engine_view
from cairn.align.recipes import RECIPES, recipe
from cairn.align.rollout import (
    Trajectory,
    batches_of,
    document,
    documents_of,
    judged,
    roll_out,
    shares_prompts,
)
from cairn.align.rollout_batches import read_rounds
from cairn.align.run import align, prepare
from cairn.align.tasks import Problem
from cairn.align.value_head import with_credit
from cairn.cli.main import main
from cairn.core.errors import ConfigError, DataError
from cairn.models.attend import AttentionRule, PackedDocuments
from cairn.models.spec import Rope
from cairn.train.config import Adapter, Data, Model, Objective, Optim
from cairn.train.data.batch import IGNORED
from cairn.train.describe import shape_of
from cairn.train.heads import TargetLogProbs
from cairn.train.pair_objective import LOSS, SLOPE
from cairn.train.parallel.context import attend_for
from cairn.train.parallel.layout import Balance, Layout
from cairn.train.rules.cispo import CISPO
from cairn.train.rules.gspo import GSPO
from cairn.train.rules.policy import Clip, PolicyGradient
from cairn.train.step import train_step

LEARNING = dict(
    steps=220,
    warm_up_mistakes=0.5,
    optim=Optim(lr=5e-4, weight_decay=0.0),
    task=Task(numbers=3, held_out=64, every=0),
)


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
    documents = documents_of(
        [[one._replace(reward=float(at)) for at, one in enumerate(flat)]],
        msgspec.structs.replace(state.config, algorithm=Algorithm()),
    )
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
    for step in (0, 1, 1):  # as after a rewind: the number comes again, with other weights
        policy.updated(step)
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


def test_the_model_is_talked_to_between_two_steps(lively):
    _, _, policy = lively
    talk = ChatServer(policy, "run", 48, lambda: "<p>page</p>")
    body = {"messages": [{"role": "user", "content": "sort 312"}], "max_tokens": 4, "seed": 1}
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(_post, f"{talk.address}/v1/chat/completions", body)
            while not waiting.done():
                talk.answer(7)
            status, answer = waiting.result()
        assert (status, answer["model"]) == (200, "run@7")
        assert answer["choices"][0]["message"]["content"]
        status, answer = _post(
            f"{talk.address}/v1/completions", {"prompt": "sort", "max_tokens": 99}
        )
        assert status == 400
        assert "max_tokens can be" in answer["error"]["message"]
        assert b"page" in urllib.request.urlopen(talk.address).read()
    finally:
        talk.close()


def _post(address, body):
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(address, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as problem:
        return problem.code, json.load(problem)


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-deepseek", "tiny-qwen3-next"])
def test_the_same_bits_are_refused_where_they_are_not_computed(tmp_path, preset):
    config = tiny(
        tmp_path / "r",
        model=Model(preset=preset, context=64),
        rollout=Rollout(group=8, max_tokens=12, consistent=True),
    )
    with pytest.raises(ConfigError, match="it covers plain attention, dense layers"):
        prepare(config)


def test_the_same_bits_are_refused_for_rotations_by_length():
    stretched = Rope(kind="dynamic", factor=2.0, original_context=32)
    check_covered(shape_of(tiny(None).model), "cpu", 4)
    with pytest.raises(ConfigError, match="dynamic rotations"):
        check_covered(msgspec.structs.replace(shape_of(tiny(None).model), rope=stretched), "cpu", 0)
    check_covered(shape_of(tiny(None).model), "cuda", 0)
    with pytest.raises(ConfigError, match="an adapter on a GPU"):
        check_covered(shape_of(tiny(None).model), "cuda", 4)


def test_prompts_are_shared_where_an_answer_does_not_change_them():
    config, spec = tiny(None), shape_of(tiny(None).model)
    by_length = Rope(kind="dynamic", factor=2.0, original_context=32)
    assert shares_prompts(config, spec)
    assert not shares_prompts(config, msgspec.structs.replace(spec, rope=by_length))
    assert not shares_prompts(config, shape_of(Model(preset="deepseek-v2-lite")))
    ppo = msgspec.structs.replace(config, algorithm=Algorithm(kind="ppo"))
    assert not shares_prompts(ppo, spec)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_trainer_and_engine_compute_the_same_bits(tmp_path, kind, monkeypatch):
    """Over updates, prompts that end anywhere in a block and found prefixes; and the gradients are the usual ones."""

    def by_first_token(tokenizer, config, problem, prompt, sampled):
        return Trajectory(problem, prompt, sampled, "", float(sampled.tokens[0] % 2))

    monkeypatch.setattr("cairn.align.rollout.judged", by_first_token)
    config = tiny(
        tmp_path / "r",
        steps=3,
        algorithm=Algorithm(kind=kind),
        data=Data(sequence=48, sequences=8, microbatch=4),
        rollout=Rollout(group=4, max_tokens=24, consistent=True, updates=2),
        task=Task(held_out=2, every=0),
        adapter=Adapter(rank=2),
    )
    align(config, log_line=lambda line: None)
    seen = [(one.mismatch, one.largest) for one in read_rounds(tmp_path / "r")[1:]]
    assert seen == [(0.0, 0.0)]


def test_answers_are_scored_anew_if_the_weights_have_changed_or_a_few_scores_have():
    class Engine:
        def __init__(self, logp):
            self.logp, self.asked = logp, 0

        def scores(self, texts, first):
            self.asked += len(texts)
            return [self.logp] * len(texts)

    documents = [document([1, 2], [3, 4], [-0.5, -0.25], 1.0, 1.0)] * 40
    cases = [([-0.5, -0.25], True, 14), ([-0.5, -0.25], False, 40), ([-0.5, -0.5], True, 14 + 40)]
    for logp, fresh, asked in cases:
        engine = Engine(logp)
        found = scored(engine, documents, fresh)
        assert engine.asked == asked
        assert all(one.extra[NOW].tolist() == [0, *logp, 0] for one in found)


def test_gradients_of_scored_answers_and_of_shared_prompts_are_the_usual_ones(lively):
    config, state, policy = lively
    groups = roll_out(policy, config, 0, 2)
    flat = [[one._replace(reward=float(at)) for at, one in enumerate(group)] for group in groups]
    documents = documents_of(flat, config)
    found = []
    for own, shared in ((documents, False), (scored(policy, documents), False), (documents, True)):
        batches = batches_of(own, 4, 0, 0, shared)
        assert all(bool(batch.prefixes) == shared for batch in batches)
        state.parallel.forward_backward(batches, state.loss, torch.tensor(8.0), 1.0)
        found.append({name: g.clone() for name, g in state.parallel.gradients().items()})
        state.parallel.zero_grad()
    assert max(float(g.abs().max()) for g in found[0].values()) > 1e-5
    for name, exact in found[0].items():
        assert torch.allclose(found[1][name], exact, atol=1e-6), name
        assert torch.allclose(found[2][name], exact, atol=1e-6), name


@pytest.mark.parametrize("window", [0, 5])
def test_documents_behind_a_prefix_attend_as_if_they_had_it(window):
    """Answers of several prompts, a document alone and padding; values and gradients of float64."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8]]
    groups = [(prompts[0], [[11], [12, 13, 14]]), (prompts[1], [[21, 22]]), (prompts[1], [[3]] * 3)]
    documents = [document(p, one, [0.0] * len(one), 1.0, 1.0) for p, many in groups for one in many]
    documents[2] = documents[2]._replace(tokens_T=documents[2].tokens_T + 40)  # nobody shares it
    plain, shared = (batches_of(documents, 8, 0, 0, share)[0] for share in (False, True))
    assert shared.prefixes == (-1, 0, 0, -1, -1, 4, 4, 4, -1)
    assert sum(shared.lengths[:-1]) == sum(plain.lengths[:-1]) - 6 - 2
    learnt = [batch.targets_T != IGNORED for batch in (plain, shared)]
    for name in ("tokens_T", "targets_T", "positions_T"):
        pair = [
            getattr(batch, name)[mask] for batch, mask in zip((plain, shared), learnt, strict=True)
        ]
        assert torch.equal(*pair), name
    vocab, rule = 128, AttentionRule(layer=0, scale=0.3, window=window)
    outcomes = []
    for batch, mask in zip((plain, shared), learnt, strict=True):
        torch.manual_seed(0)
        table = torch.randn(vocab + 64, 3, 4, 8, dtype=torch.float64, requires_grad=True)
        q, k, v = (table[batch.tokens_T] + table[vocab + batch.positions_T]).unbind(1)
        out = attend_for(batch, None, "ring")(q, k[:, :2], v[:, :2], rule)[mask]
        (out * torch.arange(len(out))[:, None, None]).sum().backward()
        outcomes.append((out.detach(), table.grad))
    for found, exact in zip(*outcomes, strict=True):
        assert torch.allclose(found, exact, atol=1e-12)


def test_rollouts_repeat(lively):
    config, _, policy = lively
    first, again = (roll_out(policy, config, 8, 1) for _ in range(2))
    assert [one.sampled.tokens for one in first[0]] == [one.sampled.tokens for one in again[0]]
    assert len({tuple(one.sampled.tokens) for one in first[0]}) > 1


def test_the_gradient_is_that_of_the_expected_reward(lively):
    """Every first token once, counted by its probability: what rollouts estimate, exactly."""
    _, state, _ = lively
    parameters = state.parallel.parameters()
    prompt, vocab = [5, 9, 60, 7], state.spec.vocab
    rewards_V = (torch.arange(vocab) % 3 == 0).float()
    logits_V = last_logits(state, prompt)
    expected = logits_V.softmax(-1) @ rewards_V
    wanted = torch.autograd.grad(-expected, list(parameters.values()), allow_unused=True)
    logp_V = logits_V.detach().log_softmax(-1)
    advantages_V = rewards_V - expected.detach()
    weights_V = logp_V.exp() * vocab
    rows = zip(logp_V.tolist(), advantages_V.tolist(), weights_V.tolist(), strict=True)
    documents = [document(prompt, [t], [row[0]], *row[1:]) for t, row in enumerate(rows)]
    batches = batches_of(documents, vocab, 0, 0)
    state.parallel.forward_backward(batches, state.loss, torch.tensor(float(vocab)), 1.0)
    found = state.parallel.gradients()
    for (name, _), exact in zip(parameters.items(), wanted, strict=True):
        assert exact is None or torch.allclose(found[name], exact, atol=1e-6), name
    assert any(exact is not None and exact.abs().max() > 1e-5 for exact in wanted)
    state.parallel.zero_grad()


def last_logits(state, prompt):
    stage = state.parallel.stages[0]
    model = engine_view(stage)
    tokens_T = torch.tensor(prompt)
    hidden_TD = model(tokens_T, torch.arange(len(prompt)), PackedDocuments([len(prompt)], "cpu"))
    return model.logits(hidden_TD[-1:])[0]


def test_tokens_that_are_rewarded_become_certain(tmp_path, monkeypatch):
    """Reward 1 for a few first tokens: rollouts, credit, loss and update have to agree for this to end."""

    def judge(tokenizer, config, problem, prompt, sampled):
        return Trajectory(problem, prompt, sampled, "", float(sampled.tokens[0] % 16 == 0))

    monkeypatch.setattr("cairn.align.rollout.judged", judge)
    config = tiny(
        tmp_path / "r",
        data=Data(sequence=48, sequences=64, microbatch=64),
        optim=Optim(lr=1e-2, weight_decay=0.0),
        rollout=Rollout(group=64, max_tokens=1),
    )
    prepared = prepare(config)
    state = prepared.state
    state.loss = PolicyObjective(state.spec, config)
    policy = Policy(state, prepared.corpus.tokenizer, 64, 48)
    shares = [0.0]
    while shares[-1] < 0.95 and len(shares) < 40:
        policy.updated(len(shares))
        groups = roll_out(policy, config, 64 * len(shares), 1)
        shares.append(sum(one.reward for one in groups[0]) / 64)
        if documents := documents_of(groups, config):
            train_step(state, batches_of(documents, 64, 0, 0))
    assert shares[1] < 0.5 < 0.95 <= shares[-1], shares


def trajectory(reward, tokens=(5, 6)):
    sampled = Sampled(list(tokens), [-0.5] * len(tokens), 0, True)
    return Trajectory(Problem("p", "s", "k", "m"), [1, 2, 3], sampled, "text", reward)


@pytest.mark.parametrize(
    ("kind", "advantages", "weights"),
    [
        ("dr_grpo", [0.5, -0.5], [1 / 24, 1 / 24]),
        ("rloo", [1.0, -1.0], [1 / 4, 1 / 8]),
        ("gspo", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)], [1 / 4, 1 / 8]),
        ("grpo", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)], [1 / 4, 1 / 8]),
        ("cispo", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)], [1 / 5, 1 / 5]),
        ("dapo", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)], [1 / 3, 1 / 3]),
    ],
)
def test_credit(kind, advantages, weights):
    """Of a group that is all alike nothing is computed, but its answers count in the mean, except in DAPO's."""
    config = tiny(None, algorithm=Algorithm(kind=kind), rollout=Rollout(group=2, max_tokens=12))
    groups = [
        [trajectory(1.0), trajectory(0.0, (7, 8, 9, 10))],
        [trajectory(1.0), trajectory(1.0)],
    ]
    made = documents_of(groups, config)
    assert documents_of(groups[1:], config) == []
    assert [float(one.extra["advantage"][3]) for one in made] == pytest.approx(advantages)
    assert [float(one.extra["weight"][3]) for one in made] == pytest.approx(weights)
    assert made[1].targets_T.tolist() == [IGNORED, IGNORED, 7, 8, 9, 10, IGNORED]
    assert made[1].extra["old"].tolist() == [0, 0, -0.5, -0.5, -0.5, -0.5, 0]


GROUPS = [  # rewards and lengths of the answers to four prompts
    [(1.0, 3), (0.0, 5), (0.0, 2)],
    [(0.7, 4), (0.7, 1), (0.7, 6)],  # all alike: nothing but their divergence has a gradient
    [(0.2, 2), (0.9, 2), (0.3, 7)],
    [(0.0, 8), (0.0, 3), (0.0, 5)],
]
NOT_ALIKE = [GROUPS[0], GROUPS[2]]


def logp_of(old):
    """What the policy says now of a token that was sampled with this log-probability, and what the reference says."""
    return old + 0.4 * (37 * old).sin(), old + 0.2 * (91 * old).cos()


def by_the_papers(kind, kl, groups, old):
    """The loss of these groups in float64, as TRL computes it; the gradient of each log-probability."""
    low, high = tiny(None, algorithm=Algorithm(kind=kind)).clip
    losses, lengths, leaves = [], [], []
    for rewards, old_of_group in zip(groups, old, strict=True):
        reward_N = torch.tensor([reward for reward, _ in rewards], dtype=torch.float64)
        centred_N = reward_N - reward_N.mean()
        if kind == "rloo":
            centred_N = centred_N * len(rewards) / (len(rewards) - 1)
        elif kind != "dr_grpo":
            centred_N = centred_N / (reward_N.std() + 1e-4)
        for advantage, own in zip(centred_N, old_of_group, strict=True):
            old_T = torch.tensor(own, dtype=torch.float64)
            logp_T, reference_T = logp_of(old_T)
            leaves.append(logp_T.requires_grad_())
            ratio_T = (logp_T - old_T).exp()
            if kind == "gspo":
                ratio_T = (logp_T - old_T).mean().exp().expand(len(own))
            free_T, bound_T = ratio_T * advantage, ratio_T.clamp(1 - low, 1 + high) * advantage
            loss_T = -torch.minimum(free_T, bound_T)
            if kind == "cispo":
                loss_T = -ratio_T.clamp(max=1 + high).detach() * advantage * logp_T
            apart_T = reference_T - logp_T
            losses.append(loss_T + kl * (apart_T.exp() - apart_T - 1))
            lengths.append(len(own))
    if kind in ("dapo", "cispo"):
        loss = torch.cat(losses).sum() / sum(lengths)
    elif kind == "dr_grpo":
        loss = torch.cat(losses).sum() / (len(losses) * 12)
    else:
        loss = torch.stack([loss_T.mean() for loss_T in losses]).mean()
    loss.backward()
    return loss.item(), torch.cat([leaf.grad for leaf in leaves])


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "gspo", "cispo", "dapo"])
def test_losses_and_gradients_are_means_over_all_answers(kind, kl):
    """Also over those of groups without a difference: DAPO alone does as if it had not sampled them."""
    config = tiny(
        None, algorithm=Algorithm(kind=kind, kl=kl), adapter=Adapter(rank=4),
        rollout=Rollout(group=3, max_tokens=12), data=Data(sequence=48, sequences=12, microbatch=12),
    )  # fmt: skip
    torch.manual_seed(5)
    old = [[(-2 * torch.rand(n)).tolist() for _, n in group] for group in GROUPS]
    problem = Problem("p", "s", "k", "m")
    sampled = [
        [
            Trajectory(problem, [1, 2], Sampled([5] * n, own, 0, True), "", reward)
            for (reward, n), own in zip(group, old_of_group, strict=True)
        ]
        for group, old_of_group in zip(GROUPS, old, strict=True)
    ]
    (batch,) = batches_of(documents_of(sampled, config), 100, 0, 0)
    learnt_T = batch.targets_T != IGNORED
    logp_T, reference_T = logp_of(batch.extra["old"])
    batch = batch._replace(extra=batch.extra | {"reference": reference_T})
    objective = PolicyObjective(shape_of(config.model), config)
    if kind == "gspo":
        streams = gspo_streams(objective.gspo, logp_T, batch, Mismatch(), kl)
        loss_T, slope_T = streams[LOSS], streams[SLOPE]
    else:
        loss_T, slope_T = objective.tokens.rule(logp_T, batch.extra)
    units = objective.units([batch])
    found = dict(zip(batch.extra["old"][learnt_T].tolist(), slope_T[learnt_T] / units, strict=True))
    chosen = [GROUPS.index(group) for group in (NOT_ALIKE if kind == "dapo" else GROUPS)]
    picked = [old[at] for at in chosen]
    loss, gradient_T = by_the_papers(kind, kl, [GROUPS[at] for at in chosen], picked)
    tokens = [token for group in picked for own in group for token in own]
    assert float(loss_T[learnt_T].sum() / units) == pytest.approx(loss, rel=1e-4, abs=1e-6)
    for token, gradient in zip(tokens, gradient_T.tolist(), strict=True):
        assert float(found.pop(token, 0.0)) == pytest.approx(gradient, rel=1e-3, abs=1e-6)
    assert not found


def test_the_credit_of_ppo():
    """Without discount and with lambda 1 a token's return is the reward, and its advantage what it lacked of it."""
    made = [document([1, 2], [5, 6, 7], [-0.5] * 3, 0.0, 1.0), document([1], [5], [-0.5], 0.0, 1.0)]
    values = [torch.tensor([9.0, 0.1, 0.2, 0.3, 9.0]), torch.tensor([0.5, 9.0])]
    first, second = with_credit(made, [1.0, 0.0], values, 1.0)
    assert first.extra["return"].tolist() == pytest.approx([0, 1, 1, 1, 0])
    assert first.extra["value"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0])
    assert second.extra["return"].tolist() == pytest.approx([0, 0])
    raw = torch.tensor([0.9, 0.8, 0.7, -0.5])
    found = [*first.extra["advantage"][1:4], second.extra["advantage"][0]]
    assert found == pytest.approx(((raw - raw.mean()) / raw.std()).tolist(), abs=1e-5)


def test_gspo_keeps_close_to_its_reference():
    """Against autograd of what the paper and the divergence say, answer by answer."""
    answers, old, kl = [[5, 6, 7], [8]], [[-0.5, -1.0, -2.0], [-0.7]], 0.3
    made = [
        document([1, 2], answer, logp, 1.0 - 2 * at, 1 / len(answer))
        for at, (answer, logp) in enumerate(zip(answers, old, strict=True))
    ]
    (batch,) = batches_of(made, 2, 0, 0)
    counts_T = batch.targets_T != IGNORED
    reference_T = torch.linspace(-3, -1, len(counts_T))
    batch = batch._replace(extra=batch.extra | {"reference": reference_T})
    logp_T = torch.linspace(-2, -0.4, len(counts_T)).requires_grad_()
    rule, expected = GSPO(Clip(10.0, 10.0)), torch.zeros(())
    parts = zip(logp_T[counts_T].split([3, 1]), reference_T[counts_T].split([3, 1]), strict=True)
    for at, (own_T, ref_T) in enumerate(parts):
        ratio = (own_T - torch.tensor(old[at])).mean().exp()
        apart_T = ref_T - own_T
        divergence = (apart_T.exp() - apart_T - 1).mean()
        expected = expected - ratio * (1.0 - 2 * at) + kl * divergence
    expected.backward()
    found = gspo_streams(rule, logp_T.detach(), batch, Mismatch(), kl)
    assert float(found[LOSS][counts_T].sum()) == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(found[SLOPE][counts_T], logp_T.grad[counts_T], atol=1e-6)


def test_right_answers_are_imitated():
    """Without a log-probability of the engine the rule is cross entropy, and so is its loss."""
    watch = Mismatch()
    logp_T = torch.tensor([-1.0, -2.0])
    streams = {
        "old": torch.tensor([math.nan, math.nan]),
        "advantage": torch.ones(2),
        "weight": torch.full((2,), 0.5),
    }
    for rule in (PolicyGradient(), CISPO()):
        loss_T, slope_T = Watched(rule, watch)(logp_T, streams)
        assert loss_T.tolist() == [0.5, 1.0]
        assert slope_T.tolist() == [-0.5, -0.5]
    assert watch.read() == (None, None)
    (batch,) = batches_of([document([1, 2], [5, 6], [math.nan] * 2, 1.0, 0.5)], 1, 0, 0)
    learnt_T = batch.targets_T != IGNORED
    found = gspo_streams(GSPO(Clip()), torch.linspace(-1, -4, len(learnt_T)), batch, watch)
    assert found[LOSS][learnt_T].tolist() == pytest.approx(
        (-0.5 * torch.linspace(-1, -4, len(learnt_T))[learnt_T]).tolist()
    )
    assert found[SLOPE][learnt_T].tolist() == [-0.5, -0.5]


@pytest.mark.timeout(400)  # a minute where nothing else runs
def test_rewards_rise_and_the_run_leaves_a_model(tmp_path):
    """A model that imitates two orders of digits learns by trying which one is right, also of lists never asked."""
    config = msgspec.structs.replace(
        recipe("tiny-sort"),
        out=tmp_path / "r",
        device="cpu",
        **LEARNING,
    )
    found = align(config, log_line=lambda line: None)
    rounds = read_rounds(tmp_path / "r")
    assert found.last > max(0.65, found.first + 0.25), [one.reward for one in rounds]
    assert rounds[0].mismatch is None
    assert all(one.mismatch < 1e-4 for one in rounds[1:])
    assert "Reward" in (tmp_path / "r" / "align.html").read_text()
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()


def test_the_verb(tmp_path, capsys):
    assert main(["align", "--print"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    flags = ["--steps", "3", "--warm-up", "1", "--task.held-out", "2", "--device", "cpu", "--json"]
    assert main(["align", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "r"), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finished"]["outcome"]["step"] == 3
    assert 0 <= found["last"] <= 1
    # It goes on with its own recipe.
    assert main(["align", "--out", str(tmp_path / "r"), "--steps", "4"]) == 0
    told = capsys.readouterr().out
    assert f"cairn align --out {tmp_path / 'r'}" in told
    assert "step 3:" in told
    assert "finished after step 4, in" in told
    assert f"the model is in {tmp_path / 'r' / 'model'}; serve it" in told
    assert main(["align", "--out", str(tmp_path / "r"), "--steps", "4"]) == 0
    told = capsys.readouterr().out
    assert f"nothing left to do: {tmp_path / 'r'} has finished, at step 4" in told
    assert f"report: {tmp_path / 'r' / 'align.html'}" in told
    assert main(["align", str(tmp_path / "r")]) == 2
    assert "is the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["gspo", "cispo", "ppo"])
def test_other_algorithms_take_steps_off_policy(tmp_path, kind, monkeypatch):
    def by_first_token(tokenizer, config, problem, prompt, sampled):
        return Trajectory(problem, prompt, sampled, "", float(sampled.tokens[0] % 2))

    monkeypatch.setattr("cairn.align.rollout.judged", by_first_token)
    config = tiny(
        tmp_path / "r",
        steps=6,
        warm_up=0,
        algorithm=Algorithm(kind=kind),
        data=Data(sequence=48, sequences=16, microbatch=8),
        rollout=Rollout(group=8, max_tokens=12, updates=2),
        task=Task(held_out=4, every=3),
    )
    found = align(config, log_line=lambda line: None)
    rounds = read_rounds(tmp_path / "r")
    assert [one.step for one in rounds] == [0, 2, 4]  # each is learnt from twice
    assert [one.held_out is not None for one in rounds] == [True, False, True]
    assert rounds[0].informative == 4
    with (tmp_path / "r" / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"step": 6')  # by a run that was killed meanwhile
    assert read_rounds(tmp_path / "r") == rounds
    assert rounds[1].mismatch < 1e-4
    assert found.finished.outcome.last_loss is not None


@pytest.mark.parametrize("kind", ["dr_grpo", "ppo"])
def test_a_run_goes_on_inside_a_round_as_if_it_had_not_stopped(tmp_path, kind, monkeypatch):
    def by_first_token(tokenizer, config, problem, prompt, sampled):
        return Trajectory(problem, prompt, sampled, "", float(sampled.tokens[0] % 2))

    monkeypatch.setattr("cairn.align.rollout.judged", by_first_token)
    config = tiny(
        tmp_path / "whole",
        steps=4,
        algorithm=Algorithm(kind=kind),
        data=Data(sequence=48, sequences=16, microbatch=8),
        rollout=Rollout(group=8, max_tokens=12, updates=3),
    )
    align(config, log_line=lambda line: None)
    cut = msgspec.structs.replace(config, out=tmp_path / "cut", steps=2)  # of three in its round
    align(cut, log_line=lambda line: None)
    align(msgspec.structs.replace(cut, steps=4), log_line=lambda line: None)
    whole, cut = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut")
    )
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("name", UNUSED)
def test_settings_without_an_effect_are_refused(tmp_path, name):
    """A data set that is named and not read would look like a run on it."""
    config = tiny(tmp_path / "r")
    table, _, only = name.partition(".")
    ours = getattr(config, table)
    for field in msgspec.structs.fields(ours):
        if only and field.name != only:
            continue
        other = another(getattr(ours, field.name), field.type)
        with pytest.raises(ConfigError, match=f"{field.name} .*does not use it|has 2 processes"):
            msgspec.structs.replace(
                config, **{table: msgspec.structs.replace(ours, **{field.name: other})}
            )


def another(value, annotation):
    """A value of a setting that is not this one."""
    if get_origin(annotation) is Literal:
        return next(word for word in get_args(annotation) if word != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [*value, "x"] if isinstance(value, list) else Path(f"{value}x")


def test_mistakes(tmp_path, monkeypatch):
    config = tiny(tmp_path / "r")
    tokenizer, answer = prepare(config).corpus.tokenizer, Sampled([5], [-0.5], 0, True)
    with monkeypatch.context() as patch:
        patch.setattr("cairn.align.rollout.reward_of", lambda *_: math.nan)
        with pytest.raises(DataError, match="is nan"):
            judged(tokenizer, config, Problem("p", "s", "k", "m"), [1], answer)
    for changes, why in (
        ({"parallel": Layout(dp=2)}, "2 processes"),
        ({"rollout": Rollout(group=7)}, "no multiple"),
        (
            {"objective": Objective(kind="orpo")},
            r"objective\.kind is 'orpo': cairn align does not use it",
        ),
        ({"rollout": Rollout(max_tokens=48)}, "no room"),
        ({"algorithm": Algorithm(kl=0.1)}, "begins with random weights"),
    ):
        with pytest.raises(ConfigError, match=why):
            msgspec.structs.replace(config, **changes)
    with pytest.raises(ConfigError, match="model without experts"):
        align(tiny(tmp_path / "y", balance=Balance(loss=0.1)))
    with pytest.raises(DataError, match=r"--data\.sequence"):
        align(tiny(tmp_path / "x", warm_up=0, data=Data(sequence=16, sequences=8, microbatch=8)))
    assert all(isinstance(build(), Align) for build in RECIPES.values())
