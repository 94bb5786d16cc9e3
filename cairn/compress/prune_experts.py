"""Expert pruning by saliency: the mean contribution of an expert to its tokens (REAP, arXiv:2510.13999).

    saliency of an expert = mean over the tokens that are sent to it of  router weight * |output of the expert|

Every layer loses equally many, because a checkpoint has one number for all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from cairn.compress.layer_by_layer import final_hidden
from cairn.core.errors import ConfigError
from cairn.models.experts import ExpertLayer
from cairn.models.spec import Experts
from cairn.models.transformer import Transformer


def expert_layers(model: Transformer) -> list[ExpertLayer]:
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def check_keep(model: Transformer, keep: int) -> None:
    experts = model.spec.experts
    if experts is None:
        raise ConfigError(
            f"this {model.spec.family} model has no experts", hint="use --sparsity or --pattern"
        )
    if not experts.per_token <= keep < experts.count:
        raise ConfigError(
            f"{keep} experts cannot be kept of {experts.count}, of which a token visits {experts.per_token}",
            hint=f"keep {experts.per_token} to {experts.count - 1}",
        )
    if not fits_groups(experts, keep):
        raise ConfigError(
            f"{keep} experts cannot be kept of {experts.count}: a token visits {experts.per_token} in "
            f"{experts.top_groups} of {experts.groups} groups, which have equally many",
            hint=f"keep a multiple of {experts.groups}",
        )


def fits_groups(experts: Experts, keep: int) -> bool:
    """Can so many experts be split over the groups, and does a token find enough in those that it may visit?"""
    return not keep % experts.groups and (
        experts.per_token <= experts.top_groups * keep // experts.groups
    )


@torch.no_grad()
def saliencies(model: Transformer, windows_BL: Tensor, chunk_windows: int = 8) -> list[Tensor]:
    """Saliency of each expert [E] for each layer with experts; an expert without tokens has 0."""
    layers = expert_layers(model)
    sums = [torch.zeros(layer.experts.count, dtype=torch.float64) for layer in layers]
    visits = [torch.zeros(layer.experts.count, dtype=torch.float64) for layer in layers]
    with _watching(layers, sums, visits):
        final_hidden(model, windows_BL, chunk_windows)
    return [total / count.clamp(min=1) for total, count in zip(sums, visits, strict=True)]


def keep_best(model: Transformer, saliency: list[Tensor], keep: int) -> None:
    """Leave out all but the best experts of each layer; the order of those that stay is kept."""
    check_keep(model, keep)
    for layer, saliency_E in zip(expert_layers(model), saliency, strict=True):
        kept = _best_of_groups(saliency_E, keep, layer.experts.groups)
        experts = msgspec.structs.replace(layer.experts, count=keep)
        layer.experts = layer.router.experts = experts
        for owner, name in (
            (layer, "inner_EFD"),
            (layer, "inner_bias_EF"),
            (layer, "down_EDF"),
            (layer, "down_bias_ED"),
            (layer.router, "weight"),
            (layer.router, "bias_E"),
            (layer.router, "logit_bias_E"),
        ):
            value = getattr(owner, name)
            if value is not None:
                chosen = value.detach()[kept.to(value.device)].clone()
                setattr(owner, name, nn.Parameter(chosen, requires_grad=False))
    spec = model.spec
    assert spec.experts is not None
    model.spec = msgspec.structs.replace(
        spec, experts=msgspec.structs.replace(spec.experts, count=keep)
    )


def _best_of_groups(saliency_E: Tensor, keep: int, groups: int) -> Tensor:
    """The numbers of the experts that stay, ascending: equally many of each group that tokens choose among."""
    best_GI = saliency_E.view(groups, -1).topk(keep // groups).indices
    first_G1 = torch.arange(groups)[:, None] * (len(saliency_E) // groups)
    return (best_GI + first_G1).flatten().sort().values


@contextmanager
def _watching(
    layers: list[ExpertLayer], sums: list[Tensor], visits: list[Tensor]
) -> Iterator[None]:
    handles = [
        layer.router.register_forward_hook(_hook(layer, total, count))
        for layer, total, count in zip(layers, sums, visits, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: ExpertLayer, total_E: Tensor, count_E: Tensor) -> Any:
    def hook(module: Any, arguments: tuple[Tensor], found: tuple[Tensor, Tensor]) -> None:
        (x_TD,), (weights_TN, chosen_TN) = arguments, found
        for expert in range(layer.experts.count):
            at_T, place_T = (chosen_TN == expert).nonzero(as_tuple=True)
            if len(at_T):
                size_M = layer.expert(expert, x_TD[at_T]).float().norm(dim=-1)
                total_E[expert] += float((weights_TN[at_T, place_T].float() * size_M).sum())
                count_E[expert] += len(at_T)

    return hook
