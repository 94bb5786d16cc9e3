"""Adapters against PEFT, the oracle, and against few-line formulas where PEFT is absent."""

import json
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import folder as checkpoint

from cairn.core.errors import CairnError, ConfigError, UnsupportedModel, WeightsError
from cairn.models.adapter import file_bytes
from cairn.models.adapter.attach import adapter_off, attach
from cairn.models.adapter.file_bytes import READERS, FileReader
from cairn.models.adapter.folder import adapter_slots, read_adapter, read_tensors, write_adapter
from cairn.models.adapter.merge import merge
from cairn.models.adapter.prepared import PreparedAdapter
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import tensors
from cairn.models.spec import ModelSpec, Rope
from cairn.models.weights import fill_random, load_model, random_model

TOKENS = torch.arange(3, 40) % 211
CASES = {
    "lora": AdapterSpec(rank=4, alpha=8),
    "rslora": AdapterSpec(rank=5, alpha=6, rslora=True, targets=("q_proj", "down_proj")),
    "dora": AdapterSpec(rank=3, alpha=12, dora=True),
    "patterns": AdapterSpec(
        rank=2,
        alpha=4,
        targets=("o_proj", "q_proj", "v_proj"),
        ranks={"layers.1.self_attn.q_proj": 6},
        alphas={"v_proj": 1.0},
        layers=(1, 2),
    ),
    "regex": AdapterSpec(rank=2, alpha=4, targets=r".*layers\.(0|2)\.mlp\.(up|gate)_proj"),
    "head": AdapterSpec(rank=2, alpha=4, targets=("lm_head", "embed_tokens", "k_proj")),
}


def loaded(family, fused=False):
    opened = open_checkpoint(checkpoint(family))
    return load_model(
        opened.spec, opened.tensors, ModelBuild("cpu", torch.float32, fused=fused)
    ).eval()


def adapted(family, spec, fused=False):
    """A model with an adapter whose B is not zero."""
    model = loaded(family, fused)
    blank = ModelBuild("meta", torch.float32, fused=fused)
    made = attach(model, model.spec, spec, blank)
    fill_random(model, adapter_slots(model), "cpu", 1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in made:
            getattr(one, "init_magnitudes", lambda: None)()
            for name, parameter in one.named_parameters():
                if name.startswith("b") or name == "a_rV":
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def scores(model):
    hidden_TD = model(TOKENS, torch.arange(len(TOKENS)), PackedDocuments([len(TOKENS)], "cpu"))
    return model.logits(hidden_TD)


def theirs(family, folder):
    peft = pytest.importorskip("peft", reason="PEFT, the oracle, is not installed")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base, folder).eval()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_merging_changes_nothing_but_the_adapter(case, fused):
    model = adapted("mistral-full", CASES[case], fused)
    before_TV, base_TV = scores(model), scores(loaded("mistral-full"))
    assert (before_TV - base_TV).abs().max() > 1e-2
    with adapter_off(model):
        assert (scores(model) - base_TV).abs().max() < 2e-6
    report = merge(model)
    assert report.maps > 0
    assert report.largest == 0
    assert not adapter_slots(model)
    assert (scores(model) - before_TV).abs().max() < 2e-6 * before_TV.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_what_we_write(case, tmp_path):
    family = "mistral-full"
    model = adapted(family, CASES[case])
    write_adapter(model, CASES[case], tmp_path / "a", base="here")
    oracle = theirs(family, tmp_path / "a")
    with torch.no_grad():
        expected_TV = oracle(TOKENS[None]).logits[0]
        merged_TV = oracle.merge_and_unload()(TOKENS[None]).logits[0]
    size = expected_TV.abs().max()
    assert (scores(model) - expected_TV).abs().max() < 1e-6 * max(1, size)
    merge(model)
    assert (scores(model) - merged_TV).abs().max() < 1e-6 * max(1, size)


