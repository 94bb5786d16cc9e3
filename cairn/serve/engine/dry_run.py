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

from cairn.kernels.tooling.absent_gpu import Launch, absent_gpu
from cairn.models.build import ModelBuild
from cairn.models.eagle import LEAST_LAYERS
from cairn.models.runnable import DTYPES, OpenModel, Runnable
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.gpu_runner import GPURunner
from cairn.serve.engine.speculate.choice import RANDOM_HEAD
from cairn.serve.engine.start import start_with


class Engine(NamedTuple):
    """Description of an engine that determines the kernels it launches."""

    spec: ModelSpec
    config: EngineConfig
    gpu: str  # as its driver calls it
    architecture: str  # sm_90


def launches_of_all(engines: Sequence[Engine]) -> list[Launch]:
    return [launch for engine in engines for launch in launches_of(*engine)]


def launches_of(spec: ModelSpec, config: EngineConfig, gpu: str, architecture: str) -> list[Launch]:
    """Each specialisation of a kernel that an engine with a model of this shape launches."""
    dtype = DTYPES["bfloat16" if config.dtype == "auto" else config.dtype]
    least = LEAST_LAYERS if config.speculate == RANDOM_HEAD else 2
    opened = OpenModel(config.model, fewer_layers(spec, least), None, (), None)
    with absent_gpu(gpu, architecture) as launches, torch.inference_mode():
        model = Transformer(opened.spec, ModelBuild("cuda", dtype, fused=True)).eval()
        runnable = Runnable(opened.name, model, "its shape alone")
        runner = cast(GPURunner, start_with(opened, runnable, config, sole=True).engine.runner)
        dry_run(runner)
    return launches


def fewer_layers(spec: ModelSpec, least: int = 2) -> ModelSpec:
    """The same with so few layers, where all layers are alike: they launch the same kernels."""
    dense = spec.experts.dense_layers if spec.experts is not None else ()
    if len(set(spec.windows)) > 1 or spec.nope_layers or dense:
        return spec
    layers = min(spec.layers, least)
    return msgspec.structs.replace(spec, layers=layers, windows=spec.windows[:layers])


def dry_run(runner: GPURunner) -> None:
    """Run a step of each type."""
    if runner.graphs is not None:
        for shape in runner.graphs.common_shapes():
            runner.run_blank(shape)
    runner.warm_eager()
