"""A checkpoint of any layout as Hugging Face safetensors, which `cairn serve` and everybody else can load.

Reads only the weights, into a model on the host, and writes the folder whole or not at all. The tokenizer's files come
along, so the folder is all that a server needs.
"""

import shutil
from pathlib import Path

import torch

from cairn.core.errors import DataError
from cairn.models.build import Build
from cairn.models.export import export
from cairn.models.transformer import Transformer
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.load import About, load_pieces, read_about
from cairn.train.checkpoint.piece import pieces_of
from cairn.train.precision import DTYPES


def export_checkpoint(checkpoint: Path, out: Path, tokenizer: Path | None) -> None:
    """`out` is replaced if it is there."""
    about = read_about(checkpoint)
    model = empty_model(about)
    parameters = dict(model.named_parameters())
    pieces = pieces_of(list(model.slots()), parameters)
    named = {f"model/{name}": piece for name, piece in pieces.items()}
    load_pieces(checkpoint, named, together=False)
    fresh = out.with_name(f"{out.name}.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    export(model, fresh, like=tokenizer)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def export_newest(run: Path, out: Path, tokenizer: Path | None) -> Path:
    """The newest usable checkpoint of a run, which may go on meanwhile; which one it was."""
    while True:
        found = folders.newest(run / "checkpoints", [])
        if found is None:
            raise DataError(
                f"{run} has no complete checkpoint", hint="train first: cairn train --out"
            )
        try:
            export_checkpoint(found, out, tokenizer)
        except Exception:
            if (found / folders.COMPLETE).exists():
                raise
            continue  # the run has made room for newer ones while this one was read
        return found


def empty_model(about: About) -> Transformer:
    kind = about.config.get("precision", {}).get("kind", "float32")
    model = Transformer(about.spec, Build("meta", DTYPES[kind]))
    return model.to_empty(device=torch.device("cpu"))
