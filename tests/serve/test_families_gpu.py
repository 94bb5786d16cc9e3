"""Every kind of layer through the graphs of a GPU engine, held against the plain form on the CPU in float32.

How far bfloat16 may be off is not guessed: the plain form in bfloat16 on the CPU shows it for the same weights and
tokens. What is compared are log-probabilities of the prompts (mixed steps) and of the answers (decode steps).
"""

import copy
from typing import NamedTuple

import msgspec
import pytest
import torch
from tiny_engines import prompt_of

from cairn.models.attend import Cached, KVCache
from cairn.models.build import ModelBuild
from cairn.models.presets import preset
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.spec import DeltaSizes, Experts, Latent, ModelSpec, Rope, ShortConvSizes
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SIZES = dict(
    vocab=320, hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=384, context=512
)
LLAMA = msgspec.structs.replace(preset("tiny-llama"), **SIZES)
SPECS = {
    "llama": LLAMA,
    "qk norms": msgspec.structs.replace(LLAMA, qk_norm=True),
    "delta nets": msgspec.structs.replace(
        LLAMA, mixers=("delta", "attention", "delta"), output_gate=True, norm_plus_one=True,
        delta=DeltaSizes(key_heads=2, value_heads=4, key_width=32, value_width=64),
    ),
    "short convolutions": msgspec.structs.replace(
        LLAMA, mixers=("short_conv", "attention", "short_conv"), short_conv=ShortConvSizes()
    ),
    "experts": msgspec.structs.replace(
        LLAMA, experts=Experts(count=8, per_token=2, intermediate=128, shared_intermediate=128)
    ),
    "many experts": msgspec.structs.replace(
        LLAMA, experts=Experts(count=64, per_token=4, intermediate=64, dense_layers=(1,))
    ),
    "sigmoid experts with a bias": msgspec.structs.replace(
        LLAMA, experts=Experts(8, 2, 128, gate="sigmoid", scale=1.5, choice_bias=True)
    ),
    "windows": msgspec.structs.replace(LLAMA, windows=(24, 0, 24)),
    "soft-cap": msgspec.structs.replace(LLAMA, attention_softcap=5.0, logit_softcap=10.0),
    "norms behind": msgspec.structs.replace(
        LLAMA, post_norms=True, norm_plus_one=True, activation="gelu_tanh", embedding_scale=16.0
    ),
    "learned positions": msgspec.structs.replace(
        LLAMA, positions="learned", norm="layer", gated=False, activation="gelu", qkv_bias=True,
        out_bias=True, mlp_bias=True, kv_heads=4,
    ),
    "layer norm": msgspec.structs.replace(LLAMA, norm="layer"),
    "layer norm of heads": msgspec.structs.replace(LLAMA, norm="layer", qk_norm=True),
    "relu gate": msgspec.structs.replace(LLAMA, activation="relu"),
    "dynamic angles": msgspec.structs.replace(
        LLAMA, rope=Rope(kind="dynamic", factor=2.0, original_context=48)
    ),
    "output norms only, of all heads at once": msgspec.structs.replace(
        LLAMA, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over="width"
    ),
    "norms behind the rotation": msgspec.structs.replace(
        LLAMA, qk_norm=True, qk_norm_rotated=True, nope_layers=(1,)
    ),
    "multipliers": msgspec.structs.replace(
        LLAMA, residual_scale=0.5, logit_divisor=2.0, embedding_scale=4.0, query_scale=0.05
    ),
    "half of the columns rotated": msgspec.structs.replace(LLAMA, rope=Rope(rotated=32)),
    "sinks and biases": msgspec.structs.replace(
        LLAMA, sinks=True, windows=(24, 0, 24), qkv_bias=True, out_bias=True, activation="clamped_silu",
        activation_limit=2.0, experts=Experts(8, 2, 128, logit_bias=True, biases=True),
    ),
    "latent rows": msgspec.structs.replace(
        LLAMA, mixer="latent", kv_heads=4, head_dim=96, latent=Latent(64, 64, 32, 64),
        experts=Experts(8, 2, 128, renormalize=False, shared_intermediate=128, dense_layers=(0,)),
    ),
    "latent queries, groups of experts": msgspec.structs.replace(
        LLAMA, mixer="latent", kv_heads=4, head_dim=96, latent=Latent(48, 64, 32, 32, query_rank=64),
        experts=Experts(8, 2, 128, gate="sigmoid", choice_bias=True, groups=4, top_groups=2),
    ),
    "yarn": msgspec.structs.replace(LLAMA, rope=Rope(kind="yarn", factor=4.0, original_context=128)),
}  # fmt: skip
LENGTHS = (1, 5, 40, 64, 65, 150, 200)
MOST = 12
SLACK = 0.02  # nats: where the CPU happens to err little


