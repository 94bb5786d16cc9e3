"""What runs is what was asked for, and where nobody asked, the choice says why."""

import pytest
import tiny_checkpoints
import tiny_tokenizers
import torch

from cairn.core.errors import CairnError
from cairn.core.units import format_bytes, format_count
from cairn.hw import cpu_types
from cairn.models.checkpoint import check_device, open_checkpoint
from cairn.models.runnable import choose_dtype, open_model

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("stored", "quantised", "device", "asked", "features", "chosen", "why"),
    [
        (F32, False, "cpu", "auto", (), F32, "the weights have this type"),
        (F32, False, "cpu", "bfloat16", (), BF16, "as asked"),
        (BF16, False, "cpu", "float32", ("amx-bf16",), F32, "as asked"),
        (BF16, False, "cpu", "auto", ("avx2",), F32, "this CPU does not multiply in bfloat16"),
        (BF16, False, "cpu", "auto", ("amx-bf16",), BF16, "the weights have this type"),
        (F16, False, "cpu", "auto", (), F32, "CPUs multiply faster in float32 than in float16"),
        (F32, False, "cuda", "auto", (), BF16, "a GPU multiplies fastest in bfloat16"),
        (F16, False, "cuda", "auto", (), F16, "the weights have this type"),
        (F16, True, "cuda:1", "auto", (), BF16, "a GPU multiplies fastest in bfloat16"),
        (BF16, False, "cuda", "auto", (), BF16, "the weights have this type"),
    ],
)
def test_the_type_is_chosen_for_a_reason(
    monkeypatch, stored, quantised, device, asked, features, chosen, why
):
    monkeypatch.setattr(cpu_types, "cpu_features", lambda: frozenset(features))
    assert choose_dtype(stored, quantised, device, asked) == (chosen, why)


@pytest.mark.parametrize(
    ("model", "chosen"), [("cairn-tiny", F32), ("random:qwen3-0.6b", BF16)], ids=["small", "large"]
)
def test_small_matrices_are_float32_on_a_cpu_with_amx(monkeypatch, model, chosen):
    """So the model that ships computes the same on every CPU. Wide matrices are read in half the bytes."""
    monkeypatch.setattr(cpu_types, "cpu_features", lambda: frozenset({"amx-bf16"}))
    spec = open_model(model).spec
    assert choose_dtype(BF16, False, "cpu", "auto", spec)[0] == chosen
    assert choose_dtype(BF16, False, "cpu", "bfloat16", spec) == (BF16, "as asked")
    assert choose_dtype(BF16, False, "cuda", "auto", spec)[0] == BF16


@pytest.fixture
def folder(tmp_path):
    """A tiny checkpoint with a tokenizer: enough to open, not to talk sense."""
    source = tiny_checkpoints.folder("llama")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tiny_tokenizers.save(tmp_path, tiny_tokenizers.byte_level(), eos_token="<|end|>")


def test_an_opened_model_becomes_one_that_runs(folder):
    opened = open_model(str(folder))
    assert opened.spec == open_checkpoint(folder).spec
    assert opened.eos_ids == (2,)
    ready = opened.load("cpu", "float32")
    assert (ready.device, ready.dtype) == ("cpu", "float32")
    assert ready.bytes_per_token() == 4 * opened.spec.matmul_parameters()
    summary = ready.summary()
    count = opened.spec.parameters()
    assert summary == (
        f"{folder}: llama, {format_count(count)} parameters, {format_bytes(4 * count, 'decimal')}, "
        "computed in float32 on cpu (as asked)"
    )
    assert not ready.model.training


def test_the_tokenizer_s_end_is_used_where_the_config_names_none(folder):
    for name in ("config.json", "generation_config.json"):
        text = (folder / name).read_text().replace('"eos_token_id": 2', '"eos_token_id": null')
        (folder / name).write_text(text)
    assert open_model(str(folder)).eos_ids == (0,)


def test_a_random_model_needs_no_file():
    opened = open_model("random:tiny-moe")
    assert opened.tokenizer is None
    first, second = (opened.load("cpu", "float32").model for _ in range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("device", ["", "gpu", "meta", "mps", "cuda:x", "cpu,cuda"])
def test_what_is_no_device_for_models_is_refused(device):
    with pytest.raises(CairnError, match=f"{device!r} is not a device that models run on"):
        check_device(device)
