"""Adapters with lively numbers for tiny checkpoints, as the folders that PEFT writes."""

from pathlib import Path

import torch

from cairn.models.adapter.attach import attach
from cairn.models.adapter.folder import adapter_slots, write_adapter
from cairn.models.adapter.merge import merge
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.transformer import Transformer
from cairn.models.weights import fill_random


def adapted(base: Path | Transformer, spec: AdapterSpec, seed: int = 1) -> Transformer:
    """The base with a new adapter whose B is not zero, so that answers differ."""
    model = open_checkpoint(base).load("cpu", torch.float32) if isinstance(base, Path) else base
    made = attach(model, model.spec, spec, ModelBuild("meta", torch.float32))
    fill_random(model, adapter_slots(model), "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in made:
            getattr(one, "init_magnitudes", lambda: None)()
            for name, parameter in one.named_parameters():
                if name.startswith("b"):
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def write(base: Path | Transformer, spec: AdapterSpec, folder: Path, seed: int = 1) -> Transformer:
    """A folder for PEFT and engines, and the model with the adapter merged: what they have to answer like."""
    model = adapted(base, spec, seed)
    write_adapter(model, spec, folder)
    merge(model)
    return model
