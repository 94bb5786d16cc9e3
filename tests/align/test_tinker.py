"""Tinker's API over one copy of the weights: the public SDK as the client, torch and the SDK's messages as oracles."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.align.tinker.frontend import SILENT_S, Frontend
from cairn.align.tinker.losses import AT, LOSSES, TinkerRule
from cairn.align.tinker.protobuf import read_fields
from cairn.align.tinker.routes import application
from cairn.align.tinker.samplers import HELD, Samplers, own_folder
from cairn.align.tinker.service import Future, Service
from cairn.align.tinker.shared_base import Settings, SharedBase, Weights
from cairn.align.tinker.wire import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    Pass,
    Passed,
    Sample,
    SampledTokens,
    Samples,
    TextChunk,
    TinkerSampling,
    read_pass,
    write_passed,
    write_samples,
)
from cairn.cli.main import main
from cairn.core.errors import ConfigError, RequestError
from cairn.models.adapter.folder import read_adapter
from cairn.models.checkpoint import open_checkpoint
from cairn.models.hub import resolve
from cairn.serve.engine.sampling_params import SamplingParams

PROGRAM = Path(__file__).with_name("tinker_program.py")
MODEL = "cairn-tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("tinker")
    return SharedBase(
        Settings(model=MODEL, out=out, device="cpu", max_rank=8, max_model_len=64, max_num_seqs=4)
    )


def passing(ids: list[int], **changes) -> Pass:
    tokens = np.array(ids)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(ids) - 1, np.float32)}
    fields = dict(model_id="m", seq_id=1, loss="cross_entropy", settings={}, forward_only=False)
    return Pass(data=[Datum(tokens[:-1], inputs)], **{**fields, **changes})


def test_two_runs_that_take_turns_are_two_runs_alone(base):
    texts = [[5, 9, 3, 7, 4], [8, 2, 6, 11, 12, 5]]

    def trained(order):
        runs = [base.create(LoraConfig(rank=4, seed=seed)) for seed in (1, 2)]
        for who in order:
            base.run_pass(runs[who], passing(texts[who]))
            base.step(runs[who], AdamParams(learning_rate=1e-2))
        return [base.weights_of(run).tensors for run in runs]

    for alone, shared in zip(trained([0, 0, 1, 1]), trained([0, 1, 0, 1]), strict=True):
        assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_gradients_wait_for_the_step_and_a_smaller_rank_stays_small(base):
    run, ids = base.create(LoraConfig(rank=3, seed=5, train_mlp=False)), [5, 9, 3, 7, 4]
    base.run_pass(run, passing(ids))
    other = base.create(LoraConfig(rank=8, seed=6))
    base.run_pass(other, passing(ids))  # in between
    base.run_pass(run, passing(ids, forward_only=True))
    base.step(run, AdamParams(learning_rate=1e-2))
    changed = base.weights_of(run).tensors
    for name, tensor in changed.items():
        if name.endswith(".a_RK"):
            assert not tensor.unflatten(0, (-1, 8))[:, 3:].any()
        elif ".attention." in name:
            assert tensor[:, :3].any()
            assert not tensor[:, 3:].any()
        else:
            assert not tensor.any()  # train_mlp=False


def test_what_cannot_be_trained_is_refused(base):
    run = base.create(LoraConfig(rank=2))
    with pytest.raises(RequestError, match="has no 'logprobs'"):
        base.run_pass(run, passing([1, 2, 3], loss="ppo"))
    with pytest.raises(RequestError, match="no setting 'beta'"):
        base.run_pass(run, passing([1, 2, 3], settings={"beta": 1.0}))
    with pytest.raises(RequestError, match="70 tokens; 1 to 64"):
        base.run_pass(run, passing([1] * 71))
    with pytest.raises(RequestError, match="target ids from 2 to 999999"):
        base.run_pass(run, passing([1, 2, 999999]))
    bad = passing([1, 2, 3])
    bad.data[0].inputs["weights"][:] = np.nan
    base.run_pass(run, bad)
    before = base.weights_of(run).tensors
    with pytest.raises(RequestError, match="changed nothing"):
        base.step(run, AdamParams())
    assert all(torch.equal(one, before[n]) for n, one in base.weights_of(run).tensors.items())


@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_those_of_torch(name):
    torch.manual_seed(0)
    logp_T = torch.randn(40).double().neg().abs().requires_grad_()
    streams = {"weights": torch.randn(40).double(), "advantages": torch.randn(40).double()}
    streams["logprobs"] = logp_T.detach() + 0.3 * torch.randn(40).double()
    r_T, a_T = (logp_T - streams["logprobs"]).exp(), streams["advantages"]
    wanted = {
        "cross_entropy": -(streams["weights"] * logp_T),
        "importance_sampling": -(r_T * a_T),
        "ppo": -torch.minimum(r_T * a_T, r_T.clamp(0.8, 1.2) * a_T),
        "cispo": -(r_T.clamp(0.8, 1.2).detach() * a_T * logp_T),
        "dro": -(a_T * logp_T - 0.025 * (logp_T - streams["logprobs"]) ** 2),
    }[name]
    (slope_T,) = torch.autograd.grad(wanted.sum(), logp_T)
    rule = TinkerRule(name, {}, 40)
    got_T, mine_T = rule(logp_T.detach(), {**streams, AT: torch.arange(40)})
    torch.testing.assert_close(got_T.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine_T.double(), slope_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rule.logp_T, logp_T.detach().float())


numbers = st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=5)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(numbers, min_size=1, max_size=4), low=st.floats(0, 1), seq=st.integers(1, 9**9)
)
def test_messages_are_those_of_the_sdk(rows, low, seq):
    public = pytest.importorskip("tinker.proto.tinker_public_pb2", reason="pip install tinker")
    sent = public.ForwardBackwardRequest(model_id="m", seq_id=seq, loss_fn="ppo", forward_only=True)
    sent.loss_fn_config["clip_low_threshold"] = low
    for row in rows:
        datum = sent.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(len(row), dtype="<i4").tobytes()
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dense, tensor.dtype = np.array(row, "<f4").tobytes(), public.DTYPE_FLOAT32
        tensor.shape.append(len(row))
    got = read_pass(sent.SerializeToString())
    assert (got.model_id, got.seq_id, got.loss, got.forward_only) == ("m", seq, "ppo", True)
    assert got.settings == {"clip_low_threshold": low}
    assert [one.inputs["weights"].tolist() for one in got.data] == rows
    assert [one.tokens.tolist() for one in got.data] == [list(range(len(row))) for row in rows]

    passed = public.ForwardBackwardOutput()
    arrays = [np.array(row, np.float32) for row in rows]
    passed.ParseFromString(write_passed(Passed(arrays, {"loss:sum": low})))
    assert dict(passed.metrics) == {"loss:sum": low}
    batched = passed.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(batched.data, "<f4").tolist() == [one for row in rows for one in row]
    assert np.diff(np.frombuffer(batched.offsets, "<i8")).tolist() == [4 * len(r) for r in rows]

    samples = public.SampleResponse()
    sequences = [SampledTokens(list(range(len(r))), r, True, [[(1, -0.5)]] * len(r)) for r in rows]
    samples.ParseFromString(write_samples(Samples(sequences, [None, *rows[0]], None, 3)))
    assert [np.frombuffer(one.logprobs, "<f4").tolist() for one in samples.sequences] == rows
    assert np.isnan(np.frombuffer(samples.prompt_logprobs, "<f4")[0])
    assert samples.prompt_cache_hit_tokens == 3


@given(st.binary(max_size=40))
def test_noise_is_refused_and_not_believed(noise):
    for read in (read_fields, read_pass):
        with contextlib.suppress(RequestError):
            read(noise)


def test_work_of_a_model_is_done_by_number(base):
    service = Service(base)
    done: list[int] = []
    try:
        later = [service.submit("m", at, lambda at=at: done.append(at) or {}) for at in (3, 2)]
        assert not later[0].done.wait(0.2)
        first = service.submit("m", 1, lambda: done.append(1) or {})
        assert later[0].done.wait(30)
        assert done == [1, 2, 3]
        assert service.submit("m", 1, lambda: done.append(1) or {}) is first  # its answer was lost
        failed = service.submit("m", 4, lambda: 1 / 0)
        assert failed.done.wait(30)
        assert failed.answer == ("ZeroDivisionError: division by zero", "server")
    finally:
        service.close()
    assert done == [1, 2, 3]


def test_answers_that_need_no_model_have_the_form_that_the_sdk_reads(base):
    """It asks for these by itself, and reports what it cannot read in the log of a loop that runs for minutes."""
    types = pytest.importorskip("tinker.types", reason="pip install tinker: the client of the API")
    front = Frontend(SimpleNamespace(base=base))
    for form, handle in (
        (types.TelemetryResponse, front.telemetry),
        (types.HealthResponse, front.nothing),
        (types.ClientDynamicConfigResponse, front.nothing),
        (types.ClientConfigResponse, front.config),
        (types.GetServerCapabilitiesResponse, front.capabilities),
    ):
        form.model_validate(asyncio.run(handle(b"{}")))


def test_a_request_that_fails_leaves_nothing_behind(base):
    service = Service(base)
    try:
        prompt = ModelInput([TextChunk([5, 9, 3])])
        fine = Sample(prompt, TinkerSampling(max_tokens=3, temperature=0.0))
        late = Sample(prompt, TinkerSampling(max_tokens=3, seed=(1 << 63) - 1), num_samples=2)
        with pytest.raises(RequestError, match="the token 999999"):
            service.sample("a", base.blank, Sample(prompt, TinkerSampling(stop=[999999])))
        with pytest.raises(RequestError, match="num_samples is 1000000000"):
            service.sample("a", base.blank, Sample(prompt, TinkerSampling(), num_samples=10**9))
        answers = [
            service.sample(name, base.blank, one) for name, one in (("b", late), ("c", fine))
        ]
        for one in answers:
            assert one.done.wait(60)
            assert isinstance(one.answer, bytes), one.answer
    finally:
        service.close()
    bad = (prompt.tokens(), SamplingParams(max_tokens=3, logit_bias={10**6: 1.0}))
    with pytest.raises(RequestError):
        base.policy.generate([(prompt.tokens(), SamplingParams(max_tokens=3)), bad])
    assert not base.policy.engine.has_work


def test_sessions_that_are_not_used_wait_in_files(tmp_path):
    samplers = Samplers(tmp_path / "sessions")
    for at in range(HELD + 3):
        samplers.put(f"s{at}", Weights({"x": torch.full((2,), float(at))}, at))
    assert sorted(path.stem for path in tmp_path.rglob("*.safetensors")) == ["s0", "s1", "s2"]
    for at in (0, 5, 1, 0):
        assert samplers.get(f"s{at}").tensors["x"].tolist() == [at, at]
        assert samplers.get(f"s{at}").version == at
    with pytest.raises(RequestError, match="no sampling session 'other'"):
        samplers.get("other")


def test_nothing_is_left_of_a_client_that_went_away(base):
    forgotten: list[str] = []
    front = Frontend(SimpleNamespace(base=base, forget=forgotten.append))
    front.sessions = {"session-a": time.monotonic() - SILENT_S - 1, "session-b": time.monotonic()}
    for name in ("a", "b"):  # the second model could not be made
        models = [f"session-{name}-model-{at}" for at in range(2)]
        front.models |= dict.fromkeys(models, Future(name))
        front.runs[models[0]] = object()
        for at in range(HELD):
            front.samplers.put(f"{models[0]}-sampler-{at}", Weights({"x": torch.zeros(1)}, at))
    assert len(list(front.samplers.folder.iterdir())) == HELD
    asyncio.run(front.create_session(b"{}"))
    assert forgotten == ["session-a-model-0", "session-a-model-1"]
    assert list(front.runs) == ["session-b-model-0"]
    assert list(front.models) == ["session-b-model-0", "session-b-model-1"]
    assert not list(front.samplers.folder.iterdir())
    assert front.samplers.get("session-b-model-0-sampler-0").version == 0
    with pytest.raises(RequestError, match="no sampling session"):
        front.samplers.get("session-a-model-0-sampler-0")


def test_everybody_who_waits_for_an_answer_is_told():
    future, told = Future("f"), []

    def first() -> None:
        future.waiters.remove(first)
        told.append("first")

    future.waiters += [first, lambda: told.append("second")]
    future.settle({})
    assert told == ["first", "second"]


@pytest.fixture(scope="module")
def seen(base):
    pytest.importorskip("tinker", reason="pip install tinker: the client of the API")
    service = Service(base)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(application(Frontend(service)), log_level="warning", lifespan="off")
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environment = os.environ | {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        try:
            ended = subprocess.run(
                [sys.executable, str(PROGRAM), url, MODEL],
                capture_output=True,
                text=True,
                timeout=280,
                env=environment,
                check=False,
            )
        finally:
            server.should_exit = True
            thread.join()
            service.close()
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.timeout(300)  # the program runs for the first of these tests
def test_a_program_of_the_sdk_trains_and_samples(seen):
    assert seen["models"] == [MODEL]
    assert seen["losses"][-1] < 0.2 * seen["losses"][0]
    assert seen["logprobs"][0] == seen["logprobs"][1] + 2
    assert seen["answer"].startswith(" Zorbaville")
    assert seen["stopped"][0] in seen["answer"]
    assert "bav" in seen["stopped"][0]
    assert seen["stopped"][1] == "stop"
    assert seen["mismatch"] < 1e-4


def test_a_sampler_keeps_its_weights_while_training_goes_on(seen):
    before, after = seen["punished"]
    assert seen["base"] < after < before - 1e-4
    assert seen["kept"] == pytest.approx(before, abs=1e-5)


def test_a_saved_state_goes_on_as_the_run_itself(seen):
    assert seen["resumed"][0] == pytest.approx(seen["resumed"][1], rel=1e-5)


def test_saved_weights_are_an_adapter_for_anybody(seen, base):
    folder = base.settings.out / seen["path"].removeprefix("tinker://")
    net = open_checkpoint(resolve(MODEL)).load("cpu", torch.float32)
    spec = read_adapter(net, folder)
    assert (spec.rank, spec.alpha) == (8, 32.0)


def test_mistakes_are_answered_with_what_to_do(seen):
    unknown, missing, twice, rank = seen["errors"]
    assert "no loss is called 'no such loss'" in unknown
    assert "has no 'logprobs', which the loss ppo needs" in missing
    assert "/weights/one exists" in twice
    assert "rank 999, and this server has adapters up to rank 8" in rank


def test_a_port_for_everybody_needs_a_key(capsys):
    assert main(["tinker", MODEL, "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--api-key" in capsys.readouterr().err
    assert main(["tinker", "no-such-model", "--port", "0"]) == 2
    assert "no-such-model" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="sees pictures"):
        SharedBase(Settings(model="cairn-tiny-vl", out=Path("unused"), device="cpu"))


def test_weights_of_a_killed_server_are_removed_and_those_of_a_living_one_stay(tmp_path):
    parent = tmp_path / "sampling_sessions"
    with own_folder(parent) as living:
        for name in ("a", "b"):  # a: of a server that was killed, with its lock file
            (parent / name).mkdir()
            (parent / name / "x.safetensors").write_bytes(b"1")
        (parent / "a" / ".running").write_text("process 1 on here")
        (parent / "old.safetensors").write_bytes(b"1")
        with own_folder(parent) as own:
            assert {path.name for path in parent.iterdir()} == {living.name, own.name}
        assert [path.name for path in parent.iterdir()] == [living.name]
    assert not list(parent.iterdir())
