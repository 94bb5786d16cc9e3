"""Opens a model that is about to be made smaller: in floating point, on one device, with its tokenizer."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from cairn.core.errors import ConfigError, UnsupportedModel
from cairn.models.checkpoint import default_device
from cairn.models.hub import resolve
from cairn.models.runnable import RANDOM, OpenModel, open_model
from cairn.models.safetensors_file import read_json
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Whole(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer | None
    folder: Path | None  # of the source, where it is a folder in Hugging Face's format
    file: Path | None  # of the source, where it is a GGUF file
    stored: torch.dtype  # of scales and of weights that stay whole, in what will be written
    notes: list[str]


def check_out(out: Path) -> None:
    """Check before any computation that the output folder is new or empty, and writable."""
    if not out.name:  # the folder appears by a rename, which is not possible from inside it
        raise ConfigError(f"--out {out} is the folder that this runs in", hint="name a new folder")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, not a folder", hint="choose another --out")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty", hint="choose another --out")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} is a file, not a folder", hint="choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"{out} cannot be made: you may not write to {parent}", hint="choose another --out"
        )


def open_whole(name: str, device: str, dtype: str) -> Whole:
    """`dtype`: of what will be written; auto: as stored, and bfloat16 where the source is a quantised file."""
    path = None if name.startswith(RANDOM) else resolve(name)
    if path is not None and path.is_dir() and (path / "config.json").is_file():
        _refuse_quantised(path)
    opened = open_model(name)
    if opened.vision is not None:
        raise ConfigError(
            f"{name} sees pictures, and what is written here would lose its tower",
            hint="quantise or prune a text model",
        )
    notes = []
    stored, quantised = torch.bfloat16, False
    if opened.checkpoint is not None:
        bits = opened.checkpoint.stored_bits()
        quantised = bits < 16
        stored = torch.bfloat16 if quantised else opened.checkpoint.stored_dtype()
        if quantised:
            notes.append(
                f"{name} is quantised to at most {bits:.3g} bits a weight in its layers: what it lost before stays lost"
            )
    if dtype != "auto":
        stored = DTYPES[dtype]
    model = _load(opened, device, stored)
    is_file = path is not None and path.is_file()
    return Whole(
        model,
        opened.tokenizer,
        path if path is not None and path.is_dir() else None,
        path if is_file else None,
        stored,
        notes,
    )


def _load(opened: OpenModel, device: str, stored: torch.dtype) -> Transformer:
    """Values as they will be stored; on a CPU computed with in float32."""
    device = default_device() if device == "auto" else device
    if opened.checkpoint is None:
        loaded = opened.load(device, str(stored).removeprefix("torch.")).model
    else:  # a quantised file is dequantised
        loaded = opened.checkpoint.load(device, stored)
    if loaded.embedding.weight.device.type == "cuda":
        return loaded
    return loaded.float()


def _refuse_quantised(folder: Path) -> None:
    config = read_json(folder / "config.json")
    found = config.get("quantization_config")
    if found is None and (folder / "hf_quant_config.json").is_file():
        found = {"quant_method": "modelopt"}
    if found is None:
        return
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else "unknown"
    raise UnsupportedModel(
        f"{folder} is quantised already ({method}), and what is written here is made of weights in 16 bits",
        hint="begin with the model in 16 bits",
    )
