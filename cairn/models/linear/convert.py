"""Gives all matrices of a model another form, one after another, but for lookup and output projection.

Experts have forms of their own: `mxfp4` is one of experts alone, as gpt-oss stores them.
"""

from typing import cast

import torch

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.kernels.cpu.compiled import ON_ARM
from cairn.kernels.cpu.level_rows import rounded_q8_0, rounded_rows
from cairn.models.experts import ExpertLayer
from cairn.models.linear.blocks import BlocksForm, RoundedRows
from cairn.models.linear.maps import Linear, Vocabulary, linears
from cairn.models.linear.registry import EXPERT_FORMS, FORMS, expert_form, form_class
from cairn.models.mtp import DraftHead
from cairn.models.transformer import Transformer


@torch.inference_mode()
def convert_weights(model: Transformer, name: str, *, release: bool = False) -> str:
    """Says what was done. `release`: nothing else uses the model, so the numbers as they were are not kept."""
    layers = [part for part in model.modules() if isinstance(part, ExpertLayer)]
    parts = [p for p in linears(model) if not isinstance(p, Vocabulary)] if name in FORMS else []
    _check(model, name, parts, layers)
    nbytes = 0
    for part in parts:
        packed = form_class(name)(part.joined())
        part.take(packed)
        nbytes += packed.nbytes
        if release:
            part.release()
    for layer in layers:
        make = expert_form(name)
        forms = make(layer.inner_EFD.data), make(layer.down_EDF.data)
        layer.take(forms, release=release)
        nbytes += sum(form.nbytes for form in forms)
    what = [f"{len(parts)} matrices"] if parts else []
    what += [f"experts of {len(layers)} layers"] if layers else []
    about = (FORMS.get(name) or EXPERT_FORMS[name]).about
    size = format_bytes(nbytes, "binary")
    return f"weights: {' and '.join(what)} as {about}, {size}; exact: --weights float"


def _check(model: Transformer, name: str, parts: list[Linear], layers: list[ExpertLayer]) -> None:
    """Refuse what has no such form, before anything is changed."""
    for part in parts:
        if why_not := form_class(name).obstacle(part.matrices()[0]):
            raise ConfigError(f"no {name} weights: {why_not}", hint="leave out --weights")
    if name not in FORMS and not layers:
        raise ConfigError(
            f"no {name} weights: this {model.spec.family} model has no experts",
            hint="leave out --weights, or use --weights fp8",
        )
    if layers and name not in EXPERT_FORMS:
        raise ConfigError(
            f"no {name} weights: this {model.spec.family} model has experts",
            hint=f"forms of experts: {', '.join(EXPERT_FORMS)}",
        )
    for layer in layers:
        x_TD = layer.router.weight.data
        if x_TD.is_cuda and not _has_kernels(layer, x_TD):
            raise ConfigError(
                f"no {name} weights: the experts of this {model.spec.family} model have no kernel here",
                hint="leave out --weights: groups of experts and tensor-parallel shards multiply in floating point",
            )


def _has_kernels(layer: ExpertLayer, x_TD: torch.Tensor) -> bool:
    """Asked of a GPU alone: the kernels are Triton's, which a CPU does without."""
    from cairn.models.fused_experts import has_kernels

    return has_kernels(layer, x_TD)


@torch.inference_mode()
def convert_drafter(head: DraftHead, model: Transformer) -> str | None:
    """A head that drafts into the form that the model's matrices were converted to: what it guesses is verified anyway.

    None: those are as they were loaded. A matrix that has no such form stays as it is. Beside packed blocks on a CPU
    the head is in 8 bits, which their kernels multiply with: blocks of Q8_0, on ARM rows of levels.
    """
    if any(isinstance(part.form, BlocksForm) for part in linears(model)):
        return _round_drafter(head)
    forms = {type(part.form) for part in linears(model) if not isinstance(part, Vocabulary)}
    name = next((name for name in FORMS if forms == {form_class(name)}), None)
    if name is None:
        return None
    for part in linears(head):
        if not form_class(name).obstacle(part.matrices()[0]):
            part.take(form_class(name)(part.joined()))
            part.release()
    return f"drafts: the head as {FORMS[name].about}, as the model"


def _round_drafter(head: DraftHead) -> str | None:
    parts = [part for part in linears(head) if part.form is None and part.addend is None]
    parts = [part for part in parts if RoundedRows.obstacle(part.shape_NK()[1]) is None]
    for part in parts:
        rows = [len(weight) for weight in part.matrices()]
        part.take(RoundedRows(part.joined(), rows, rounded_rows if ON_ARM else rounded_q8_0))
        part.release()
    size = format_bytes(sum(cast(BlocksForm, part.form).nbytes for part in parts), "binary")
    return f"drafts: {len(parts)} matrices of the head in 8 bits, {size}" if parts else None


@torch.inference_mode()
def convert_head(model: Transformer, *, release: bool = False) -> str:
    """The output projection in float8 rows; what is looked up stays as it is."""
    form, head = form_class("fp8"), model.head or model.embedding
    weight_VD = head.weight.detach()
    why_not = "the device is a CPU" if not weight_VD.is_cuda else form.obstacle(weight_VD)
    if why_not:
        raise ConfigError(f"no 8-bit head: {why_not}", hint="leave out --head")
    packed = form(weight_VD)
    head.take(packed)
    if release and model.head is not None:
        head.release()
    size = format_bytes(packed.nbytes, "binary")
    return f"head: {len(weight_VD)} rows in float8 by choice, {size}; exact: leave out --head"