def test_we_read_what_peft_writes(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT, the oracle, is not installed")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint("mistral-full"), dtype=torch.float32)
    config = peft.LoraConfig(
        r=3, lora_alpha=7, use_dora=True, target_modules="all-linear", init_lora_weights=False
    )
    oracle = peft.get_peft_model(base, config).eval()
    oracle.save_pretrained(tmp_path)
    model = loaded("mistral-full")
    read_adapter(model, tmp_path)
    with torch.no_grad():
        expected_TV = oracle(TOKENS[None]).logits[0]
    assert (scores(model) - expected_TV).abs().max() < 1e-6 * max(1, expected_TV.abs().max())


def test_folder_round_trip_and_fused_agree(tmp_path):
    spec = CASES["patterns"]
    model = adapted("qwen3", spec)
    write_adapter(model, spec, tmp_path / "a")
    again = loaded("qwen3", fused=True)
    assert read_adapter(again, tmp_path / "a") == spec
    assert (scores(again) - scores(model)).abs().max() < 1e-5


def test_rows_of_heads_lie_in_a_file_as_in_the_checkpoint(tmp_path):
    """GLM pairs neighbouring columns of a head, and rotates half of them: our rows of q and k lie in another order."""
    spec = ModelSpec(
        family="glm4", vocab=211, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48,
        context=64, post_norms=True, rope=Rope(rotated=4),
    )  # fmt: skip
    model = random_model(spec, ModelBuild("cpu"))
    before = {name: tensor.clone() for name, tensor in tensors(model)}
    adapter = AdapterSpec(rank=2, alpha=4, targets=("q_proj", "k_proj", "o_proj"))
    for one in attach(model, spec, adapter, ModelBuild("cpu")):
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    write_adapter(model, adapter, tmp_path / "a")
    stored = read_tensors(tmp_path / "a")
    again = random_model(spec, ModelBuild("cpu"))
    assert not PreparedAdapter(again, adapter, torch.float32).covers
    read_adapter(again, tmp_path / "a")
    assert torch.equal(scores(again), scores(model))
    merge(model)
    for name, merged in tensors(model):
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in stored:
            added = stored[f"{path}.lora_B.weight"] @ stored[f"{path}.lora_A.weight"]
            torch.testing.assert_close(merged, before[name] + 2 * added, msg=name)


def test_new_adapter_changes_nothing():
    for spec in (CASES["lora"], CASES["dora"]):
        model = loaded("llama-biases")
        before_TV = scores(model)
        made = attach(model, model.spec, spec, ModelBuild("meta", torch.float32))
        fill_random(model, adapter_slots(model), "cpu", 0)
        for one in made:
            one.init_magnitudes()
        assert (scores(model) - before_TV).abs().max() < 1e-5
        assert all(one.a_RK.abs().max() > 0 for one in made)


def test_merge_into_bfloat16_says_what_is_lost():
    model = adapted("mistral-full", AdapterSpec(rank=2, alpha=1e-3))
    model = model.to(torch.bfloat16)
    report = merge(model)
    assert report.lost > 0.5  # far below the last bit of most weights


BAD = {
    "modules_to_save": ["lm_head"],
    "alora_invocation_tokens": [1, 2],
    "target_parameters": ["x"],
    "lora_bias": True,
    "layer_replication": [[0, 2]],
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
    "peft_type": "IA3",
    "r": 0,
    "lora_alpha": float("nan"),
    "rank_pattern": {"q_proj": "four"},
}


@pytest.mark.parametrize("field", BAD)
def test_what_changes_the_result_is_refused_by_name(field, tmp_path):
    spec = CASES["rslora"]
    write_adapter(adapted("mistral-full", spec), spec, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: BAD[field]}))
    with pytest.raises(CairnError, match=rf"\b{field}\b"):
        read_adapter(loaded("mistral-full"), tmp_path / "a")


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigError, match="'qq_proj' fits no linear map"):
        adapted("mistral-full", AdapterSpec(targets=("q_proj", "qq_proj")))
    with pytest.raises(ConfigError, match="rank 0"):
        adapted("mistral-full", AdapterSpec(rank=0))
    with pytest.raises(UnsupportedModel, match="tied"):
        adapted("qwen3", AdapterSpec(targets=("embed_tokens",)))
    spec = AdapterSpec(rank=2, targets=("q_proj",))
    write_adapter(adapted("qwen3", spec), spec, tmp_path / "a")
    with pytest.raises(WeightsError, match=r"another base model|wants"):
        read_adapter(loaded("qwen2"), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(WeightsError, match="not finite"):
        read_adapter(loaded("qwen3"), tmp_path / "a")
    file.write_bytes(b"short")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_adapter(loaded("qwen3"), tmp_path / "a")


def test_a_file_that_cannot_be_read_is_left_by_all_threads_before_its_error_is_told(monkeypatch):
    reader, left = FileReader(torch.device("cpu")), threading.Event()
    reader._pieces = [torch.empty(1, dtype=torch.uint8)] * READERS
    reader._stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=left.set))

    def read(there, descriptor, start, file):
        if start == 0:
            raise OSError("unreadable")
        time.sleep(0.05)

    monkeypatch.setattr(file_bytes, "PIECE", 1)
    monkeypatch.setattr(file_bytes, "_read_into", read)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(OSError, match="unreadable"):
        reader._upload(0, Path("a"), 0, torch.empty(2, dtype=torch.uint8))
    assert left.is_set()  # the other thread has copied its piece
