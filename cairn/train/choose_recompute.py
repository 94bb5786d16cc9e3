"""Resolution of `auto`: activation recomputation, and the number of offloaded layers.

A CPU has nothing to choose. On one GPU the least recomputation that fits is chosen, from what `memory` predicts.
"""

import math
from pathlib import Path

import torch

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.hw.host import read_memory
from cairn.models.spec import ModelSpec
from cairn.train.config import Train
from cairn.train.memory import fitting, host_bytes, room_of, with_offloaded, with_recompute
from cairn.train.offload import SLAB
from cairn.train.recompute_kinds import Recompute

OF_HOST = 0.5  # of the host's memory, for activations that wait there


def resolve_recompute(
    config: Train, spec: ModelSpec, device: torch.device, fused: bool, frozen: int
) -> tuple[Train, list[str]]:
    """The recipe without `auto`, with the number of layers to offload, and what was chosen in their place."""
    precision, several = config.precision, config.parallel.world() > 1
    if device.type != "cuda":
        return _without_device(config)
    if precision.recompute != "auto" and not precision.offload_activations:
        return config, []
    if precision.offload_activations and not fused and precision.recompute not in ("auto", "none"):
        raise ConfigError(
            f"precision.offload_activations with recompute {precision.recompute} in the plain form, which moves what "
            "it does not compute again",
            hint="use recompute auto, or precision.kernels fused",
        )
    if several and precision.recompute == "auto":
        # The layout divides what is predicted for one process.
        config = with_recompute(config, "selective" if fused else "none")
        if not precision.offload_activations:
            return config, [
                "recompute selective because the layout divides what is predicted for one process; "
                "override: --precision.recompute"
            ]
    room = room_of(precision, torch.cuda.get_device_properties(device).total_memory)
    host = host_room(config)
    config = fitting(spec, config, fused, room, frozen, host - SLAB)  # whole slabs are pinned
    return config, _recompute_notes(config, spec, fused, room, host, precision.offload_activations)


def _recompute_notes(
    config: Train, spec: ModelSpec, fused: bool, room: float, host: float, offloads: bool
) -> list[str]:
    """Log lines with the choice and its reason. `offloads`: the recipe allows offloading."""
    kind, moved = config.precision.recompute, config.precision.offload_layers
    note = f"recompute {kind} because {format_bytes(int(room))} may be used"
    if moved:
        there = format_bytes(host_bytes(spec, config, fused))
        return [f"{note}; activations of {moved} of {spec.layers} layers wait on the host: {there}"]
    notes = [f"{note}; override: --precision.recompute"]
    if offloads and kind == "full":
        limit = "" if math.isinf(host) else f" of {format_bytes(int(host))}"
        notes.append(
            f"offload_activations does not suffice: the host's share{limit} (precision.offload_gib) or the "
            "device is too small for the layers that it would have to move"
        )
    return notes


def _without_device(config: Train) -> tuple[Train, list[str]]:
    """Resolution on a CPU, which has no offloading and no memory limit."""
    notes = []
    if config.precision.offload_activations:
        config = with_offloaded(config, 0)
        notes.append("offload_activations is left out: a CPU computes in the host's memory")
    if config.precision.recompute == "auto":
        config = with_recompute(config, "none")
        notes.append(
            "recompute none because the host's memory is not counted; override: --precision.recompute"
        )
    return config, notes


def host_room(config: Train) -> float:
    """Bytes of the host's memory that this rank may pin."""
    configured = config.precision.offload_gib * 2**30
    half = (read_memory(Path("/"))[0].usable_bytes or math.inf) * OF_HOST
    ranks = min(config.parallel.world(), torch.cuda.device_count())
    return (configured or half) / max(ranks, 1)


def recompute_kind(config: Train) -> Recompute:
    """Recomputation of a recipe returned by `resolve_recompute`."""
    kind = config.precision.recompute
    assert kind != "auto"  # resolved
    return kind
