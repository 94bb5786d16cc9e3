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