class Answer(NamedTuple):
    tokens: list[int]  # prompt and answer
    logprobs: torch.Tensor  # of all of them but the first


def weights(spec: ModelSpec) -> Transformer:
    """Large enough for every part to matter; a router that is sure of its choice."""
    model = random_model(spec, ModelBuild("cpu", torch.bfloat16, fused=True), seed=5)
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:  # they start as zeros, which would hide them
            parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
        elif parameter.dim() > 1:
            parameter.data.mul_(20 if "router" in name else 3)
    return model.requires_grad_(False).eval()


def served(model: Transformer, **switches) -> list[Answer]:
    config = EngineConfig(
        model="tiny",
        device="cuda",
        max_model_len=512,
        max_num_seqs=8,
        num_gpu_blocks_override=128,  # whatever else is on the card
        load_in_advance=False,
        **switches,
    )
    opened = OpenModel("tiny", model.spec, None, (), None)
    engine = start_with(opened, Runnable("tiny", model, "a test"), config).engine
    params = SamplingParams(
        temperature=0.0, max_tokens=MOST, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    prompts = [[t % model.spec.vocab for t in prompt_of(n, seed=n)] for n in LENGTHS]
    requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
    found: dict[Request, list[float]] = {request: [] for request in requests}
    for request in requests:
        engine.add(request)
    for output in engine.run():
        found[output.request] += [one.logprob for one in output.logprobs or []]
    answers = []
    for request in requests:
        assert len(request.outputs) == MOST, request.error
        of_prompt = [one.logprob for one in engine.prompt_logprobs.pop(request, [])]
        assert (len(of_prompt), len(found[request])) == (len(request.prompt) - 1, MOST)
        tokens = [*request.prompt, *request.outputs]
        answers.append(Answer(tokens, torch.tensor([*of_prompt, *found[request]])))
    return answers


@torch.inference_mode()
def scored(model: Transformer, answers: list[Answer]) -> torch.Tensor:
    """The same log-probabilities by the plain form: the prompt at once, then one token after another."""
    found = []
    for tokens, _ in answers:
        cache = KVCache(model.spec, len(tokens), model.embedding.weight.dtype, "cpu")
        prompt, *others = tokens[:-MOST], *([token] for token in tokens[-MOST:-1])
        rows = []
        for step in (prompt, *others):
            attend = Cached([cache], [len(step)])
            rows.append(model(torch.tensor(step), attend.positions_T(), attend))
            attend.commit()
        logprobs = model.logits(torch.cat(rows)).float().log_softmax(-1)
        found.append(logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_errs_no_more_than_bfloat16_does(name, eager):
    rounded = weights(SPECS[name])
    exact = copy.deepcopy(rounded).float()
    answers = served(copy.deepcopy(rounded).to("cuda"), enforce_eager=eager)
    ours = torch.cat([answer.logprobs for answer in answers])
    truth, plain = scored(exact, answers), scored(rounded, answers)
    assert ours.shape == truth.shape
    error, natural = (ours - truth).abs().mean(), (plain - truth).abs().mean()
    assert error <= 2 * natural + SLACK, (float(error), float(natural))


@pytest.mark.parametrize(
    ("name", "switches"),
    [("llama", {"weights": "fp8"}), ("latent rows", {"kv_cache_dtype": "fp8"})],
    ids=["weights", "latent rows"],
)
def test_float8_stays_near_through_graphs(name, switches):
    rounded = weights(SPECS[name])
    exact = copy.deepcopy(rounded).float()
    answers = served(copy.deepcopy(rounded).to("cuda"), **switches)
    ours = torch.cat([answer.logprobs for answer in answers])
    error = (ours - scored(exact, answers)).abs().mean()
    assert 0 < error < 0.3
