"""PPO's value head: it learns what answers earn, leaves bad steps out, and goes on after a checkpoint as if without."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from tiny_align import tiny

from cairn.align.config import Algorithm
from cairn.align.objective import PolicyObjective
from cairn.align.rollout import batches_of, document
from cairn.align.rollout_batches import RolloutBatches
from cairn.align.value_head import VALUE, ValueHead, with_credit
from cairn.train.data.batch import IGNORED
from cairn.train.describe import shape_of
from cairn.train.next_batches import StatefulBatches
from cairn.train.precision import LossScale
from cairn.train.reference import ReferredBatches

PPO = Algorithm(kind="ppo", value_weight=1.0, value_lr=0.05)
PLAIN = LossScale(False, "cpu")
REWARD = 0.7


def new_head():
    return ValueHead(8, PPO, "cpu")


def backward(head, times=1.0):
    """The gradients of one answer of two tokens that earns REWARD; what the head said of them."""
    made = document([1, 2], [5, 6], [-0.5] * 2, 0.0, 0.5)
    torch.manual_seed(0)
    hidden_TD = torch.randn(len(made.tokens_T), 8)
    value_T = head(hidden_TD, None, None)[VALUE].detach()
    (batch,) = batches_of(with_credit([made], [REWARD], [value_T], 0.95), 1, 0, 0)
    rest_TD = torch.zeros(len(batch.tokens_T) - len(hidden_TD), 8)
    (times * head.loss(torch.cat((hidden_TD, rest_TD)), None, batch)).backward()
    return value_T[made.targets_T != IGNORED]


def test_values_become_the_reward():
    head = new_head()
    assert backward(head).tolist() == [0.0, 0.0]
    for _ in range(100):
        head.step(1.0, PLAIN)
        values_T = backward(head)
    assert values_T.tolist() == pytest.approx([REWARD] * 2, abs=0.02)


@pytest.mark.parametrize(("times", "vetoed"), [(float("nan"), False), (1.0, True)])
def test_a_bad_step_is_left_out(times, vetoed):
    head = new_head()
    backward(head, times)
    head.step(1.0, PLAIN, vetoed)
    assert head.state_dict() == new_head().state_dict()


def test_gradients_have_the_longest_norm_and_no_loss_scale():
    head, scale = new_head(), LossScale(True, "cpu")
    backward(head)
    plain = [gradient.clone() for gradient in head._gradients()]
    norm = float(torch.cat([gradient.flatten() for gradient in plain]).norm())
    head.optimizer.zero_grad()
    backward(head, float(scale.factor()))
    head.step(norm / 2, scale)
    (averages, _) = head.state_dict()["averages"]  # after one step a tenth of the gradient
    assert averages["exp_avg"] == pytest.approx((plain[0] / 20).tolist(), rel=1e-3)


@pytest.mark.parametrize("kl", [False, True])
def test_a_resumed_run_has_the_head_that_was_saved(tmp_path, kl):
    config = tiny(tmp_path, algorithm=PPO, warm_up=4)
    policy = SimpleNamespace(tokenizer=SimpleNamespace(pad_id=0))
    heads, sources = [], []
    for _ in range(2):
        objective = PolicyObjective(shape_of(config.model), config)
        heads.append(objective.value)
        inner = RolloutBatches(config, policy, objective, print)
        sources.append(ReferredBatches(inner, None) if kl else inner)
        assert isinstance(sources[-1], StatefulBatches)
    width = len(heads[0].weight_D)
    for _ in range(3):
        heads[0].step(1.0, PLAIN)
        heads[0].weight_D.grad, heads[0].bias.grad = torch.randn(width), torch.tensor(0.5)
    heads[1].weight_D.grad = torch.ones(width)  # of before, and forgotten
    saved = msgspec.json.decode(msgspec.json.encode(sources[0].state_dict()))
    sources[1].load_state_dict([saved])
    for head in heads:
        head.step(1.0, PLAIN)
    assert heads[0].weight_D.abs().max() > 0
    assert torch.equal(heads[0].weight_D, heads[1].weight_D)
    assert heads[0].state_dict() == heads[1].state_dict()


def test_a_head_saved_without_averages_is_read():
    head = new_head()
    backward(head)
    head.step(1.0, PLAIN)
    head.load_state_dict({"weight": [1.0] * 8, "bias": 2.0})
    assert (head.state_dict()["averages"], head.bias.item()) == ([], 2.0)
