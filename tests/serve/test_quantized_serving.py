"""A quantised checkpoint in an engine: what it is checked against, what is held, and what cannot follow."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from cairn.core.errors import ConfigError
from cairn.kernels.cpu import compiled
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.blocks import BlocksForm, RoundedRows
from cairn.models.linear.maps import held_bytes, linears
from cairn.models.linear.packed import Int4, Int8
from cairn.models.runnable import OpenModel, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine import cpu_weights
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.start import start_with, stays_packed, with_quantization
from cairn.serve.engine.weights_in_place import replace_weights

FOLDER = Path(__file__).parent.parent / "quantized_checkpoints"
W4 = str(FOLDER / "w4a16")
TOKENS = [3, 17, 29, 5, 11, 23, 2, 31]  # that logits are expected of


def opened_w4() -> OpenModel:
    checkpoint = open_checkpoint(Path(W4))
    return OpenModel(W4, checkpoint.spec, None, (), checkpoint)


def configured(model: str = W4, **settings) -> EngineConfig:
    config = EngineConfig(model=model, **settings)
    return with_quantization(config, opened_w4() if model == W4 else open_model(model))


def test_quantization_is_checked_against_the_checkpoint():
    assert configured().weights == "auto"
    assert configured(quantization="compressed_tensors").quantization == "compressed-tensors"
    with pytest.raises(
        ConfigError, match=r"quantization is gptq, and .*w4a16 is compressed-tensors"
    ):
        configured(quantization="gptq_marlin")
    with pytest.raises(ConfigError, match="one of compressed-tensors, gptq"):
        EngineConfig(model=W4, quantization="bitsandbytes")


def test_some_schemes_make_a_checkpoint_in_floating_point_so():
    assert configured("random:qwen3-0.6b", quantization="fp8").weights == "fp8"
    assert configured("random:qwen3-0.6b", quantization="w4a16").weights == "w4a16"
    with pytest.raises(ConfigError, match=r"quantization is awq, and .* is in floating point"):
        configured("random:qwen3-0.6b", quantization="awq")
    with pytest.raises(ConfigError, match="quantization is fp8, and weights is int8"):
        configured("random:qwen3-0.6b", quantization="fp8", weights="int8")


def test_planes_stay_packed_on_a_gpu_unless_floats_are_asked_for():
    config, opened = EngineConfig(model=W4), opened_w4()
    assert stays_packed(config, "cuda:0", opened)
    assert stays_packed(config, "cpu", opened) == (compiled.obstacle() is None)
    for changed in ({"weights": "float"}, {"plain": True}, {"batch_invariant": True}):
        assert not stays_packed(msgspec.structs.replace(config, **changed), "cuda", opened)


def test_a_packed_model_says_its_bytes_and_refuses_other_weights():
    opened = opened_w4()
    packed, plain = (opened.load("cpu", "float32", packed=kept) for kept in (True, False))
    # A byte for each level where bfloat16 has two: the plain form keeps no nibbles.
    assert held_bytes(packed.model) < 0.6 * held_bytes(plain.model)
    assert packed.bytes_per_token() < 0.6 * plain.bytes_per_token()
    with pytest.raises(ConfigError, match=r"packed when it started \(PlanesForm\)"):
        replace_weights(packed.model, 2, W4)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-asymmetric", "w8a16", "w8a8", "fp8-block"])
def test_on_a_cpu_packed_rows_have_the_logits_of_transformers(scheme):
    """The levels of the file in the compiled kernels; fp8 and 8 bits with offsets are rounded, as the note says."""
    if compiled.obstacle():
        pytest.skip(str(compiled.obstacle()))
    checkpoint = open_checkpoint(FOLDER / scheme)
    opened = OpenModel(scheme, checkpoint.spec, None, (), checkpoint)
    runnable = opened.load("cpu", packed=True)
    config = EngineConfig(model=scheme, device="cpu", max_num_seqs=4, num_gpu_blocks_override=16)
    notes = "\n".join(start_with(opened, runnable, config, sole=True).notes)
    reasons = {"fp8-block": "rows (fp8 levels", "w8a16": "rows (8-bit levels have offsets)"}
    assert reasons.get(scheme, "stay packed as in the file") in notes
    model = runnable.model
    forms = [part.form for part in linears(model) if part is not model.head]
    assert all(isinstance(form, BlocksForm) for form in forms)
    widths = [len(form.matrix.part_rows) for form in forms]
    assert set(widths) == {1, 2, 3}  # down and out; gate and up; q, k and v
    expected_TV = torch.tensor(
        json.loads((FOLDER / scheme / "expected.json").read_text())["logits"]
    )
    attend = PackedDocuments([len(TOKENS)])
    with torch.inference_mode():
        found_TV = model.logits(model(torch.tensor(TOKENS), attend.positions_T(), attend))
    assert (found_TV - expected_TV).norm() < 0.02 * expected_TV.norm()


def test_on_a_cpu_the_layers_are_held_in_8_bits_and_the_head_as_it_is(monkeypatch):
    """The file has 4 bits for a layer's weight and 16 for the head's; transformers says what it computes."""
    if Int8.obstacle(8, 64):
        pytest.skip("this CPU has no packed product")
    monkeypatch.setattr(cpu_weights, "_gain", lambda pairs: 2.0)  # so small, none is seen
    opened = opened_w4()
    runnable = opened.load("cpu")
    assert (runnable.dtype, runnable.bits, runnable.head_bits) == ("float32", 4.5, 16.0)
    model, before = runnable.model, held_bytes(runnable.model)
    layers = sum(part.read_bytes() for part in linears(model) if part is not model.head)
    config = EngineConfig(model=W4, device="cpu", max_num_seqs=4, num_gpu_blocks_override=16)
    started = start_with(opened, runnable, config, sole=True)
    assert "the embedding and the output projection in float32" in "\n".join(started.notes)
    forms = [part.form for part in linears(model) if part is not model.head]
    assert all(isinstance(form, Int8 | Int4 | RoundedRows) for form in forms)
    assert held_bytes(model) == before - layers + sum(form.nbytes for form in forms)
    assert sum(form.nbytes for form in forms) < 0.8 * layers  # so narrow, 8 columns apart are many
    assert model.head.form is None
    expected_TV = torch.tensor(json.loads((Path(W4) / "expected.json").read_text())["logits"])
    attend = PackedDocuments([len(TOKENS)])
    with torch.inference_mode():
        found_TV = model.logits(model(torch.tensor(TOKENS), attend.positions_T(), attend))
    assert torch.equal(found_TV.argmax(-1), expected_TV.argmax(-1))
    assert (found_TV - expected_TV).norm() < 0.02 * expected_TV.norm()


def test_the_scales_of_the_cache_come_from_the_checkpoint():
    checkpoint = open_checkpoint(FOLDER / "fp8-dynamic")
    opened = OpenModel("fp8", checkpoint.spec, None, (), checkpoint)
    runnable = opened.load("cpu", "float32")
    scales = CacheScales(1, "cpu", runnable.cache_scales)
    assert scales.factors_L2.tolist() == [
        [pytest.approx(0.02, rel=0.01), pytest.approx(0.03, rel=0.01)]
    ]
    assert "from the checkpoint" in scales.note()
    assert opened_w4().load("cpu", "float32").cache_scales is None


def test_weights_of_a_quantised_checkpoint_replace_floats():
    opened = opened_w4()
    model = opened.load("cpu", "float32").model
    expected = model.layers[0].feed_forward.down.weight.clone()
    with torch.no_grad():
        model.layers[0].feed_forward.down.weight.zero_()
    replace_weights(model, 2, W4)
    assert torch.equal(model.layers[0].feed_forward.down.weight, expected)
