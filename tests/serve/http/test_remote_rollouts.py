"""Rollouts by a server elsewhere: tokens, scores and versions are those of the engine on the trainer's own weights."""

import live_server
import msgspec
import pytest
import torch

from cairn.align.config import Align, Rollout
from cairn.align.policy import Policy
from cairn.align.remote import RemotePolicy
from cairn.align.run import prepare
from cairn.core.errors import ConfigError, RequestError
from cairn.train.config import Adapter, Data, Model


def recipe(folder, url):
    return Align(
        steps=4,
        device="cpu",
        model=Model(checkpoint=folder),
        data=Data(sequence=48, sequences=8, microbatch=8),
        rollout=Rollout(group=8, max_tokens=12, engines=[url], timeout_s=60.0),
    )


def test_answers_and_versions_are_those_of_one_copy(tiny_folder):
    with live_server.live(tiny_folder, admin_endpoints=True, weights="float") as server:
        config = recipe(tiny_folder, str(server.url))
        prepared = prepare(config)
        state, tokenizer = prepared.state, prepared.corpus.tokenizer
        here, there = Policy(state, tokenizer, 8, 48), RemotePolicy(state, tokenizer, config)
        prompts, seeds, seen = [[5, 6, 7], [9, 8], [11, 12, 13, 14]], [1, 2, 3], []
        for version in range(3):
            for policy in (here, there):
                policy.updated(version)
            for asked in (seeds, None):
                ours = here.sample(prompts, 8, asked)
                theirs = there.sample(prompts, 8, asked)
                assert [one.tokens for one in theirs] == [one.tokens for one in ours]
                assert [one.stopped for one in theirs] == [one.stopped for one in ours]
                assert {one.version for one in theirs} == {version}
                for one, other in zip(ours, theirs, strict=True):
                    assert other.logp == pytest.approx(one.logp, abs=1e-4)
            seen.append([one.tokens for one in ours])
            with torch.no_grad():
                for weight in here.model.parameters():
                    weight.add_(0.2 * torch.randn_like(weight))
        assert seen[0] != seen[1] != seen[2]  # each with the weights of its own version


def test_what_is_wrong_is_said(tiny_folder):
    with live_server.live(tiny_folder) as server:  # without --admin-endpoints
        config = recipe(tiny_folder, str(server.url))
        prepared = prepare(config)
        policy = RemotePolicy(prepared.state, prepared.corpus.tokenizer, config)
        with pytest.raises(RequestError, match="admin-endpoints"):
            policy.updated(0)
    with pytest.raises(RequestError, match="does not answer"):
        policy.updated(0)
    with pytest.raises(ConfigError, match=r"rollout\.engines"):
        msgspec.structs.replace(config, adapter=Adapter(rank=4))
