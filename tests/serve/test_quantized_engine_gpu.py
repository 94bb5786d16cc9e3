"""Few bits in the engine on a GPU, in graphs and without: float8 near the exact form, 4-bit weights as dequantised."""

import pytest
import torch
from tiny_engines import prompt_of

from cairn.kernels.norm.join_norm import Parts
from cairn.kernels.quantize.quantize import dequantize
from cairn.models.build import ModelBuild
from cairn.models.fused import Fused, FusedResidual, FusedStep
from cairn.models.linear.convert import convert_weights
from cairn.models.linear.maps import Vocabulary, linears
from cairn.models.linear.packed_tiles import nearest_levels
from cairn.models.presets import preset
from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.rounding import SCHEMES, rounded
from cairn.models.runnable import open_model
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LENGTHS = (1, 5, 64, 65, 200, 30, 128, 300)
SWITCHES = {
    "everything": {},
    "kernel by kernel": dict(enforce_eager=True),
    "chunked": dict(max_num_batched_tokens=96),
    "invariant": dict(batch_invariant=True),
}


# Planes of a matrix, by the name of `--weights`.
ROUNDED = {
    "w4a16": nearest_levels,
    "w8a16": lambda w_NK: rounded(w_NK, SCHEMES["w8a8"]),
    "nvfp4": lambda w_NK: rounded(w_NK, SCHEMES["nvfp4"]),
}


def engine_of(shape="tiny", dequantised="", **switches):
    """`dequantised`: each matrix of the model is rounded as that form rounds it, and stays in bfloat16."""
    opened = open_model(f"random:{shape}")
    runnable = opened.load("cuda", "bfloat16")
    for part in linears(runnable.model) if dequantised else ():
        if not isinstance(part, Vocabulary):
            planes = ROUNDED[dequantised](part.joined())
            rows = [len(weight_NK) for weight_NK in part.matrices()]
            for weight_NK, w_NK in zip(
                part.matrices(), dequantized(planes).split(rows), strict=True
            ):
                weight_NK.data.copy_(w_NK)
    config = EngineConfig(
        model=f"random:{shape}", device="cuda", max_model_len=512, max_num_seqs=16, **switches
    )
    return start_with(opened, runnable, config).engine


def prompt_logprobs(engine, prompts):
    """Of every prompt token behind the first; prompts run together, in steps of the engine's choice."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    requests = [Request(i, p, params) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert all(len(request.outputs) == 4 for request in requests), [r.error for r in requests]
    rows = (engine.prompt_logprobs.pop(request, []) for request in requests)
    return torch.tensor([row.logprob for found in rows for row in found])


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 200])
@torch.inference_mode()
def test_a_feed_forward_in_float8_stands_for_the_weights_it_has(rows):
    """Norm, both products and the activation between them, quantised on the way."""
    model = random_model(preset("tiny-qwen3"), ModelBuild("cuda", torch.bfloat16, fused=True))
    convert_weights(model, "fp8")
    layer, fused = model.layers[0], Fused(model, 512)
    x_TD = torch.randn(rows, model.spec.hidden, device="cuda", dtype=torch.bfloat16)
    pending = torch.randn_like(x_TD)
    total = x_TD + pending
    entered = FusedResidual(x_TD, pending).normed(layer.feed_forward_norm)
    found = layer.feed_forward.compute(entered, FusedStep(fused, None, {}))
    assert torch.equal(entered.x_TD, total)
    found = found.sums_SMD.sum(0) if isinstance(found, Parts) else found
    for part in (layer.feed_forward.inner, layer.feed_forward.down):
        (owner,) = part.owners()
        owner.weight.data.copy_(dequantize(part.form.quantized))
        part.take(None)
    exact = layer.feed_forward(layer.feed_forward_norm(total))
    assert (found - exact).norm() < 0.06 * exact.norm()  # activations have 3 bits of mantissa


@pytest.mark.parametrize("form", ["fp8"])
@pytest.mark.parametrize("name", SWITCHES)
def test_quantised_weights_and_a_float8_cache(name, form):
    prompts = [prompt_of(n, seed=n) for n in LENGTHS]
    exact = prompt_logprobs(engine_of(), prompts)
    forms = dict(weights=form, kv_cache_dtype="fp8", head="8bit")
    engine = engine_of(**forms, **SWITCHES[name])
    found = prompt_logprobs(engine, prompts)
    assert engine.runner.pool.cache.dtype == torch.float8_e4m3fn
    scales = engine.runner.pool.scales
    assert scales.is_known
    assert (scales.factors_L2 != 1).all()
    assert (found - exact).abs().mean() < 0.1
    again = prompt_logprobs(engine, prompts)  # from cached prefixes, or replayed
    assert (again - exact).abs().mean() < 0.1


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("name", SWITCHES)
def test_packed_weights_answer_as_their_dequantised_ones(name, form):
    """Steps of few and of many rows, the largest captured first, before the rows of gate and up are reordered."""
    prompts = [prompt_of(n, seed=n) for n in LENGTHS]
    exact = prompt_logprobs(engine_of(dequantised=form), prompts)
    engine = engine_of(weights=form, load_in_advance=name == "everything", **SWITCHES[name])
    for _ in range(2):  # again from cached prefixes, or replayed
        found = prompt_logprobs(engine, prompts)
        assert (found - exact).abs().mean() < 0.02


def test_invariant_in_float8():
    """A request alone and the same request in company give the same tokens."""
    engine = engine_of(weights="fp8", kv_cache_dtype="fp8", batch_invariant=True)
    prompts = [prompt_of(n, seed=n) for n in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def outputs(chosen, first):
        requests = [Request(first + i, p, params) for i, p in enumerate(chosen)]
        for request in requests:
            engine.add(request)
        engine.run()
        return [request.outputs for request in requests]

    together = outputs(prompts, 0)
    assert [outputs([p], 100 + i)[0] for i, p in enumerate(prompts)] == together
