"""Rollouts by servers elsewhere: tokens, scores and versions are those of the engine on the trainer's own weights."""

from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import live_server
import msgspec
import pytest
import torch

from cairn.align.config import Align, Rollout
from cairn.align.policy import Policy
from cairn.align.remote import RemotePolicy
from cairn.align.run import prepare
from cairn.core.errors import ConfigError, RequestError
from cairn.serve.http.server.keys import Keys
from cairn.train.config import Adapter, Data, Model, Precision


def recipe(folder, *urls, **more):
    return Align(
        steps=4,
        device="cpu",
        model=Model(checkpoint=folder),
        data=Data(sequence=48, sequences=8, microbatch=8),
        rollout=Rollout(group=8, max_tokens=12, engines=list(urls), timeout_s=60.0),
        **more,
    )


def policy_of(config):
    prepared = prepare(config)
    return RemotePolicy(prepared.state, prepared.corpus.tokenizer, config)


def live(folder, **more):
    return live_server.live(folder, admin_endpoints=True, weights="float", **more)


def test_answers_and_versions_are_those_of_one_copy(tiny_folder, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("CAIRN_API_KEY", "sk-ann")  # may not send weights
    monkeypatch.setenv("CAIRN_ADMIN_KEY", "root")
    with live(tiny_folder, keys=Keys([("ann", "sk-ann")], admin="root")) as server:
        config = recipe(tiny_folder, str(server.url), str(server.url))  # two turns, two readers
        prepared = prepare(config)
        state, tokenizer = prepared.state, prepared.corpus.tokenizer
        here, there = Policy(state, tokenizer, 8, 48), RemotePolicy(state, tokenizer, config)
        prompts, seeds, seen = [[5, 6, 7], [9, 8], [11, 12, 13, 14]], [1, 2, 3], []
        for step in (0, 1, 1):  # as after a rewind: the number comes again, with other weights
            for policy in (here, there):
                policy.updated(step)
            for asked in (seeds, None):
                ours = here.sample(prompts, 8, asked)
                theirs = there.sample(prompts, 8, asked)
                assert [one.tokens for one in theirs] == [one.tokens for one in ours]
                assert [one.stopped for one in theirs] == [one.stopped for one in ours]
                assert {one.version for one in theirs} == {one.version for one in ours} == {step}
                for one, other in zip(ours, theirs, strict=True):
                    assert other.logp == pytest.approx(one.logp, abs=1e-4)
            seen.append([one.tokens for one in ours])
            state.samples += config.data.sequences
            with torch.no_grad():
                for weight in here.model.parameters():
                    weight.add_(0.2 * torch.randn_like(weight))
        assert seen[0] != seen[1] != seen[2]  # each with the weights of its own time
        server.http.headers["authorization"] = "Bearer root"
        server.http.post("/update_weights", json={"version": 1, "source": str(tiny_folder)})
        with pytest.raises(RequestError, match=r"has answered with weights 1, and not \d+"):
            there.sample(prompts, 8, seeds)
        there.updated(1)  # is sent again, although neither step nor samples are others
        there.sample(prompts, 8, seeds)
        there.close()


def test_what_is_wrong_is_said(tiny_folder):
    with live_server.live(tiny_folder) as server:  # without --admin-endpoints
        config = recipe(tiny_folder, str(server.url))
        policy = policy_of(config)
        with pytest.raises(RequestError, match="admin-endpoints"):
            policy.updated(0)
    with pytest.raises(RequestError, match="does not answer"):
        policy.updated(0)
    with pytest.raises(ConfigError, match=r"rollout\.engines"):
        msgspec.structs.replace(config, adapter=Adapter(rank=4))


def test_bits_of_another_number_type_are_not_taken(tiny_folder):
    with live(tiny_folder, dtype="float16") as server:
        precision = Precision(kind="bfloat16", masters=True)
        policy = policy_of(recipe(tiny_folder, str(server.url), precision=precision))
        with pytest.raises(RequestError, match=r"expected .* of float16, it has .* of bfloat16"):
            policy.updated(0)


def test_what_is_no_engine_is_named(tiny_folder):
    class Page(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *about):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.handle_request)
        policy = policy_of(recipe(tiny_folder, f"http://127.0.0.1:{server.server_port}"))
        with pytest.raises(RequestError, match=r"something else than an engine does .*<html>"):
            policy.updated(0)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"engines": ["http://h:abc"]}, "'http://h:abc'"),
        ({"engines": ["h:80"]}, "'h:80'"),
        ({"listen": "0.0.0.0"}, "no address that a server could fetch weights from"),
        ({"listen": "::"}, "no address that a server could fetch weights from"),
        ({"engines": ["http://10.0.0.7:8000"]}, r"127\.0\.0\.1, which only this machine reaches"),
    ],
)
def test_addresses_that_cannot_work_are_refused(said, match):
    with pytest.raises(ConfigError, match=match):
        Rollout(**said)
    Rollout(engines=["http://10.0.0.7:8000"], listen="10.0.0.1")
