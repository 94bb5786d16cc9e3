"""Adapters and rollouts on a GPU: served beside their base, trained through our kernels, one copy of the weights."""

import msgspec
import pytest
import tiny_adapters
import torch
from tiny_align import BASE

from cairn.align.config import Rollout
from cairn.align.consistent import NOW, scored
from cairn.align.objective import PolicyObjective
from cairn.align.policy import Policy
from cairn.align.rollout import batches_of, documents_of, roll_out
from cairn.align.run import prepare
from cairn.kernels.norm.rmsnorm import FEW_ROWS
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine import adapter_slots
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.train.config import Adapter, Model, Precision
from cairn.train.data.batch import IGNORED
from cairn.train.heads import TargetLogProbs
from cairn.train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NAME, PROMPT = "random:tiny", list(range(5, 69))


def with_adapters(net, folders, **how):
    config = EngineConfig(
        model=NAME, device="cuda", dtype="float32", max_model_len=512, max_num_seqs=8, **how
    )
    opened = OpenModel(NAME, net.spec, None, (), None)
    engine = start_with(opened, Runnable(NAME, net, "a test"), config).engine
    for number, folder in folders.items():
        engine.load_adapter(number, engine.read_adapter(str(folder)))
    return engine


def answered(engine, turn=0):
    """Six requests of two adapters and the base in one step: tokens and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    asked = [
        Request(10 * turn + n, PROMPT, params, adapter=n % 3, identity=b"%d" % (n % 3))
        for n in range(6)
    ]
    logp = {one: [] for one in asked}
    for one in asked:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            logp[output.request] += [found.logprob for found in output.logprobs or ()]
    return [(one.outputs, logp[one]) for one in asked]


def test_adapters_in_one_step_with_their_base(tmp_path, monkeypatch):
    """By slots, in graphs, kernel by kernel, with A behind the weights: what the merged models say, but for tf32."""
    base = open_model(NAME).load("cpu", "float32").model
    export(base, tmp_path / "base")  # random weights depend on the kind of device
    folders, merged = {}, {}
    for number, spec in ((1, AdapterSpec(rank=4, alpha=8)), (2, AdapterSpec(rank=9, alpha=18))):
        folders[number] = tmp_path / str(number)
        fresh = open_checkpoint(tmp_path / "base").load("cpu", torch.float32)
        merged[number] = tiny_adapters.write(fresh, spec, folders[number], number).to("cuda")
    net = open_checkpoint(tmp_path / "base").load("cuda", torch.float32)
    merged[0] = net
    engine = with_adapters(net, folders)
    runs = [answered(engine, turn) for turn in range(2)]  # the second from graphs
    eager = answered(with_adapters(net, folders, enforce_eager=True))
    monkeypatch.setattr(adapter_slots, "MANY_ROWS", 1)
    # The last: weights move to where there is room.
    beside = with_adapters(net, folders, lora_room=2)
    runs += [answered(beside, turn) for turn in range(2)]
    assert beside.runner.adapters.slots.staged().positions == 8
    assert any(shape.adapters for shape in engine.runner.graphs._captured)
    for found in (*runs, eager):
        assert len({tuple(tokens) for tokens, _ in found[:3]}) == 3
        for n, (tokens, logp) in enumerate(found):
            close_to(merged[n % 3], tokens, logp)


def close_to(model, tokens, logp):
    with torch.inference_mode():
        tokens_T = torch.tensor([*PROMPT, *tokens], device="cuda")
        positions_T = torch.arange(len(tokens_T), device="cuda")
        hidden_TD = model(tokens_T, positions_T, PackedDocuments([len(tokens_T)], "cuda"))
        all_TV = model.logits(hidden_TD)[len(PROMPT) - 1 : -1].log_softmax(-1)
        exact_T = all_TV.gather(1, tokens_T[len(PROMPT) :, None])[:, 0]
    assert (exact_T - torch.tensor(logp, device="cuda")).abs().max() < 0.02
    assert (all_TV.amax(1) - exact_T).max() < 0.02  # what was chosen is the likeliest, or as good


@pytest.mark.parametrize("rank", [0, 4])
def test_engine_and_trainer_agree_on_one_copy(tmp_path, rank):
    """bf16, fused training, the engine's own kernels and graphs; after an update as before it."""
    shape = Model(preset="tiny-qwen3", layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64,
                  intermediate=512, context=128)  # fmt: skip
    config = msgspec.structs.replace(
        BASE,
        out=tmp_path,
        device="cuda",
        model=shape,
        adapter=Adapter(rank=rank),
        precision=Precision(kind="bfloat16"),
    )
    prepared = prepare(config)
    state = prepared.state
    state.loss = PolicyObjective(state.spec, config, prepared.fused)
    policy = Policy(state, prepared.corpus.tokenizer, 64, 48)
    for turn in range(2):
        policy.updated(turn)
        groups = roll_out(policy, config, 0, 8)
        flat = [[one._replace(reward=float(n)) for n, one in enumerate(group)] for group in groups]
        made = batches_of(documents_of(flat, config), 64, 0, 0, shared=turn > 0)
        batches = [batch.to("cuda") for batch in made]
        found = state.parallel.forward(batches, TargetLogProbs(state.spec, fused=prepared.fused))
        for values, batch in zip(found, batches, strict=True):
            there_T = batch.targets_T != IGNORED
            apart = (values["logp"] - batch.extra["old"])[there_T].abs()
            print(
                f"rank {rank} turn {turn}: mismatch {apart.mean():.2e}, largest {apart.max():.2e}"
            )
            assert apart.mean() < 0.02
        for _ in range(3):
            train_step(state, batches)


def test_the_engine_scores_answers_in_the_bits_that_it_sampled_them_with(tmp_path):
    """bf16, rows that come and go, prompts found in the cache, few tokens in a step and many; after an update, too."""
    config = msgspec.structs.replace(
        BASE,
        out=tmp_path,
        device="cuda",
        model=Model(preset="tiny-qwen3", layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64,
                    intermediate=512, context=128),
        precision=Precision(kind="bfloat16"),
        rollout=Rollout(group=8, max_tokens=24),
    )  # fmt: skip
    prepared = prepare(config)
    state = prepared.state
    state.loss = PolicyObjective(state.spec, config, prepared.fused)
    policy = Policy(state, prepared.corpus.tokenizer, 96, 48, consistent=True)
    seen = []
    for turn in range(2):
        policy.updated(turn)
        groups = roll_out(policy, config, 0, 16)
        flat = [[one._replace(reward=float(n)) for n, one in enumerate(group)] for group in groups]
        documents = scored(policy, documents_of(flat, config))
        assert sum(len(one.tokens_T) for one in documents) > 2 * FEW_ROWS
        assert all(torch.equal(one.extra[NOW], one.extra["old"]) for one in documents)
        seen.append(torch.cat([one.extra["old"] for one in documents]))
        state.loss.watch.on = True
        train_step(state, [batch.to("cuda") for batch in batches_of(documents, 64, 0, 0, True)])
        assert state.loss.watch.read() == (0.0, 0.0)
    assert not torch.equal(*(one[:100] for one in seen))
