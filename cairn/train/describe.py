"""Data and model shape of a recipe, without loading weights."""

from pathlib import Path

import msgspec

from cairn.core.errors import ConfigError
from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.hub import resolve
from cairn.models.presets import preset, with_layers
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train.checkpoint.folder import complete_steps
from cairn.train.config import Model, Train
from cairn.train.corpus import Corpus, open_corpus, open_preferences
from cairn.train.parallel.parallelize import with_choice_bias
from cairn.train.run_checks import CHECKPOINTS, TOKENIZER

TEXT_CACHE = "data"  # of a run, in its folder
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")


def describe(config: Train) -> tuple[Corpus, ModelSpec, Checkpoint | None]:
    """The data and the shape of the model; reads headers, trains a small tokenizer, loads no weights."""
    start = _open_start(config.model)
    spec = start.spec if start else shape_of(config.model)
    learnt = _tokenizer_of_run(config) or _tokenizer_of(start)
    if config.objective.kind == "sft":
        corpus = open_corpus(
            config.data, config.seed, spec.vocab, learnt, config.validation, _text_cache(config)
        )
    else:
        corpus = open_preferences(config.data, config.seed, config.objective.kind, learnt)
    spec = _fitted(spec, corpus, config, start is not None)
    return corpus, with_choice_bias(spec, config.balance), start


def _text_cache(config: Train) -> Path | None:
    """Folder for tokenised text files of the run, if the run has a folder."""
    return config.out / TEXT_CACHE if config.out else None


def spec_of(model: Model) -> ModelSpec:
    """The shape that will be trained, but for the vocabulary, which the data may change."""
    start = _open_start(model)
    return start.spec if start else shape_of(model)


def _open_start(model: Model) -> Checkpoint | None:
    """The weights to begin with, by path or by name; headers only."""
    if not model.checkpoint:
        return None
    checkpoint = open_checkpoint(resolve(str(model.checkpoint)))
    if checkpoint.vision is not None:
        raise ConfigError(
            f"{model.checkpoint} sees pictures, and the trainer would lose its tower",
            hint="`cairn tune pictures` trains a model that sees; else begin with a text model",
        )
    return checkpoint


def _tokenizer_of_run(config: Train) -> Tokenizer | None:
    """Tokenizer of a resumed run's checkpoints; None without checkpoints."""
    kept = config.out / TOKENIZER if config.out else None
    if kept is None or not kept.is_dir() or not complete_steps(kept.parent / CHECKPOINTS):
        return None
    return tokenizer_from_folder(kept)


def _tokenizer_of(start: Checkpoint | None) -> Tokenizer | None:
    """Tokenizer of the initial weights; None if there are none or it is unknown."""
    if start is None or (start.path.is_dir() and not (start.path / "tokenizer.json").is_file()):
        return None
    return start.tokenizer()


def shape_of(model: Model) -> ModelSpec:
    spec = preset(model.preset)
    if model.layers:
        spec = with_layers(spec, model.layers)
    chosen = {name: getattr(model, name) for name in SIZES if getattr(model, name)}
    return msgspec.structs.replace(spec, **chosen)


def _fitted(spec: ModelSpec, corpus: Corpus, config: Train, is_fixed: bool) -> ModelSpec:
    """Adapt the spec to the vocabulary and EOS tokens of the data."""
    if config.data.sequence > spec.context:
        raise ConfigError(
            f"data.sequence {config.data.sequence} is longer than the model's context {spec.context}",
            hint=f"use data.sequence {spec.context}, or model.context {config.data.sequence}",
        )
    if corpus.tokenizer is None:
        return spec
    if is_fixed or config.model.vocab:
        if corpus.vocab > spec.vocab:
            raise ConfigError(
                f"the tokenizer has ids up to {corpus.vocab - 1}, the model {spec.vocab} tokens",
                hint="use the model's own tokenizer: --data.tokenizer FOLDER",
            )
        return spec
    eos = tuple(corpus.tokenizer.eos_ids)
    return msgspec.structs.replace(spec, vocab=corpus.vocab, eos_ids=eos, bos_id=None)
