"""A tower's weights out of a checkpoint, and the decoder's tensors beside them under the names of a text model."""

import re

import torch
from torch import Tensor

from cairn.core.errors import WeightsError
from cairn.models.build import ModelBuild
from cairn.models.safetensors_file import TensorSource
from cairn.models.vision.names import TOWERS, UNUSED, part_of, tower_source
from cairn.models.vision.spec import VisionSpec
from cairn.models.vision.tower import Tower
from cairn.models.weights import fill_shares, read_source


class PartOfCheckpoint:
    """The tensors of one part of a checkpoint, under the names that they have there. A `TensorSource`."""

    def __init__(self, tensors: TensorSource, part: str) -> None:
        self._tensors, self.part = tensors, part
        parts = ((name, *part_of(name)) for name in tensors.names())
        self._home = {inner: name for name, own, inner in parts if own == part}

    def names(self) -> list[str]:
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._home[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(self._home[name])

    def tensor(self, name: str) -> Tensor:
        return self._tensors.tensor(self._home[name])


def load_tower(spec: VisionSpec, tensors: TensorSource, build: ModelBuild) -> Tower:
    """`tensors`: of the whole checkpoint; `build` says where and in which type."""
    tower = Tower(spec, build._replace(device="meta"))
    parts = {part: PartOfCheckpoint(tensors, part) for part in ("tower", "projector")}
    style, kind, width = spec.tower.shape.family, spec.projector.kind, spec.tower.shape.hidden
    shares, used = {}, {part: set[str]() for part in parts}
    for slot in tower.slots():
        part, place = tower_source(style, kind, slot.name, width)
        if place.tensor not in parts[part].names():
            raise WeightsError(
                f"the checkpoint has no tensor {place.tensor} of its {part}",
                hint="the weights do not belong to this config.json, or the download is incomplete",
            )
        used[part].add(place.tensor)
        shares[slot.name] = read_source(slot, place, parts[part])
    for part, tensors_there in parts.items():
        _check_all_used(spec, part, sorted(set(tensors_there.names()) - used[part]))
    with torch.no_grad():
        fill_shares(tower, shares, build.device)
    return tower.requires_grad_(False).eval()


def _check_all_used(spec: VisionSpec, part: str, extra: list[str]) -> None:
    """Layers behind the last one that is read are left in the file, as is a norm behind them."""
    style = TOWERS[spec.tower.shape.family]
    later = re.compile(re.escape(style.layer) + r"(\d+)\.")
    for name in extra:
        layer = later.match(name)
        behind = layer is not None and int(layer[1]) >= spec.tower.shape.layers
        norm = name.startswith(style.outside.get("post_norm", "\0")) and not spec.tower.post_norm
        if not (UNUSED.search(name) or behind or norm):
            raise WeightsError(
                f"{name} has no place in the {part} of a {spec.family} model",
                hint="the config.json does not describe these weights",
            )
