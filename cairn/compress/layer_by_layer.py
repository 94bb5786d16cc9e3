"""Calibration text through a model, layer by layer: each layer sees what the changed layers before it give out.

    embed -> [ collect statistics of the layer's inputs -> the caller changes the layer -> run it again ] for each layer

Memory is the model, the hidden states of the text, and the statistics of one layer. Every expert of a mixture sees
every token, so that none is left without statistics.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.compress.statistics import InputStatistics
from cairn.models.attend import PackedDocuments
from cairn.models.experts import ExpertLayer
from cairn.models.layer_loop import PlainResidual, PlainStep
from cairn.models.layers import FeedForward
from cairn.models.quantized.matrices import NamedMatrix, matrices_of, writable_experts
from cairn.models.transformer import Layer, Transformer


class MatrixSite(NamedTuple):
    """A matrix and what enters it."""

    matrix: NamedMatrix
    inputs: InputStatistics


class LayerSites(NamedTuple):
    number: int
    layer: Layer
    sites: list[MatrixSite]


class HiddenChunk(NamedTuple):
    """Some windows of text that pass through a layer at once."""

    x_TD: Tensor
    step: PlainStep


@torch.no_grad()
def walk(
    model: Transformer, windows_BL: Tensor, hessian: bool, chunk_windows: int = 8
) -> Iterator[LayerSites]:
    """Each layer with its statistics; whatever is done to the layer before the next one is asked for counts.

    `hessian`: whether sums of x x^T are collected. `chunk_windows`: windows that are computed at once.
    """
    chunks = [embedded(model, part_BL) for part_BL in windows_BL.split(chunk_windows)]
    for number, layer in enumerate(_layers(model)):
        writable_experts(layer)
        sites = _sites(layer, number, len(chunks), windows_BL.device, hessian)
        with _watching(layer, sites):
            for chunk in chunks:
                with suppress(_AllSeen):
                    run_one(layer, chunk)
        yield LayerSites(number, layer, sites)
        chunks = [chunk._replace(x_TD=run_one(layer, chunk)) for chunk in chunks]


@torch.no_grad()
def final_hidden(model: Transformer, windows_BL: Tensor, chunk_windows: int = 8) -> Tensor:
    """Hidden states behind the last norm, [B * L, D]."""
    parts = []
    for part_BL in windows_BL.split(chunk_windows):
        attend = PackedDocuments([part_BL.shape[1]] * len(part_BL), part_BL.device)
        parts.append(model(part_BL.flatten(), attend.positions_T(), attend))
    return torch.cat(parts)


def embedded(model: Transformer, part_BL: Tensor) -> HiddenChunk:
    attend = PackedDocuments([part_BL.shape[1]] * len(part_BL), part_BL.device)
    positions_T = attend.positions_T()
    x_TD = model.embed(part_BL.flatten(), positions_T)
    return HiddenChunk(x_TD, PlainStep(attend, model.rotations(positions_T, attend, x_TD.dtype)))


def run_one(layer: Layer, chunk: HiddenChunk) -> Tensor:
    return layer(PlainResidual(chunk.x_TD), chunk.step).hidden()


def matrix_widths(model: Transformer) -> list[int]:
    """Columns of every kind of matrix in the layers."""
    found = {
        matrix.read().shape[1]
        for n, layer in enumerate(_layers(model))
        for matrix in matrices_of(layer, n)
    }
    return sorted(found)


def matrix_slots(model: Transformer) -> set[str]:
    """The tensors that all matrices of the layers are made of, by the names of their slots."""
    layers = enumerate(_layers(model))
    return {slot for n, layer in layers for found in matrices_of(layer, n) for slot in found.slots}


def _layers(model: Transformer) -> list[Any]:
    return list(model.layers)


def _sites(
    layer: Layer, number: int, batches: int, device: torch.device, hessian: bool
) -> list[MatrixSite]:
    sites: list[MatrixSite] = []
    shared: dict[int, InputStatistics] = {}  # the inner matrices of all experts have one input
    for matrix in matrices_of(layer, number):
        columns = matrix.read().shape[1]
        if matrix.parameter == "inner_EFD":
            known = shared.setdefault(
                id(matrix.owner), InputStatistics(columns, device, batches, hessian)
            )
            sites.append(MatrixSite(matrix, known))
        else:
            sites.append(MatrixSite(matrix, InputStatistics(columns, device, batches, hessian)))
    return sites


@contextmanager
def _watching(layer: Layer, sites: list[MatrixSite]) -> Iterator[None]:
    """While this lasts, inputs of the layer's matrices are counted."""
    handles = []
    for matrix, inputs in sites:
        if matrix.linear is not None:
            handles.append(matrix.linear.register_forward_pre_hook(_adds_to(inputs)))
    if isinstance(layer.feed_forward, FeedForward):
        handles.append(layer.feed_forward.down.register_forward_pre_hook(_stops(sites)))
    feed = layer.feed_forward
    if isinstance(feed, ExpertLayer):
        own = [site for site in sites if site.matrix.owner is feed]
        handles.append(feed.router.register_forward_pre_hook(_through_experts(feed, own)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _AllSeen(Exception):
    """Raised to skip the last matmul of a layer whose output is not needed yet."""


def _stops(sites: list[MatrixSite]) -> Callable[[Any, tuple[Tensor, ...]], None]:
    def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
        if len({site.inputs.rows for site in sites}) == 1:
            raise _AllSeen

    return hook


def _adds_to(inputs: InputStatistics) -> Callable[[Any, tuple[Tensor, ...]], None]:
    def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
        inputs.add(arguments[0])

    return hook


def _through_experts(
    feed: ExpertLayer, sites: list[MatrixSite]
) -> Callable[[Any, tuple[Tensor, ...]], None]:
    """Every token through every expert, whatever the router chooses."""

    def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
        (x_TD,) = arguments
        seen = False
        for matrix, inputs in sites:
            if matrix.parameter == "down_EDF":
                w_FD, bias_EF = feed.inner_EFD[matrix.expert], feed.inner_bias_EF
                bias_F = None if bias_EF is None else bias_EF[matrix.expert]
                inputs.add(feed.gate.plain(torch.nn.functional.linear(x_TD, w_FD, bias_F)))
            elif not seen:
                inputs.add(x_TD)
                seen = True

    return hook
