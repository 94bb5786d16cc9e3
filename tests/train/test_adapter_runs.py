"""Training an adapter: only it changes, checkpoints hold it alone, and layouts agree."""

import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import folder as checkpoint

from cairn.core.errors import ConfigError
from cairn.kernels.quantize.nf4 import dequantize_nf4, quantize_nf4
from cairn.train.checkpoint.export import adapted_model
from cairn.train.checkpoint.folder import newest
from cairn.train.config import Adapter, Checkpoint, Data, Model, Optim, Precision, Schedule, Train
from cairn.train.launch import run_local
from cairn.train.parallel.layout import Layout
from cairn.train.run import run


def recipe(out, **changes):
    fields = dict(
        steps=6,
        out=out,
        device="cpu",
        model=Model(checkpoint=checkpoint("mistral-full")),
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=2),
        optim=Optim(lr=1e-2),
        schedule=Schedule(kind="constant"),
        adapter=Adapter(rank=4),
        checkpoint=Checkpoint(every=3, in_background=False),
    )
    return Train(**(fields | changes))


def quiet(line):
    pass


def test_run_leaves_adapter_and_merged_model(tmp_path):
    finished = run(recipe(tmp_path / "r"), log_line=quiet)
    assert finished.outcome.last_loss < finished.outcome.first_loss
    found = newest(tmp_path / "r" / "checkpoints", [])
    size = sum(file.stat().st_size for file in found.rglob("*") if file.is_file())
    base = load_file(checkpoint("mistral-full") / "model.safetensors")
    assert size < 3 * sum(tensor.nbytes for tensor in base.values())
    stored = load_file(tmp_path / "r" / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 3 * 7 * 2
    assert all(tensor.abs().max() > 0 for tensor in stored.values())
    merged = load_file(tmp_path / "r" / "model" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    a, b = (stored[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    expected = base[f"{name}.weight"] + 8 * b @ a
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_a_resumed_run_is_the_same_run(tmp_path):
    whole = run(recipe(tmp_path / "a"), log_line=quiet)
    run(msgspec.structs.replace(recipe(tmp_path / "b"), steps=3), log_line=quiet)
    again = run(recipe(tmp_path / "b"), log_line=quiet)
    assert again.outcome.last_loss == pytest.approx(whole.outcome.last_loss, abs=1e-6)


def test_two_shards_agree_with_one_process(tmp_path):
    """Other layouts with frozen weights: `parallel/test_streams_and_frozen.py`."""
    one = run(recipe(tmp_path / "one", steps=3), log_line=quiet)

    def one_rank(rank, world):
        config = recipe(
            tmp_path / "two", steps=3, parallel=Layout(fsdp=2), checkpoint=Checkpoint(every=0)
        )
        return run(config, rank, quiet).outcome.last_loss

    assert run_local(2, one_rank, "cpu") == pytest.approx(one.outcome.last_loss, abs=2e-5)


def test_fused_form_agrees(tmp_path):
    plain = run(recipe(tmp_path / "p", steps=2), log_line=quiet)
    precision = Precision(kernels="fused")
    fused = run(recipe(tmp_path / "f", steps=2, precision=precision), log_line=quiet)
    assert fused.outcome.last_loss == pytest.approx(plain.outcome.last_loss, abs=1e-5)


def test_a_base_in_four_bits(tmp_path):
    """QLoRA learns as LoRA does; both forms agree; and what is merged is what was trained on."""
    found = {}
    for kernels in ("plain", "fused"):
        config = recipe(
            tmp_path / kernels,
            adapter=Adapter(rank=4, base="nf4"),
            precision=Precision(kernels=kernels),
        )
        found[kernels] = run(config, log_line=quiet).outcome
    assert found["plain"].last_loss < found["plain"].first_loss
    assert found["fused"].last_loss == pytest.approx(found["plain"].last_loss, abs=1e-4)
    base = load_file(checkpoint("mistral-full") / "model.safetensors")
    stored = load_file(tmp_path / "plain" / "adapter" / "adapter_model.safetensors")
    merged = load_file(tmp_path / "plain" / "model" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    a, b = (stored[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    rounded = dequantize_nf4(quantize_nf4(base[f"{name}.weight"]), torch.float32)
    torch.testing.assert_close(merged[f"{name}.weight"], rounded + 8 * b @ a)
    with pytest.raises(ConfigError, match="nf4 with dora"):
        recipe(tmp_path, adapter=Adapter(rank=2, base="nf4", dora=True))


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.frozen with an adapter"):
        recipe(tmp_path, model=Model(frozen=["layers.0.*"]))
    with pytest.raises(ConfigError, match="fits no linear map"):
        run(recipe(tmp_path / "r", adapter=Adapter(rank=2, targets=["w1"])), log_line=quiet)


def test_the_folder_names_its_base(tmp_path):
    run(recipe(tmp_path / "r", steps=1, adapter=Adapter(rank=2, dora=True)), log_line=quiet)
    fields = json.loads((tmp_path / "r" / "adapter" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(checkpoint("mistral-full"))
    assert fields["use_dora"] is True
    _, base = adapted_model(newest(tmp_path / "r" / "checkpoints", []))
    assert base.adapter.dora
