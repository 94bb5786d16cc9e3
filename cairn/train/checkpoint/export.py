"""A checkpoint of any layout as Hugging Face safetensors, which `cairn serve` and other programs can load.

Reads only the weights, into a model on the host, and writes the folder whole or not at all. The tokenizer's files come
along, so the folder is all that a server needs.
"""

import shutil
from pathlib import Path

import torch

from cairn.core.errors import DataError
from cairn.models.adapter.attach import attach
from cairn.models.adapter.folder import adapter_slots, write_adapter
from cairn.models.adapter.merge import merge
from cairn.models.adapter.quantized_base import round_base
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.hub import resolve
from cairn.models.transformer import Transformer
from cairn.models.weights import load_model, random_model
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.load import About, load_pieces, read_about
from cairn.train.checkpoint.piece import pieces_of
from cairn.train.precision import DTYPES
from cairn.train.trainable import Base, Trainable, digest_of


def export_checkpoint(checkpoint: Path, out: Path, tokenizer: Path | None) -> None:
    """`out` is replaced if it is there."""
    about = read_about(checkpoint)
    if about.base is not None and about.base.adapter is not None:
        model, _ = adapted_model(checkpoint)
        merge(model)
        _write(model, out, tokenizer)
        return
    model = empty_model(about) if about.base is None else base_model(about, about.base)
    trained = Trainable(() if about.base is None else about.base.frozen)
    pieces = pieces_of(list(model.slots()), dict(model.named_parameters()))
    named = {f"model/{name}": piece for name, piece in pieces.items() if trained(name)}
    load_pieces(checkpoint, named, together=False)
    _write(model, out, tokenizer)


def export_adapter(run: Path, out: Path) -> Path:
    """The adapter of a run's newest usable checkpoint as PEFT's folder; which checkpoint it was."""
    newest = folders.newest(run / "checkpoints", [])
    if newest is None:
        raise DataError(
            f"{run} has no complete checkpoint", hint=f"train first: cairn tune --out {run}"
        )
    model, base = adapted_model(newest)
    assert base.adapter is not None
    write_adapter(model, base.adapter, out, base.path)
    return newest


def adapted_model(checkpoint: Path) -> tuple[Transformer, Base]:
    """The base of a run with the adapter that it has trained."""
    about = read_about(checkpoint)
    if about.base is None or about.base.adapter is None:
        raise DataError(
            f"{checkpoint} has no adapter", hint="its model is whole: cairn train --export-only"
        )
    model = base_model(about, about.base)
    if about.base.nf4:
        round_base(model)
    adapters = attach(model, about.spec, about.base.adapter, model.build._replace(device="meta"))
    for one in adapters:
        one.to_empty(device="cpu")
    pieces = pieces_of(adapter_slots(model), dict(model.named_parameters()))
    load_pieces(checkpoint, {f"model/{name}": p for name, p in pieces.items()}, together=False)
    return model, about.base


def _write(model: Transformer, out: Path, tokenizer: Path | None) -> None:
    """The folder appears whole, in place of an older one."""
    fresh = out.with_name(f"{out.name}.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    export(model, fresh, like=tokenizer)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def export_newest(run: Path, out: Path, tokenizer: Path | None) -> Path:
    """The newest usable checkpoint of a run, which may go on meanwhile; which one it was."""
    while True:
        newest = folders.newest(run / "checkpoints", [])
        if newest is None:
            is_run = (run / "recipe.toml").is_file()  # else the command would train another model
            raise DataError(
                f"{run} has no complete checkpoint",
                hint=f"train first: cairn train --out {run}"
                if is_run
                else "name the folder of a run",
            )
        try:
            export_checkpoint(newest, out, tokenizer)
        except Exception:
            if (newest / folders.COMPLETE).exists():
                raise
            continue  # the run has made room for newer ones while this one was read
        return newest


def base_model(about: About, base: Base) -> Transformer:
    """The weights that the run began with, of which it has changed only those that are not frozen."""
    build = ModelBuild("cpu", _dtype(about))
    if not base.path:
        return random_model(about.spec, build, base.seed)
    start = open_checkpoint(resolve(base.path))
    digest = digest_of(start.path)
    if digest != base.digest:
        raise DataError(
            f"the frozen weights in {base.path} are not those of the run: their digest is {digest}, not {base.digest}",
            hint="put the files of the base model back",
        )
    return load_model(about.spec, start.tensors, build)


def empty_model(about: About) -> Transformer:
    model = Transformer(about.spec, ModelBuild("meta", _dtype(about)))
    return model.to_empty(device=torch.device("cpu"))


def _dtype(about: About) -> torch.dtype:
    return DTYPES[about.config.get("precision", {}).get("kind", "float32")]
