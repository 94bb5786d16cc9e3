"""Recipes by name: complete runs, each named for the model and the machine it is meant for.

    cairn train tiny-cpu                       run one
    cairn train qwen3-0.6b-1xh200 --print      see it as TOML; edit and run: cairn train my.toml

A recipe is a `Train`; nothing here is code that runs later. No torch.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from cairn.core.errors import ConfigError, did_you_mean
from cairn.models.hub import is_packaged
from cairn.train.config import (
    Adapter,
    Checkpoint,
    Data,
    Log,
    Model,
    Optim,
    Precision,
    Schedule,
    Train,
    Validation,
)
from cairn.train.parallel.layout import Layout


def recipe(name: str) -> Train:
    build = RECIPES.get(name)
    if build is None:
        raise no_recipe(name, RECIPES)
    return build()


def no_recipe(name: str, recipes: Iterable[str]) -> ConfigError:
    """Error for an unknown recipe, with a hint if the name is data, a model or a run folder."""
    if is_data(name):
        hint = f"text to learn from is --data.sources {name}"
    elif is_packaged(name):
        hint = f"the model to begin with is --model.checkpoint {name}"
    elif "/" in name or Path(name).is_dir():
        hint = f"a model is --model.checkpoint {name}, a run that goes on is --out {name}"
    else:
        hint = did_you_mean(name, recipes, otherwise=f"there are: {', '.join(recipes)}")
    return ConfigError(f"no recipe is called {name!r}", hint=hint)


def is_data(name: str) -> bool:
    return name.endswith((".jsonl", ".txt", ".parquet"))


def _tiny_cpu() -> Train:
    """A model that tells stories after a minute on a laptop."""
    return Train(
        steps=160,
        model=Model(
            preset="tiny-qwen3",
            layers=4,
            hidden=128,
            heads=4,
            kv_heads=2,
            head_dim=32,
            intermediate=384,
            context=512,
        ),
        data=Data(sources=["stories"], vocab=768, sequence=256, sequences=8, microbatch=8),
        optim=Optim(lr=3e-3),
        schedule=Schedule(kind="wsd", warmup=20, final=0.1),
        validation=Validation(share=0.05, every=80, prompts=["Once upon a time"], tokens=32),
        checkpoint=Checkpoint(every=100),
        log=Log(every=1),
    )


def _tiny_lora() -> Train:
    """An adapter that teaches cairn-tiny to tell stories, in two minutes on a laptop."""
    return Train(
        steps=40,
        model=Model(checkpoint=Path("cairn-tiny")),
        data=Data(sources=["stories"], sequence=96, sequences=8, microbatch=8),
        optim=Optim(lr=2e-3, weight_decay=0.0),
        schedule=Schedule(kind="linear", warmup=4, final=0.1),
        adapter=Adapter(rank=8, alpha=16.0),
        validation=Validation(share=0.05, every=40, prompts=["Once upon a time"], tokens=12),
        checkpoint=Checkpoint(every=0),
        log=Log(every=5),
    )


def _one_h200(
    preset: str, precision: Precision, optim: Optim, sequences: int = 64, microbatch: int = 8
) -> Train:
    return Train(
        steps=20_000,
        model=Model(preset=preset),
        data=Data(
            sources=["data/tokens"], sequence=4096, sequences=sequences, microbatch=microbatch
        ),
        optim=optim,
        schedule=Schedule(kind="wsd", warmup=500, final=0.05),
        precision=precision,
        validation=Validation(share=0.01, every=500),
        checkpoint=Checkpoint(every=1000),
    )


def _qwen3_small(preset: str, lr: float) -> Train:
    precision = Precision(kind="bfloat16", recompute="selective")
    return _one_h200(preset, precision, Optim(lr=lr))


def _qwen3_8b() -> Train:
    """Weights, gradients and states in bfloat16: 8 bytes per parameter, with room for activations."""
    precision = Precision(kind="bfloat16", masters=False, recompute="selective")
    return _one_h200("qwen3-8b", precision, Optim(lr=1e-4, states="bfloat16"), 64, 2)


def _llama3_8b() -> Train:
    return Train(
        steps=20_000,
        model=Model(preset="llama-3.1-8b"),
        data=Data(sources=["data/tokens"], sequence=8192, sequences=64, microbatch=1),
        optim=Optim(lr=3e-4),
        schedule=Schedule(kind="cosine", warmup=500, final=0.1),
        precision=Precision(kind="bfloat16", recompute="selective"),
        validation=Validation(share=0.01, every=500),
        checkpoint=Checkpoint(every=500),
        parallel=Layout(fsdp=8),
    )


RECIPES: dict[str, Callable[[], Train]] = {
    "tiny-cpu": _tiny_cpu,
    "tiny-lora": _tiny_lora,
    "qwen3-0.6b-1xh200": lambda: _qwen3_small("qwen3-0.6b", 6e-4),
    "qwen3-1.7b-1xh200": lambda: _qwen3_small("qwen3-1.7b", 4e-4),
    "qwen3-8b-1xh200": _qwen3_8b,
    "llama3-8b-8xh100": _llama3_8b,
}
