"""Every kind of step that an engine runs, on a GPU that is not there: which kernels will it launch?

    graphs       every shape that has a graph in advance
    eager        steps without a graph: many prompts at once, with numbers of tokens that 16 divides and does not
    special      penalties, masks of grammars, logit bias and log-probabilities, which are drawn outside of graphs

What is launched depends on the model's shape, the type of its weights and the limits, never on values.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import torch

from cairn.kernels.sampling.logprobs import logprobs
from cairn.kernels.sampling.penalties import count, words
from cairn.kernels.sampling.sampling import sample
from cairn.kernels.tooling.absent_gpu import Launch, absent_gpu
from cairn.models.build import Build
from cairn.models.runnable import DTYPES, OpenModel, Runnable
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.batch import Layout
from cairn.serve.engine.cuda_graph import Shape, mixed_sizes, most_new_pages, token_sizes
from cairn.serve.engine.gpu_runner import GPURunner
from cairn.serve.engine.request import Limits
from cairn.serve.engine.sampler import Sampler, no_penalties
from cairn.serve.engine.start import start_with

ODD = 5  # tokens less than a size: kernels are specialised for numbers that 16 divides
TOP = (0, 1, 5, 20)  # likeliest tokens that requests ask for


class Engine(NamedTuple):
    """What an engine will be: what it launches follows from it."""

    spec: ModelSpec
    config: EngineConfig
    gpu: str  # as its driver calls it
    architecture: str  # sm_90


def launches_of_all(engines: Sequence[Engine]) -> list[Launch]:
    return [launch for engine in engines for launch in launches_of(*engine)]


def launches_of(spec: ModelSpec, config: EngineConfig, gpu: str, architecture: str) -> list[Launch]:
    """Each specialisation of a kernel that an engine with a model of this shape launches."""
    dtype = DTYPES["bfloat16" if config.dtype == "auto" else config.dtype]
    opened = OpenModel(config.model, fewer_layers(spec), None, (), None)
    with absent_gpu(gpu, architecture) as launches, torch.inference_mode():
        model = Transformer(opened.spec, Build("cuda", dtype, fused=True)).eval()
        runnable = Runnable(opened.name, model, "its shape alone")
        runner = cast(GPURunner, start_with(opened, runnable, config, sole=True).engine.runner)
        dry_run(runner)
    return launches


def fewer_layers(spec: ModelSpec) -> ModelSpec:
    """The same with two layers, where all layers are alike: they launch the same kernels."""
    dense = spec.experts.dense_layers if spec.experts is not None else ()
    if len(set(spec.windows)) > 1 or spec.nope_layers or dense:
        return spec
    layers = min(spec.layers, 2)
    return msgspec.structs.replace(spec, layers=layers, windows=spec.windows[:layers])


def dry_run(runner: GPURunner) -> None:
    """One step of each kind; on a GPU as well, where it compiles what is not compiled yet."""
    if runner.graphs is not None:
        for shape in runner.graphs.common_shapes():
            runner.run_blank(shape)
    for shape in large_shapes(runner.limits):
        runner.run_blank(shape)
    draw_special(runner.sampler, runner.model.embedding.weight.dtype, runner.limits.rows)


def large_shapes(limits: Limits) -> list[Shape]:
    """Steps beyond those that have graphs in advance: of new sequences alone, and of any."""
    most = mixed_sizes(limits)[-1]
    sizes = [size for size in token_sizes(limits.step_tokens) if size > most]
    made = []
    for size in sizes[-1:] + sizes[:1]:
        for tokens in (size, size - ODD):
            for fresh in (True, False):
                made += [Shape(_layout(tokens, n, limits), fresh) for n in (1, 8)]
    return [shape for shape in made if shape.layout.sequences <= limits.rows]


def _layout(tokens: int, sequences: int, limits: Limits) -> Layout:
    """None of them longer than a request may be."""
    sequences = max(sequences, -(-tokens // limits.context))
    longest = -(-tokens // sequences)
    return Layout(sequences, tokens, most_new_pages(limits), sequences, max(2, longest))


def draw_special(sampler: Sampler, dtype: torch.dtype, rows: int) -> None:
    """Every special way to draw, for one request and for as many as there can be."""
    device, vocabulary = sampler.device, sampler.vocabulary
    penalties = no_penalties(rows, vocabulary, device)
    for batch in sorted({1, min(5, rows), rows}):
        logits_SV = torch.zeros(batch, vocabulary, dtype=dtype, device=device)
        rows_S = torch.full((batch,), -1, dtype=torch.int32, device=device)  # padding
        position_S = torch.zeros_like(rows_S)
        allowed_SW = torch.full((batch, words(vocabulary)), -1, dtype=torch.int32, device=device)
        scores_SV = logits_SV.float()
        for counted in (None, penalties):
            for mask in (None, allowed_SW):
                tokens_S = sample(
                    scores_SV,
                    sampler.parameters,
                    position_S,
                    rows_B=rows_S,
                    penalties=counted,
                    allowed_BW=mask,
                )
        count(penalties, tokens_S, rows_S)
        for n in TOP:
            logprobs(logits_SV, tokens_S, min(n, vocabulary))
