"""A training run on disk: a PEFT adapter that anybody can load, and what the run needs to go on.

adapter_config.json, adapter_model.safetensors     the adapter, of the largest rank that is served
tinker.json                                        `About`: base model, rank, steps
optimizer.safetensors                              if it was asked for
"""

import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from cairn.align.tinker.wire import LoraConfig
from cairn.core.errors import DataError
from cairn.models.adapter.folder import (
    PREFIX,
    adapter_slots,
    peft_name,
    read_tensors,
    write_adapter,
)
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.safetensors_file import write_tensors
from cairn.models.transformer import Transformer
from cairn.train.optim.adamw import AdamW

ABOUT, OPTIMIZER = "tinker.json", "optimizer.safetensors"
Tensors = dict[str, Tensor]  # parameters of an adapter, by path


class About(msgspec.Struct, frozen=True):
    """Metadata of saved weights."""

    base_model: str
    lora: LoraConfig
    steps: int


def save_run(
    model: Transformer, adapter: AdapterSpec, about: About, optimizer: AdamW | None, folder: Path
) -> None:
    """The adapter as it lies in the model. The folder is complete or does not exist."""
    unfinished = folder.with_name(f".{folder.name}.saving")
    write_adapter(model, adapter, unfinished, about.base_model)
    if optimizer is not None:
        roles = optimizer.tensors().items()
        states = {f"{role}/{name}": one.cpu() for role, all_ in roles for name, one in all_.items()}
        write_tensors(states, unfinished / OPTIMIZER)
    (unfinished / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def about_of(folder: Path) -> About:
    file = folder / ABOUT
    if not file.is_file():
        raise DataError(f"{folder} has no {ABOUT}", hint="it was not saved by this server")
    return msgspec.json.decode(file.read_bytes(), type=About)


def read_values(model: Transformer, like: Tensors, folder: Path) -> Tensors:
    """The adapter of a folder, as tensors that have the shapes of `like`; the model is left as it is."""
    stored = read_tensors(folder)
    values = {name: torch.zeros_like(one) for name, one in like.items()}
    for slot in adapter_slots(model):
        name = PREFIX + peft_name(model.spec, slot.name)
        if name not in stored or tuple(stored[name].shape) != slot.shape:
            shape = list(stored[name].shape) if name in stored else "nothing"
            raise DataError(f"{folder}: {name} is {shape}, this server wants {list(slot.shape)}")
        values[slot.parameter][slot.index] = stored[name].to(values[slot.parameter])
    return values


def has_optimizer(folder: Path) -> bool:
    return (folder / OPTIMIZER).is_file()


def load_optimizer(optimizer: AdamW, folder: Path) -> None:
    stored = load_file(folder / OPTIMIZER)
    for role, tensors in optimizer.tensors().items():
        for name, one in tensors.items():
            one.copy_(stored[f"{role}/{name}"])
