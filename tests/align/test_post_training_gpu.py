"""Adapters and rollouts on a GPU: served beside their base, trained through our kernels, one copy of the weights."""

import msgspec
import pytest
import tiny_adapters
import torch
from tiny_align import BASE

from cairn.align.objective import PolicyObjective
from cairn.align.policy import Policy
from cairn.align.rollout import batches_of, documents_of, roll_out
from cairn.align.run import prepare
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.attend import Packed
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.train.config import Adapter, Model, Precision
from cairn.train.data.batch import IGNORED
from cairn.train.heads import TargetLogProbs
from cairn.train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NAME, PROMPT = "random:tiny", list(range(5, 69))


def test_adapters_in_one_step_with_their_base(tmp_path):
    """In float32 the first tokens are those of the merged model."""
    base = open_model(NAME).load("cpu", "float32").model
    export(base, tmp_path / "base")  # random weights depend on the kind of device
    merged = tiny_adapters.write(base, AdapterSpec(rank=4, alpha=8), tmp_path / "a").to("cuda")
    net = open_checkpoint(tmp_path / "base").load("cuda", torch.float32)
    config = EngineConfig(
        model=NAME, device="cuda", dtype="float32", max_model_len=512, max_num_seqs=8
    )
    opened = OpenModel(NAME, net.spec, None, (), None)
    engine = start_with(opened, Runnable(NAME, net, "a test"), config).engine
    engine.load_adapter(1, engine.read_adapter(str(tmp_path / "a")))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    asked = [Request(n, PROMPT, params, adapter=n % 2, identity=b"%d" % (n % 2)) for n in range(4)]
    for one in asked:
        engine.add(one)
    engine.run()
    assert asked[0].outputs == asked[2].outputs
    assert asked[1].outputs == asked[3].outputs != asked[0].outputs
    with torch.inference_mode():
        tokens_T = torch.tensor(PROMPT, device="cuda")
        hidden_TD = merged(
            tokens_T, torch.arange(len(PROMPT), device="cuda"), Packed([len(PROMPT)], "cuda")
        )
        assert int(merged.logits(hidden_TD[-1:]).argmax()) == asked[1].outputs[0]


@pytest.mark.parametrize("rank", [0, 4])
def test_engine_and_trainer_agree_on_one_copy(tmp_path, rank):
    """bf16, fused training, the engine's own kernels and graphs; after an update as before it."""
    shape = Model(preset="tiny-qwen3", layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64,
                  intermediate=512, context=128)  # fmt: skip
    config = msgspec.structs.replace(
        BASE, out=tmp_path, device="cuda", model=shape, adapter=Adapter(rank=rank),
        precision=Precision(kind="bfloat16"),
    )  # fmt: skip
    prepared = prepare(config)
    state = prepared.state
    state.loss = PolicyObjective(state.spec, config, prepared.fused)
    policy = Policy(state, prepared.corpus.tokenizer, 64, 48)
    for turn in range(2):
        policy.updated(turn)
        groups = roll_out(policy, config, 0, 8)
        flat = [[one._replace(reward=float(n)) for n, one in enumerate(group)] for group in groups]
        batches = [b.to("cuda") for b in batches_of(documents_of(flat, config), 64, 0, 0)]
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
