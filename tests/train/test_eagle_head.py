"""Training of EAGLE-3 heads: passes see what they see in the engine, and a head learns what its target says."""

import itertools

import msgspec
import torch

from cairn.models import eagle
from cairn.models.attend import Cached, KVCache
from cairn.models.build import ModelBuild
from cairn.models.layer_loop import PlainStep
from cairn.models.presets import preset
from cairn.models.transformer import Transformer, rotations_of
from cairn.models.weights import random_model
from cairn.train.eagle_head import (
    Rows,
    Schedule,
    Unrolled,
    draft_tokens,
    head_for,
    head_losses,
    held_shares,
    known_tokens,
    teach,
    train_head,
)


def small() -> tuple[Transformer, eagle.EagleHead]:
    spec = msgspec.structs.replace(
        preset("tiny"),
        vocab=40,
        hidden=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        context=64,
    )
    model = random_model(spec, ModelBuild("cpu")).requires_grad_(False)
    head = eagle.random_head(spec, ModelBuild("cpu"))
    return model, head


@torch.no_grad()
def test_a_pass_sees_the_keys_that_it_sees_when_it_drafts():
    """The hidden state of each pass at one place, against contiguous caches and one chain."""
    model, head = small()
    tokens_BN = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    taught = teach(model, tokens_BN, head.spec.taps)
    rows, tokens = tokens_BN.shape
    attend, h_TD, found = Unrolled(rows, tokens), head.fuse(taught.tapped), []
    for done in range(3):
        positions_T = torch.arange(done, tokens + done).repeat(rows)
        rotations = rotations_of(head.spec.layer, range(1), positions_T, attend, h_TD.dtype)
        x_TD = model.embedding(tokens_BN.roll(-1 - done, 1).flatten())
        h_TD = head(x_TD, h_TD, PlainStep(attend, rotations))
        found.append(h_TD.unflatten(0, (rows, tokens)))
    place, chain = 4, eagle.random_head(model.spec, ModelBuild("cpu"))
    chain.load_state_dict(head.state_dict())
    rule = chain.layer.attention.plain_rule
    chain.layer.attention.plain_rule = msgspec.structs.replace(rule, layer=0)
    cache = KVCache(chain.spec.layer, 32, torch.float32, "cpu")
    g_TD = chain.fuse([x.unflatten(0, (rows, tokens))[1, : place + 1] for x in taught.tapped])
    following = tokens_BN[1, 1 : place + 2]
    for done in range(3):
        step = Cached([cache], [len(following)])
        rotations = rotations_of(chain.spec.layer, range(1), step.positions_T(), step, g_TD.dtype)
        h_TD = chain(model.embedding(following), g_TD, PlainStep(step, rotations))
        step.commit()
        torch.testing.assert_close(h_TD[-1], found[done][1, place], rtol=1e-4, atol=1e-5)
        following, g_TD = tokens_BN[1, place + 2 + done : place + 3 + done], h_TD[-1:]


def test_a_head_learns_what_its_target_says():
    model, head = small()
    generator = torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(0, 40, (4, 16), generator=generator)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    schedule = Schedule(steps=30, lr=5e-3, warmup=3)
    losses = list(train_head(head, model, itertools.repeat(Rows(tokens_BN)), schedule))
    assert len(losses) == 30
    assert all(last < 0.5 * first for first, last in zip(losses[0], losses[-1], strict=True))
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    taught = teach(model, tokens_BN, head.spec.taps)
    again = [float(loss) for loss in head_losses(head, model, Rows(tokens_BN), taught)]
    assert again[0] < 1.1 * losses[-1][0]


def test_padding_changes_no_loss():
    model, head = small()
    tokens_BN = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(2))
    counted_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    counted_BN[:, -3:] = False
    found = []
    for padding in (5, 17):
        padded_BN = torch.where(counted_BN, tokens_BN, padding)
        padded_BN[:, -3:-1] = tokens_BN[:, -3:-1]  # read by the last chains that count
        taught = teach(model, padded_BN, head.spec.taps)
        found.append(head_losses(head, model, Rows(padded_BN, counted_BN), taught))
    torch.testing.assert_close(found[0], found[1])


@torch.no_grad()
def greedy(model: Transformer, tokens_BN: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        following_B = teach(model, tokens_BN, ()).logits_BNV[:, -1].argmax(-1)
        tokens_BN = torch.cat((tokens_BN, following_B[:, None]), 1)
    return tokens_BN


def test_a_head_of_few_tokens_drafts_what_its_target_says():
    """Texts that the target writes at temperature 0, of which the head knows no other tokens."""
    model, _ = small()
    tokens_BN = greedy(model, torch.tensor([[3, 30], [7, 12]]), 18)
    counted_BN = torch.arange(20).repeat(2, 1) >= 1  # behind the two tokens that were given
    rows, written = Rows(tokens_BN, counted_BN), tokens_BN[:, 2:]
    known_K = draft_tokens(written, 40, len(written.unique()))
    assert known_K.tolist() == written.unique().tolist()
    head = head_for(model, known_K)
    assert torch.equal(known_tokens(head), known_K)
    assert torch.equal(head.head.weight, (model.head or model.embedding).weight[known_K])
    list(train_head(head, model, itertools.repeat(rows), Schedule(60, 5e-3, 3)))
    shares = held_shares(head, model, rows)
    assert sorted(shares, reverse=True) == shares
    assert shares[0] > 0.9
