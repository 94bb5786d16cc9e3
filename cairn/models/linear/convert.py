"""Gives all matrices of a model another form, one after another, but for lookup and output projection."""

import torch

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.linear.maps import Vocabulary, linears
from cairn.models.linear.registry import FORMS, form_class
from cairn.models.transformer import Transformer


@torch.inference_mode()
def convert_weights(model: Transformer, name: str, *, release: bool = False) -> str:
    """Says what was done. `release`: nobody else uses the model, so the numbers as they were are not kept."""
    if model.spec.experts is not None:
        raise ConfigError(
            f"no {name} weights: this {model.spec.family} model has experts",
            hint="leave out --weights: only dense models have this form",
        )
    form, parts = form_class(name), [p for p in linears(model) if not isinstance(p, Vocabulary)]
    for part in parts:
        if why_not := form.obstacle(part.matrices()[0]):
            raise ConfigError(f"no {name} weights: {why_not}", hint="leave out --weights")
    nbytes = 0
    for part in parts:
        made = form(part.joined())
        part.take(made)
        nbytes += made.nbytes
        if release:
            part.release()
    size = format_bytes(nbytes, "binary")
    return f"weights: {len(parts)} matrices as {FORMS[name].about}, {size}; exact: --weights float"


@torch.inference_mode()
def convert_head(model: Transformer, *, release: bool = False) -> str:
    """The output projection in float8 rows; what is looked up stays as it is."""
    form, head = form_class("fp8"), model.head or model.embedding
    weight_VD = head.weight.detach()
    why_not = "the device is a CPU" if not weight_VD.is_cuda else form.obstacle(weight_VD)
    if why_not:
        raise ConfigError(f"no 8-bit head: {why_not}", hint="leave out --head")
    made = form(weight_VD)
    head.take(made)
    if release and model.head is not None:
        head.release()
    size = format_bytes(made.nbytes, "binary")
    return f"head: {len(weight_VD)} rows in float8 by choice, {size}; exact: leave out --head"
